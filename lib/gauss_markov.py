"""Gauss-Markov base of the path flow: a conditional linear recursion, run backwards in time."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import (
    Conditioner,
    ThetaTaps,
    lower_product,
    soft_bound,
    solve_lower_transposed,
)


def compose(
    a: Float[Tensor, "*batch state state"], b: Float[Tensor, "*batch state state"]
) -> Float[Tensor, "*batch state state"]:
    """Matrix product of many small matrices; elementwise for p = 1, where it is a product."""
    return a * b if a.shape[-1] == 1 else a @ b


def backward_scan(
    a: Float[Tensor, "mc time state state"], c: Float[Tensor, "mc time state"]
) -> Float[Tensor, "mc time state"]:
    r"""Solve :math:`u_i = A_i u_{i+1} + c_i`, :math:`u_N = c_N`, by doubling: log2(N) steps.

    After step s every (A_i, c_i) stands for the affine map from u_{i+2^s} to u_i (Hillis and
    Steele's scan over the composition of affine maps); past the end A is 0.
    """
    num_times, shift = c.shape[1], 1
    c = c[..., None]
    while shift < num_times:
        # Past the end there is nothing: the last `shift` entries are already solved.
        head = a[:, :-shift]
        c = torch.cat([c[:, :-shift] + compose_vector(head, c[:, shift:]), c[:, -shift:]], 1)
        a = torch.cat([compose(head, a[:, shift:]), torch.zeros_like(a[:, -shift:])], 1)
        shift *= 2
    return c[..., 0]


def compose_vector(
    a: Float[Tensor, "*batch state state"], c: Float[Tensor, "*batch state 1"]
) -> Float[Tensor, "*batch state 1"]:
    """Matrix times column, summed elementwise: faster than a batched call for small p."""
    return (a * c.mT).sum(-1, keepdim=True)


class GaussMarkov(nn.Module):
    r"""Backward recursion :math:`u_i = A_i u_{i+1} + b_i + L_i z_i`, :math:`u_N = b_N + L_N z_N`.

    A, b and L come from a network of (features, ϑ); A's row sums stay below 1 in absolute value,
    so no product of A's can grow. Its memory is unlimited, and the exact posterior of a
    linear-Gaussian model has this form. The log-Jacobian is Σ log diag L.

    Args:
        num_states: Components p of the state.
        num_features: Features of the data at each time.
        num_theta: Length d of ϑ.
        hidden: Width of each hidden layer.
        taps: ϑ-modulated linear taps on the features in b, and a linear path from ϑ to A, b, L.

    >>> base = GaussMarkov(2, 3, 1, hidden=(8,))
    >>> [tuple(a.shape) for a in base(torch.zeros(5, 7, 2), torch.zeros(7, 3), torch.zeros(5, 1))]
    [(5, 7, 2), (5, 7, 2)]
    """

    def __init__(
        self,
        num_states: int,
        num_features: int,
        num_theta: int,
        hidden: Sequence[int],
        taps: bool = True,
    ) -> None:
        super().__init__()
        p = self.num_states = num_states
        # A = 0.9 I and L = sqrt(1 - 0.9^2) I: a smooth path of unit variance to start with.
        initial = (1.47 * torch.eye(p)).flatten().tolist() + [0.0] * p
        initial += [-0.83] * p + [0.0] * (p * (p - 1) // 2)
        self.network = Conditioner(0, num_features, num_theta, hidden, initial, taps)
        self.taps = ThetaTaps(num_features, num_theta, p) if taps else None

    def forward(
        self,
        z: Float[Tensor, "mc time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> tuple[Float[Tensor, "mc time state"], Float[Tensor, "mc time state"]]:
        """Return (u, log diagonal of du/dz)."""
        a, b, s, entries = self._coefficients(features, theta)
        c = b + s.exp() * z
        if self.taps is not None:
            c = c + self.taps(features, theta)
        if self.num_states > 1:
            c = c + lower_product(entries, z)
        return backward_scan(a, c), s

    def solve_transposed(
        self,
        g: Float[Tensor, "mc time state"],
        z: Float[Tensor, "mc time state"],
        free: Float[Tensor, "1 time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> Float[Tensor, "mc time state"]:
        """The w with J'w = g, J = du/dz = (I − A S)⁻¹ L; S shifts by one step, so w is local."""
        a, _, s, entries = self._coefficients(features, theta)
        y = solve_lower_transposed(entries, torch.exp(-s) * free, g)
        back = (a * y[..., None]).sum(-2)
        return y - nn.functional.pad(back[:, :-1], (0, 0, 1, 0))

    def _coefficients(self, features: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        """A, b, log diag L and the entries of L below its diagonal."""
        p = self.num_states
        a, b, s, entries = self.network(None, features, theta).split(
            [p * p, p, p, p * (p - 1) // 2], -1
        )
        return bound_rows(a.unflatten(-1, (p, p))), b, soft_bound(s), entries


def bound_rows(a: Float[Tensor, "*batch state state"]) -> Float[Tensor, "*batch state state"]:
    """Shrink each row so that its absolute sum r becomes tanh(r) < 1."""
    # Adding a tiny number keeps 0/0 away; tanh(r)/r is 1 there to rounding.
    r = a.abs().sum(-1, keepdim=True) + 1e-6
    return a * (torch.tanh(r) / r)
