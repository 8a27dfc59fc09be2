r"""One optimiser step (algorithm 1): gradient, clipping to a global norm, Adam and Muon."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from lib.muon import MOMENTUM, by_width
from lib.network import Conditioner, ThetaTaps
from lib.posterior import Noise, VariationalPosterior

BETAS = (0.9, 0.99)
EPS = 1e-8
CLIP_NORM = 10.0

Step = Callable[[Noise, Tensor], tuple[Tensor, Tensor]]


class Optimizer:
    r"""Adam, and Muon for some matrices, on one long vector that has a place for every weight.

    With g the gradient, clipped to ``CLIP_NORM``, and t the steps so far, Adam's is

    .. math:: m \leftarrow \beta_1 m + (1-\beta_1) g,\quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,
        \quad w \leftarrow w - \eta\,\frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    A few operations then serve some eighty small weights, which stay the module's own tensors.
    Rates and t are tensors, and all state changes in place: a captured step sees the new values.

    Args:
        adam: Weights for Adam.
        matrices: Weights for Muon, with two dimensions.
    """

    def __init__(self, adam: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
        adam, self.stacks = list(adam), by_width(list(matrices))
        self.weights = adam + [w for stack in self.stacks for w in stack.matrices]
        self.shapes = [w.shape for w in adam] + [stack.shape for stack in self.stacks]
        self.num_adam = sum(w.numel() for w in adam)
        # A family without any flow over time has no weights.
        like = self.weights[0] if self.weights else torch.empty(0)
        whole = like.new_zeros(sum(map(prod, self.shapes)))
        self.gradient, self.average, self.move = (torch.zeros_like(whole) for _ in range(3))
        self.square = torch.zeros_like(whole[: self.num_adam])
        self.count, self.rate = whole.new_zeros(2, dtype=torch.float64).unbind()
        self.gradients, self.moves = self._views(self.gradient), self._views(self.move)
        parts = (self._parts(whole) for whole in (self.gradient, self.average, self.move))
        self.stacked = list(zip(self.stacks, *parts, strict=True))

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        return [*self.weights, self.average, self.square, self.count]

    def set_rate(self, rate: float) -> None:
        """The learning rate, one for all."""
        self.rate.fill_(rate)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Clip and move; returns 1.0 if a gradient was not finite, when nothing is changed."""
        torch._foreach_copy_(self.gradients, gradients)
        norm = torch.linalg.vector_norm(self.gradient)
        finite = norm.isfinite()
        self.gradient *= (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
        # With g, the rates and the weights of the averages all 0, nothing moves.
        self.gradient.masked_fill_(~finite, 0.0)
        good = finite.to(self.gradient)
        self._adam(good)
        self._muon(good)
        self.move *= good * self.rate
        torch._foreach_sub_(self.weights, self.moves)
        return 1 - good

    def _adam(self, good: Tensor) -> None:
        n, (beta, beta_square) = self.num_adam, BETAS
        gradient, average = self.gradient[:n], self.average[:n]
        average.lerp_(gradient, (1 - beta) * good)
        self.square.lerp_(gradient.square(), (1 - beta_square) * good)
        self.count += good
        t = self.count.clamp(min=1.0)  # 0 if the first gradient was not finite
        scale = (self.square / (1 - beta_square**t)).sqrt_().add_(EPS)
        torch.div(average / (1 - beta**t), scale, out=self.move[:n])

    def _muon(self, good: Tensor) -> None:
        self.average[self.num_adam :].lerp_(self.gradient[self.num_adam :], (1 - MOMENTUM) * good)
        for stack, gradient, average, move in self.stacked:
            move.copy_(stack.direction(gradient, average))

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Muon's stacks in a long vector."""
        sizes = [self.num_adam, *(prod(stack.shape) for stack in self.stacks)]
        parts = whole.split(sizes)[1:]
        return [part.view(stack.shape) for part, stack in zip(parts, self.stacks, strict=True)]

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The place of each weight in a long vector, with the weight's shape."""
        shapes = self.shapes[: len(self.shapes) - len(self.stacks)]
        parts = whole[: self.num_adam].split([prod(shape) for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for stack, part in zip(self.stacks, self._parts(whole), strict=True):
            views += stack.views(part)
        return views


def make_optimizer(q: VariationalPosterior, kind: str) -> Optimizer:
    """Adam for every weight; or Muon for the matrices of the path's networks, Adam for the rest.

    Weights of q(ϑ) are left out where a chain keeps gradients from them.
    """
    networks = [m for m in q.modules() if isinstance(m, Conditioner | ThetaTaps)]
    matrices = [w for m in networks for w in m.matrices()] if kind == "muon" else []
    held = q.theta_flow.parameters() if q.family.base else []
    apart = {id(w) for w in [*matrices, *held]}
    return Optimizer([w for w in q.parameters() if id(w) not in apart], matrices)


def make_step(loss: Step, optimizer: Optimizer) -> Step:
    """One step as a function of (noise, α): gradient, clipping, update; no sync with the device.

    Returns the reported ELBO and 1.0 if the gradient was not finite, when nothing is updated.
    """

    def step(noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Take the step; see above."""
        value, reported = loss(noise, alpha)
        if not optimizer.weights:
            return reported, torch.zeros_like(reported)
        # Such as q(ϑ)'s weights in a bound of the path alone.
        options = {"allow_unused": True, "materialize_grads": True}
        return reported, optimizer.step(torch.autograd.grad(value, optimizer.weights, **options))

    return step
