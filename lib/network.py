"""What the flows share: conditioner network (appendix B), taps, pieces of their affine maps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

LOG_SCALE_BOUND = 3.0


def soft_bound(s: Tensor, bound: float = LOG_SCALE_BOUND) -> Tensor:
    """Smooth limit of a log scale: b·tanh(s/b), the identity near 0."""
    return bound * torch.tanh(s / bound)


def lower_product(
    entries: Float[Tensor, "entries time mc"], z: Float[Tensor, "state time mc"]
) -> Float[Tensor, "state time mc"]:
    """Product of a strictly lower triangular matrix, given row by row, with z."""
    rows, start = [torch.zeros_like(z[0])], 0
    for r in range(1, len(z)):
        rows.append((entries[start : start + r] * z[:r]).sum(0))
        start += r
    return torch.stack(rows)


def solve_lower_transposed(
    entries: Float[Tensor, "entries time mc"],
    inverse_diag: Float[Tensor, "state time mc"],
    g: Float[Tensor, "state time mc"],
) -> Float[Tensor, "state time mc"]:
    """Solve L'w = g for each time, L lower triangular; where 1/diag L is 0, so is w."""
    p = len(g)
    w: list[Tensor] = [g[0]] * p
    for c in reversed(range(p)):
        rest = g[c]
        for r in range(c + 1, p):
            rest = rest - entries[r * (r - 1) // 2 + c] * w[r]
        w[c] = rest * inverse_diag[c]
    return torch.stack(w)


class Pushed(NamedTuple):
    r"""The score pushed through a flow z' = f(z, ϑ) with Jacobian J.

    ``before`` is :math:`\nabla_z - \partial_z\log|J|`, ``after`` is J⁻ᵀ of it. The gradient
    :math:`\partial_\vartheta\log|J| + (\partial_\vartheta z')^\top` after is that of Σ
    weights·outputs, whose ``outputs`` depend on ϑ directly, at the same z; both lists are empty
    where it is not asked for.
    """

    before: Float[Tensor, "state time mc"]
    after: Float[Tensor, "state time mc"]
    outputs: list[Tensor]
    weights: list[Tensor]


class NetworkTrace(NamedTuple):
    """Outputs of a ``Conditioner`` and what it made on the way, ϑ's part of each sum by itself."""

    out: Float[Tensor, "out time mc"]
    hidden: list[Float[Tensor, "hidden time mc"]]
    from_theta: Float[Tensor, "hidden mc"]
    skip: Float[Tensor, "out time mc"] | None


class Conditioner(nn.Module):
    r"""Perceptron of (window of z, features of y, ϑ) with its first layer split by kind of input.

    :math:`h = W_z\,z_{i-k:i-1} + (W_y\,\text{features}_i + b) + W_\vartheta\,\vartheta`. The three
    products have different shapes, so the features' part is computed once per step, not once per
    Monte Carlo draw.

    Args:
        num_window: Width k·p of the window of z.
        num_features: Features of the data at each time.
        num_theta: Length d of ϑ.
        hidden: Width of each hidden layer.
        initial: Output at the start of training; its length is the number of outputs.
        skip: Add to the outputs a path that is linear in ϑ, with weights linear in the features.
            Scales and weights follow ϑ almost linearly, each time at its own slope, and the direct
            path learns that long before the ReLU layers do.

    >>> network = Conditioner(4, 3, 2, hidden=(8,), initial=[0.0, 1.0])
    >>> network(torch.zeros(4, 7, 5), torch.zeros(7, 3), torch.zeros(5, 2)).shape
    torch.Size([2, 7, 5])
    """

    def __init__(
        self,
        num_window: int,
        num_features: int,
        num_theta: int,
        hidden: Sequence[int],
        initial: Sequence[float],
        skip: bool = False,
    ) -> None:
        super().__init__()
        fan_in = num_window + num_features + num_theta
        self.from_window = nn.Linear(num_window, hidden[0], bias=False)
        self.from_features = nn.Linear(num_features, hidden[0])
        self.from_theta = nn.Linear(num_theta, hidden[0], bias=False)
        for part in (self.from_window, self.from_features, self.from_theta):
            nn.init.normal_(part.weight, std=fan_in**-0.5)
        self.hidden = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(hidden[:-1], hidden[1:], strict=True)
        )
        self.out = nn.Linear(hidden[-1], len(initial))
        self.skip = None
        if skip:
            self.skip = nn.Linear(num_features, num_theta * len(initial))
            nn.init.zeros_(self.skip.weight)
            nn.init.zeros_(self.skip.bias)
            # As in ThetaTaps: one step of Adam on all weights together stays small.
            self.skip_gain = num_features**-0.5
        # The flow starts as the fixed map that `initial` describes.
        nn.init.zeros_(self.out.weight)
        with torch.no_grad():
            self.out.bias.copy_(torch.as_tensor(initial))

    def forward(
        self,
        window: Float[Tensor, "window time mc"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> Float[Tensor, "out time mc"]:
        """Outputs at every time for every draw."""
        return self.trace(window, features, theta).out

    def matrices(self) -> list[nn.Parameter]:
        """Weights between layers; the linear path from ϑ is left out, it starts at 0."""
        parts = [self.from_window, self.from_features, self.from_theta, *self.hidden, self.out]
        return [part.weight for part in parts if min(part.weight.shape) > 1]

    def pull_back(
        self,
        rows: Float[Tensor, "out rows time mc"],
        h: list[Float[Tensor, "hidden time mc"]],
    ) -> tuple[Float[Tensor, "hidden rows time mc"], Float[Tensor, "window rows time mc"]]:
        """Rows times the Jacobians of the outputs by the first layer's sum and by the window.

        Without autograd; h is of ``trace``.
        """
        shape, rows = rows.shape[1:], self.out.weight.mT @ rows.flatten(1)
        for layer, below in zip(reversed(self.hidden), reversed(h[1:]), strict=True):
            rows.unflatten(1, shape).mul_(below.sign()[:, None])
            rows = layer.weight.mT @ rows
        rows.unflatten(1, shape).mul_(h[0].sign()[:, None])
        by_window = self.from_window.weight.mT @ rows
        return rows.unflatten(1, shape), by_window.unflatten(1, shape)

    def trace(self, window: Tensor, features: Tensor, theta: Tensor) -> NetworkTrace:
        """Outputs, and what made them."""
        from_theta = self.from_theta.weight @ theta.mT
        first = affine(self.from_features, features.mT)[..., None] + from_theta[:, None]
        shape = first.shape[1:]
        first = torch.addmm(first.flatten(1), self.from_window.weight, window.flatten(1))
        # In place, here and below: to fill a new buffer costs as much as the arithmetic.
        h = [first.relu_()]
        for layer in self.hidden:
            h.append(affine(layer, h[-1]).relu_())
        out, skip = affine(self.out, h[-1]).unflatten(1, shape), None
        if self.skip is not None:
            slopes = self.skip_gain * self.skip(features).unflatten(-1, (-1, theta.shape[-1]))
            skip = (slopes.transpose(0, 1).flatten(0, 1) @ theta.mT).unflatten(0, (len(out), -1))
            out = out + skip
        return NetworkTrace(out, [each.unflatten(1, shape) for each in h], from_theta, skip)


def affine(layer: nn.Linear, x: Float[Tensor, "in many"]) -> Float[Tensor, "out many"]:
    """W x + b of every column."""
    return torch.addmm(layer.bias[:, None], layer.weight, x)


class ThetaTaps(nn.Module):
    r"""Linear taps whose weights depend on ϑ: :math:`\sum_j w_j(\vartheta) a_{ij}`; zero at first.

    For a linear-Gaussian model the exact conditional mean has this form, and a ReLU network that
    only adds ϑ to its inputs approximates the product badly.

    Args:
        num_inputs: Inputs a at each time.
        num_theta: Length d of ϑ.
        num_states: Outputs p at each time.
        width: Hidden units of the network of ϑ.
    """

    def __init__(self, num_inputs: int, num_theta: int, num_states: int, width: int = 16) -> None:
        super().__init__()
        self.shape = (num_inputs, num_states)
        # Keeps a step of Adam on all taps together as small as one on a single tap.
        self.gain = num_inputs**-0.5
        self.weights = nn.Sequential(
            nn.Linear(num_theta, width), nn.Tanh(), nn.Linear(width, num_inputs * num_states)
        )
        nn.init.zeros_(self.weights[-1].weight)
        nn.init.zeros_(self.weights[-1].bias)

    def matrices(self) -> list[nn.Parameter]:
        """Weights between layers."""
        layers = (self.weights[0].weight, self.weights[2].weight)
        return [weight for weight in layers if min(weight.shape) > 1]

    def matrix(self, theta: Float[Tensor, "mc theta"]) -> Float[Tensor, "inputs state mc"]:
        """The taps w(ϑ)."""
        first, _, last = self.weights
        taps = affine(last, torch.tanh(affine(first, theta.mT)))
        return (self.gain * taps).unflatten(0, self.shape)
