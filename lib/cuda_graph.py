"""A step recorded once as a CUDA graph, then replayed: one launch in place of a thousand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.posterior import Noise
from lib.step import Step

NUM_WARM_UP = 3  # calls before the recording, in which libraries set themselves up


def captured(step: Step, state: Sequence[Tensor]) -> Step:
    """The same step, recorded at its first call and replayed from then on.

    Noise and α are copied into the tensors that the recording reads, and the two results are
    tensors that the next call writes over. Nothing waits for the device after the first call.

    Args:
        step: With fixed shapes, without a look at a tensor's values.
        state: All that a step changes, in place; the warm-up leaves it as it was.
    """
    replay: list[Callable[[], tuple[Tensor, Tensor]]] = []
    inputs: list[Tensor] = []

    def replayed(noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Take the step; see above."""
        given = [noise.theta, noise.path, *(noise.chain or ()), alpha]
        if not replay:
            inputs.extend(part.clone() for part in given)
            before = [part.detach().clone() for part in state]
            chain = None if noise.chain is None else type(noise.chain)(*inputs[2:-1])
            own = Noise(*inputs[:2], chain)
            replay.append(record(lambda: step(own, inputs[-1])))
            with torch.no_grad():
                torch._foreach_copy_(list(state), before)
        torch._foreach_copy_(inputs, given)
        return replay[0]()

    return replayed


def record(call: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Warm up on a side stream, record; returns the replay, whose results stay in one place."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> tuple[Tensor, Tensor]:
        """Run the recording again, on what its inputs now hold."""
        graph.replay()
        return results

    return replay
