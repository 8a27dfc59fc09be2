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
    entries: Float[Tensor, "mc time entries"], z: Float[Tensor, "mc time state"]
) -> Float[Tensor, "mc time state"]:
    """Product of a strictly lower triangular matrix, given row by row, with z."""
    rows, start = [torch.zeros_like(z[..., 0])], 0
    for r in range(1, z.shape[-1]):
        rows.append((entries[..., start : start + r] * z[..., :r]).sum(-1))
        start += r
    return torch.stack(rows, -1)


def solve_lower_transposed(
    entries: Float[Tensor, "mc time entries"],
    inverse_diag: Float[Tensor, "mc time state"],
    g: Float[Tensor, "mc time state"],
) -> Float[Tensor, "mc time state"]:
    """Solve L'w = g for each time, L lower triangular; where 1/diag L is 0, so is w."""
    p = g.shape[-1]
    w: list[Tensor] = [g[..., 0]] * p
    for c in reversed(range(p)):
        below = sum((entries[..., r * (r - 1) // 2 + c] * w[r] for r in range(c + 1, p)), 0.0)
        w[c] = (g[..., c] - below) * inverse_diag[..., c]
    return torch.stack(w, -1)


class Pushed(NamedTuple):
    r"""The score pushed through a flow z' = f(z, ϑ) with Jacobian J.

    ``before`` is :math:`\nabla_z - \partial_z\log|J|`, ``after`` is J⁻ᵀ of it, and ``by_theta`` is
    :math:`\partial_\vartheta\log|J| + (\partial_\vartheta z')^\top` after.
    """

    before: Float[Tensor, "mc time state"]
    after: Float[Tensor, "mc time state"]
    by_theta: Float[Tensor, "mc theta"]


class TimeFlow(nn.Module):
    """A flow over time z' = f(z, ϑ).

    A subclass has ``trace(z, features, theta)``, whose result holds z' as ``y``, the log diagonal
    of its Jacobian as ``log_diag`` and what was made on the way, and ``push_score(trace, g, free)``
    that returns a ``Pushed``.
    """

    def forward(
        self,
        z: Float[Tensor, "mc time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> tuple[Float[Tensor, "mc time state"], Float[Tensor, "mc time state"]]:
        """Return (z', log diagonal of dz'/dz); its sum over time and state is the log-Jacobian."""
        trace = self.trace(z, features, theta)
        return trace.y, trace.log_diag


class NetworkTrace(NamedTuple):
    """Outputs of a ``Conditioner`` and what it made on the way, ϑ's part of each sum by itself."""

    out: Float[Tensor, "mc time out"]
    hidden: list[Float[Tensor, "mc time hidden"]]
    from_theta: Float[Tensor, "mc hidden"]
    skip: Float[Tensor, "mc time out"] | None


def pull_theta(
    theta: Float[Tensor, "mc theta"], outputs: list[Tensor], weights: list[Tensor]
) -> Float[Tensor, "mc theta"]:
    """Gradient by ϑ of Σ weights·outputs on a graph that is kept; outputs of one flow alone."""
    weights = [w.expand_as(out) for w, out in zip(weights, outputs, strict=True)]
    options = {"retain_graph": True, "materialize_grads": True}
    return torch.autograd.grad(outputs, theta, weights, **options)[0]


class Conditioner(nn.Module):
    r"""Perceptron of (window of z, features of y, ϑ) with its first layer split by kind of input.

    :math:`h = W_z\,z_{i-k:i-1} + (W_y\,\text{features}_i + b) + W_\vartheta\,\vartheta`. The three
    products have different shapes, so the features' part is computed once per step, not once per
    Monte Carlo draw.

    Args:
        num_window: Width k·p of the window of z; 0 for a network that sees no z.
        num_features: Features of the data at each time.
        num_theta: Length d of ϑ.
        hidden: Width of each hidden layer.
        initial: Output at the start of training; its length is the number of outputs.
        skip: Add to the outputs a path that is linear in ϑ, with weights linear in the features.
            Scales and weights follow ϑ almost linearly, each time at its own slope, and the direct
            path learns that long before the ReLU layers do.

    >>> network = Conditioner(4, 3, 2, hidden=(8,), initial=[0.0, 1.0])
    >>> network(torch.zeros(5, 7, 4), torch.zeros(7, 3), torch.zeros(5, 2)).shape
    torch.Size([5, 7, 2])
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
        self.from_window = nn.Linear(num_window, hidden[0], bias=False) if num_window else None
        self.from_features = nn.Linear(num_features, hidden[0])
        self.from_theta = nn.Linear(num_theta, hidden[0], bias=False)
        for part in (self.from_window, self.from_features, self.from_theta):
            if part is not None:
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
        # A small last layer: the flow starts as the fixed map that `initial` describes.
        nn.init.normal_(self.out.weight, std=0.01 * hidden[-1] ** -0.5)
        with torch.no_grad():
            self.out.bias.copy_(torch.as_tensor(initial))

    def forward(
        self,
        window: Float[Tensor, "mc time window"] | None,
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> Float[Tensor, "mc time out"]:
        """Outputs at every time for every draw; pass ``None`` for a network without window."""
        return self.trace(window, features, theta).out

    def matrices(self) -> list[nn.Parameter]:
        """Weights between layers; the linear path from ϑ is left out, it starts at 0."""
        parts = [self.from_window, self.from_features, self.from_theta, *self.hidden, self.out]
        return [part.weight for part in parts if part is not None and min(part.weight.shape) > 1]

    def pull_back(
        self,
        rows: Float[Tensor, "rows mc time out"],
        h: list[Float[Tensor, "mc time hidden"]],
    ) -> tuple[Float[Tensor, "rows mc time hidden"], Float[Tensor, "rows mc time window"]]:
        """Rows times the Jacobians of the outputs by the first layer's sum and by the window.

        Without autograd; h is of ``trace``.
        """
        rows = rows @ self.out.weight
        for layer, below in zip(reversed(self.hidden), reversed(h[1:]), strict=True):
            rows = rows.mul_(below.sign()) @ layer.weight
        rows.mul_(h[0].sign())
        return rows, rows @ self.from_window.weight

    def trace(self, window: Tensor | None, features: Tensor, theta: Tensor) -> NetworkTrace:
        """Outputs, and what made them."""
        from_theta = self.from_theta(theta)
        h = self.from_features(features) + from_theta[:, None]
        if self.from_window is not None:
            h += self.from_window(window)
        # In place, here and above: to fill a new buffer costs as much as the arithmetic.
        h = [h.relu_()]
        for layer in self.hidden:
            h.append(layer(h[-1]).relu_())
        out, skip = self.out(h[-1]), None
        if self.skip is not None:
            slopes = self.skip_gain * self.skip(features).unflatten(-1, (-1, theta.shape[-1]))
            skip = (theta @ slopes.flatten(0, 1).mT).unflatten(-1, slopes.shape[:2])
            out = out + skip
        return NetworkTrace(out, h, from_theta, skip)


def apply_taps(
    inputs: Float[Tensor, "*#mc time inputs"], taps: Float[Tensor, "mc inputs state"]
) -> Float[Tensor, "mc time state"]:
    """Taps applied at every time; inputs that all draws share take one product for all of them."""
    if inputs.ndim == 3:
        return inputs @ taps
    every = inputs @ taps.transpose(0, 1).flatten(1)
    return every.unflatten(1, (-1, taps.shape[-1])).transpose(0, 1)


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

    def forward(
        self, inputs: Float[Tensor, "*#mc time inputs"], theta: Float[Tensor, "mc theta"]
    ) -> Float[Tensor, "mc time state"]:
        """Taps applied at every time; inputs with or without a Monte Carlo dimension."""
        return apply_taps(inputs, self.matrix(theta))

    def matrices(self) -> list[nn.Parameter]:
        """Weights between layers."""
        layers = (self.weights[0].weight, self.weights[2].weight)
        return [weight for weight in layers if min(weight.shape) > 1]

    def matrix(self, theta: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc inputs state"]:
        """The taps w(ϑ)."""
        return (self.gain * self.weights(theta)).unflatten(-1, self.shape)
