"""One step: against textbook Adam and Muon, what must not count, and recorded against eager."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lib
from lib import cuda_graph, train
from lib.elbo import elbo
from lib.muon import COEFFICIENTS
from lib.posterior import Noise, VariationalPosterior
from lib.smoother import Chain
from lib.start import find_start
from lib.step import CLIP_NORM, Optimizer, Step, make_optimizer, make_step
from lib.supply import ThetaSupply

ADAM, MATRICES = [(3,), (2, 3), (4,)], [(5, 5), (3, 8), (9, 2), (4, 50)]


def made(shapes: Sequence[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def optimizer_of(weights: list[torch.nn.Parameter]) -> Optimizer:
    """Of all the shapes above, in their order."""
    return Optimizer(weights[:3], weights[3:])


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz for one matrix, as printed: rows ≤ columns, or lying on its side."""
    if g.shape[0] > g.shape[1]:
        return orthogonal(g.T).T
    a, b, c = COEFFICIENTS
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


class Textbook:
    """Adam (Kingma and Ba) for the first weights, Muon for the last, each by itself."""

    def __init__(self, weights: list[Tensor], num_adam: int) -> None:
        self.weights, self.num_adam, self.t = weights, num_adam, 0
        self.m = [torch.zeros_like(w) for w in weights]
        self.v = [torch.zeros_like(w) for w in weights]

    def step(self, gradients: list[Tensor], rate: float) -> None:
        norm = sum(g.square().sum() for g in gradients).sqrt()
        self.t += 1
        for i, (w, g) in enumerate(zip(self.weights, gradients, strict=True)):
            g = g * min(1.0, float(CLIP_NORM / (norm + 1e-6)))
            if i < self.num_adam:
                self.m[i] = 0.9 * self.m[i] + 0.1 * g
                self.v[i] = 0.99 * self.v[i] + 0.01 * g**2
                m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.99**self.t)
                w -= rate * m / (v.sqrt() + 1e-8)
            else:
                self.m[i] = 0.95 * self.m[i] + 0.05 * g
                size = 0.2 * max(w.shape) ** 0.5
                w -= rate * size * orthogonal(0.05 * g + 0.95 * self.m[i])


