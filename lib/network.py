"""What the flows share: conditioner network (appendix B), taps, pieces of their affine maps."""

from collections.abc import Sequence

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
        skip: Add a linear path from ϑ to the outputs. Scales and weights follow ϑ almost linearly,
            and the direct path learns that long before the ReLU layers do.

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
            self.skip = nn.Linear(num_theta, len(initial), bias=False)
            nn.init.zeros_(self.skip.weight)
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
        h = self.from_features(features) + self.from_theta(theta)[:, None]
        if self.from_window is not None:
            h = h + self.from_window(window)
        h = h.relu()
        for layer in self.hidden:
            h = layer(h).relu()
        out = self.out(h)
        return out if self.skip is None else out + self.skip(theta)[:, None]


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
        return inputs @ (self.gain * self.weights(theta)).unflatten(-1, self.shape)