def test_steps_are_those_of_the_textbook() -> None:
    """Kills a wrong β, bias correction, ε, clip, rate, or a weight that takes another's place.

    Some gradients are clipped, and the rate changes.
    """
    weights = made(ADAM + MATRICES)
    optimizer = optimizer_of(weights)
    book = Textbook([w.detach().clone() for w in weights], 3)
    for i in range(10):
        gradients = [10.0 ** (i % 3 - 1) * torch.randn_like(w) for w in weights]
        by_weight = {id(w): g for w, g in zip(weights, gradients, strict=True)}
        rate = 0.1 / (i + 1)
        optimizer.set_rate(rate)
        assert optimizer.step([by_weight[id(w)] for w in optimizer.weights]) == 0
        book.step(gradients, rate)
        for w, right in zip(weights, book.weights, strict=True):
            assert_close(w.detach(), right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", range(7))
@pytest.mark.parametrize("before", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(value, where, before) -> None:
    """Kills zeroed gradients in place of a skip, and 0/0 where the first step is the bad one."""
    weights = made(ADAM + MATRICES)
    optimizer = optimizer_of(weights)
    optimizer.set_rate(0.1)
    good = [torch.ones_like(w) for w in optimizer.weights]
    bad = [g.clone() for g in good]
    bad[where].view(-1)[-1] = value
    for _ in range(before):
        optimizer.step(good)
    kept = [part.detach().clone() for part in optimizer.state()]
    assert optimizer.step(bad) == 1
    assert all(map(torch.equal, kept, optimizer.state()))
    assert optimizer.step(good) == 0
    assert not any(map(torch.equal, kept, optimizer.state()))
    assert all(part.isfinite().all() for part in optimizer.state())


def test_state_is_all_that_a_step_changes() -> None:
    """Kills an average that the warm-up of a recording would leave moved."""
    twins = [optimizer_of(weights) for weights in [made(ADAM + MATRICES)] * 2]
    gradients = [[torch.randn_like(w) for w in twins[0].weights] for _ in range(3)]
    ends = []
    for optimizer in twins:
        start = [part.detach().clone() for part in optimizer.state()]
        optimizer.set_rate(0.1)
        for gradient in gradients:
            optimizer.step(gradient)
        ends.append([part.detach().clone() for part in optimizer.state()])
        with torch.no_grad():
            torch._foreach_copy_(optimizer.state(), start)
    assert all(map(torch.equal, *ends))
    # And once more with what the first has behind it.
    for gradient in gradients:
        twins[0].step(gradient)
    assert all(map(torch.equal, ends[0], twins[0].state()))


def problem(family: lib.Family | None = None) -> tuple[lib.StateSpaceModel, VariationalPosterior]:
    """OU with four observations, and its q before training; the grid is ``data().grid()``."""
    prior = Normal(torch.tensor([-1.5, 5.0, 0.0]), 0.5)
    seen = lib.GaussianObservation([[1.0]], 1.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), seen, prior, x0=[20.0])
    start = find_start(model, data().grid(), 0)
    return model, VariationalPosterior(model, data().grid(), family or lib.Family(), start, 0)


def data() -> lib.Observations:
    return lib.Observations([0.1, 0.2, 0.3, 0.5], [19.0, 18.0, 18.5, 17.0], dt=0.1)


@pytest.mark.parametrize("kind", ["muon", "adam"])
@pytest.mark.parametrize("family", [lib.Family(), lib.Family(base=False), lib.Family.paper()])
def test_no_weight_is_lost_and_q_of_theta_is_left_out_with_a_chain(kind, family) -> None:
    """Kills a weight twice or not at all, and q(ϑ) moved by a bound that has no gradient for it."""
    _, q = problem(family)
    optimizer = make_optimizer(q, kind)
    of_theta = {id(w) for w in q.theta_flow.parameters()} if family.base else set()
    have = sorted(map(id, optimizer.weights))
    assert have == sorted({id(w) for w in q.parameters() if w.requires_grad} - of_theta)
    assert len(of_theta) == (0 if not family.base else len(list(q.theta_flow.parameters())))
    stacked = sum(len(stack.matrices) for stack in optimizer.stacks)
    assert (stacked > 0) == (kind == "muon")


def test_no_gradient_reaches_q_of_theta_through_the_chain() -> None:
    """Kills a bound of which q(ϑ) is a part after all, and paths whose weights get nothing."""
    model, q = problem()
    noise = q.draw_noise(6, torch.Generator().manual_seed(0))
    for path in (False, True):
        loss = losses(model, q, path)(noise, torch.tensor(1.0))[0]
        of_theta = list(q.theta_flow.parameters())
        gradients = torch.autograd.grad(loss, of_theta, allow_unused=True, retain_graph=True)
        assert all(g is None for g in gradients)
        of_path = make_optimizer(q, "adam").weights
        gradients = torch.autograd.grad(loss, of_path, allow_unused=True)
        assert all(g is not None for g in gradients)


def losses(model: lib.StateSpaceModel, q: VariationalPosterior, path: bool) -> Step:
    """The loss of ``fit`` with two wide draws."""
    grid = data().grid()

    def loss(noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        bound = elbo(model, q, grid, noise, alpha, path, 2)
        return -bound.value - bound.conditional, bound.value.detach()

    return loss


class Tape(TorchDispatchMode):
    """Records the operations below autograd; the replay sees tensors alone, as a graph's does.

    What Python computed stays as it was, and every result keeps its place.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_linalg_check")

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in self.WAITS), func
        result = func(*args, **kwargs or {})
        self.done.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.detach().copy_(value)


def recorded(call: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """In the place of ``cuda_graph.record``: warm-up, recording and replay on a CPU."""
    for _ in range(cuda_graph.NUM_WARM_UP):
        call()
    tape = Tape()
    with tape:
        results = call()
    # A tensor made of Python's numbers would be copied to the device, which cannot be recorded.
    assert not any("lift_fresh" in str(func) for func, *_ in tape.done)

    def replay() -> tuple[Tensor, Tensor]:
        tape.replay()
        return results

    return replay


def with_chain(q: VariationalPosterior, noise: Noise) -> Noise:
    """Noise as ``fit`` hands it to a step."""
    with torch.no_grad():
        return noise._replace(chain=q.chain(q.theta_flow(noise.theta)[0]))


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("family", [lib.Family(), lib.Family(base=False)], ids=["chain", "none"])
def test_recorded_steps_are_the_eager_ones_to_the_last_bit(monkeypatch, path, family) -> None:
    """Kills inputs that are not refilled, a warm-up that counts, a rate or t kept as a number.

    And a step that waits for the device: the tape refuses to look at a tensor's values.
    """
    monkeypatch.setattr(cuda_graph, "record", recorded)
    runs = []
    for record in (False, True):
        model, q = problem(family)
        optimizer, generator = make_optimizer(q, "muon"), torch.Generator().manual_seed(3)
        step = make_step(losses(model, q, path), optimizer)
        step = cuda_graph.captured(step, optimizer.state()) if record else step
        seen = []
        for i in range(5):
            optimizer.set_rate(0.01 * (i + 1))
            noise = with_chain(q, q.draw_noise(6, generator))
            assert (noise.chain is not None) == family.base
            # Noise that is not finite in the third step: no value may be kept from it.
            noise = noise._replace(path=noise.path * (torch.nan if i == 2 else 1.0))
            reported, bad = step(noise, torch.full((), 3.0 - 0.5 * i))
            seen += [reported.clone(), bad.clone()]
            seen += [part.detach().clone() for part in optimizer.state()]
        runs.append(seen)
    bads = [float(value) for value in runs[0][1 :: len(runs[0]) // 5]]
    assert bads == [0.0, 0.0, 1.0, 0.0, 0.0]
    for one, other in zip(*runs, strict=True):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_recorded_step_reads_each_part_of_the_chain_it_is_given(monkeypatch) -> None:
    """Kills a chain made anew inside, one kept from the first call, and parts that change places.

    One part at a time is another draw's; a chain that was a constant would not show it.
    """
    monkeypatch.setattr(cuda_graph, "record", recorded)
    model, q = problem()
    loss, alpha = losses(model, q, True), torch.ones(())
    step = cuda_graph.captured(lambda *given: tuple(v.detach() for v in loss(*given)), [alpha])
    first, other = (
        with_chain(q, q.draw_noise(6, torch.Generator().manual_seed(seed))) for seed in (0, 1)
    )
    values, chains = [], [first.chain]
    for name in ("a", "log_diag", "mean", "log_sd"):  # one state: L has no entry below
        chains.append(first.chain._replace(**{name: getattr(other.chain, name)}))
    for chain in chains:
        noise = first._replace(chain=chain)
        values.append(float(step(noise, alpha)[1]))
        assert values[-1] == float(loss(noise, alpha)[1])
    assert len(set(values)) == len(values)


def test_what_the_first_call_was_given_stays_the_callers(monkeypatch) -> None:
    """Kills a recording that reads, and at the next call overwrites, the caller's own noise."""
    monkeypatch.setattr(cuda_graph, "record", recorded)
    step = cuda_graph.captured(
        lambda noise, alpha: (noise.theta.sum() + sum(p.sum() for p in noise.chain), alpha + 1),
        [torch.ones(())],
    )
    chains = [Chain(*(torch.full((1,), 10.0 * (i + 1)) for _ in range(5))) for i in range(2)]
    noises = [
        Noise(torch.full((1, 1), i + 1.0), torch.zeros(1, 1, 1), c) for i, c in enumerate(chains)
    ]
    alphas = [torch.full((), 3.0), torch.full((), 5.0)]
    seen = [tuple(map(float, step(*given))) for given in zip(noises, alphas, strict=True)]
    assert seen == [(51.0, 4.0), (102.0, 6.0)]
    assert float(noises[0].theta) == 1.0 and float(alphas[0]) == 3.0
    assert [float(part) for part in chains[0]] == [10.0] * 5


def test_a_fit_is_the_same_recorded(monkeypatch) -> None:
    """Kills a kind of step that is never recorded anew: plain, and with the path gradient."""
    made, capture = [], cuda_graph.captured
    monkeypatch.setattr(cuda_graph, "record", recorded)
    monkeypatch.setattr(train, "captured", lambda *args: made.append(1) or capture(*args))
    monkeypatch.setattr(train, "check_mode", lambda *_: None)
    for name in ("EARLY_STEPS", "LAST_STEPS"):
        monkeypatch.setattr(f"lib.supply.{name}", 3)
    config = lib.FitConfig(num_steps=30, num_samples=4, wide_samples=2, refits=2)
    fits = []
    for mode in ("eager", "cuda_graph"):
        model = problem()[0]
        options = replace(config, mode=mode)
        fits.append(lib.fit(model, data(), options, device="cpu", progress=False))
    eager, graph = fits
    assert len(made) == 2
    assert eager.history.elbo.tolist() == graph.history.elbo.tolist()
    assert all(map(torch.equal, eager.q.parameters(), graph.q.parameters()))


def test_weights_stay_the_modules_own() -> None:
    """Kills weights that are views of one long vector, and gradients left on them."""
    config = lib.FitConfig(num_steps=2, num_samples=2, refits=0)
    for w in lib.fit(problem()[0], data(), config, device="cpu", progress=False).q.parameters():
        assert w.grad is None and w.untyped_storage().nbytes() == w.numel() * w.element_size()


def test_noise_is_drawn_without_a_wait() -> None:
    """Kills tails that are chosen, or a chain that is made, by a look at a tensor's values."""
    model, q = problem()
    config = lib.FitConfig(num_samples=3, wide_samples=2)
    supply = ThetaSupply(model, q, data().grid(), config, torch.Generator())
    q.linearised()  # made once a fit, of what the grid holds
    with Tape():
        supply.noise()
        supply.tails = torch.zeros(10, 3)
        supply.stock.clear()
        noise = supply.noise()
    assert noise.theta[3:].eq(0).all() and noise.theta[:3].ne(0).all()


def test_a_graph_is_warmed_up_on_a_side_stream_then_recorded_and_replayed(monkeypatch) -> None:
    """Kills a warm-up on the recording stream, and work that is recorded before it has ended."""
    seen: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            seen.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def inside(thing: SimpleNamespace):
        seen.append(f"begin {thing.name}")
        yield
        seen.append(f"end {thing.name}")

    graph = SimpleNamespace(name="graph", replay=lambda: seen.append("replay"))
    fake = {"Stream": Stream, "current_stream": partial(Stream, "main"), "stream": inside}
    fake |= {"CUDAGraph": lambda: graph, "graph": inside}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**fake))
    results = torch.zeros(()), torch.ones(())
    replay = cuda_graph.record(lambda: seen.append("call") or results)
    warm = ["side waits for main", "begin side", "call", "call", "call", "end side"]
    assert seen == [*warm, "main waits for side", "begin graph", "call", "end graph"]
    assert replay() is replay() is results and seen[-2:] == ["replay", "replay"]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_the_whole_step_is_one_graph() -> None:
    """Kills a break in the graph, and a rate, α or t that is a number in Python."""
    model, q = problem()
    optimizer, graphs = make_optimizer(q, "muon"), []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = make_step(losses(model, q, True), optimizer)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, backend=count, fullgraph=True)
        for i in range(3):
            optimizer.set_rate(0.01 * (i + 1))
            noise = with_chain(q, q.draw_noise(4, torch.Generator().manual_seed(i)))
            assert compiled(noise, torch.full((), 3.0 - i))[1] == 0
    assert len(graphs) == 1
