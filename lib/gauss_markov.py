"""Gauss-Markov base of the path flow: a conditional linear recursion, run backwards in time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import (
    Conditioner,
    Pushed,
    ThetaTaps,
    TimeFlow,
    lower_product,
    soft_bound,
    solve_lower_transposed,
)


def scan(
    a: Float[Tensor, "state state time mc"], c: Float[Tensor, "state time mc"]
) -> Float[Tensor, "state time mc"]:
    r"""Solve :math:`u_i = A_i u_{i+1} + c_i`, :math:`u_N = c_N`, by doubling: log2(N) steps.

    After step s every (A_i, c_i) stands for the affine map from u_{i+2^s} to u_i (Hillis and
    Steele's scan over the composition of affine maps). Past the end there is nothing: the last
    2^s entries are already solved, and their A is no longer needed. The state leads, so that the
    products of small matrices are a few operations on long rows.
    """
    num_times, shift, c = c.shape[1], 1, c.clone()
    while shift < num_times:
        # Before c changes in place: the sum is complete when it is added.
        c[:, :-shift] += (a[:, :, : num_times - shift] * c[None, :, shift:]).sum(1)
        later = a[:, :, shift:]
        a = (a[:, :, None, : later.shape[2]] * later[None]).sum(1)
        shift *= 2
    return c


class BackwardScan(torch.autograd.Function):
    """``backward_scan`` with the state leading; its gradient is the same scan along time."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor) -> Tensor:
        """Solve for u."""
        u = scan(a, c)
        ctx.save_for_backward(a, u)
        return u

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """v_i = A_{i-1}' v_{i-1} + g_i is the gradient by c_i, and v_i u_{i+1}' that by A_i."""
        a, u = ctx.saved_tensors
        back = nn.functional.pad(a[:, :, :-1], (0, 0, 1, 0)).transpose(0, 1)
        v = scan(back.flip(2), g.flip(1)).flip(1)
        later = nn.functional.pad(u[:, 1:], (0, 0, 0, 1))
        return v[:, None] * later, v


def backward_scan(
    a: Float[Tensor, "state state time mc"], c: Float[Tensor, "state time mc"]
) -> Float[Tensor, "state time mc"]:
    r"""Solve :math:`u_i = A_i u_{i+1} + c_i`, :math:`u_N = c_N`."""
    return BackwardScan.apply(a, c)


class GaussMarkovTrace(NamedTuple):
    """What the base made on the way: A, c = b + L z, the entries of L, and u."""

    a: Float[Tensor, "state state time mc"]
    c: Float[Tensor, "state time mc"]
    entries: Float[Tensor, "entries time mc"]
    y: Float[Tensor, "state time mc"]
    log_diag: Float[Tensor, "state time mc"]


class GaussMarkov(TimeFlow):
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

    def trace(
        self,
        z: Float[Tensor, "state time mc"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> GaussMarkovTrace:
        """Run the flow and keep what it made on the way."""
        p = self.num_states
        a, b, s, entries = self.network(None, features, theta).split(
            [p * p, p, p, p * (p - 1) // 2]
        )
        a, s = bound_rows(a.unflatten(0, (p, p))), soft_bound(s)
        c = b + s.exp() * z
        if self.taps is not None:
            # Features are shared by all draws: one product for all of them.
            taps = self.taps.matrix(theta)
            c = c + (features @ taps.flatten(1)).unflatten(1, taps.shape[1:]).transpose(0, 1)
        if p > 1:
            c = c + lower_product(entries, z)
        return GaussMarkovTrace(a, c, entries, backward_scan(a, c), s)

    @torch.no_grad()
    def push_score(
        self,
        trace: GaussMarkovTrace,
        g: Float[Tensor, "state time mc"],
        free: Float[Tensor, "state time 1"] | None,
        with_theta: bool,
    ) -> Pushed:
        r"""The score at u from g, that at z: J = du/dz = (I − A S)⁻¹ L, S shifts by one step.

        So w = J⁻ᵀg is local: w = (I − A S)ᵀ y, y = L⁻ᵀg. For the same reason w'∂u is y'∂c + Σ
        y_i'∂A_i u_{i+1}, and no scan is run backwards.
        """
        inverse_diag, slope = torch.exp(-trace.log_diag), torch.ones_like(g)
        if free is not None:
            inverse_diag, slope = inverse_diag * free, slope * free
        y = solve_lower_transposed(trace.entries, inverse_diag, g)
        back = (trace.a * y[:, None]).sum(0)
        w = y - nn.functional.pad(back[:, :-1], (0, 0, 1, 0))
        if not with_theta:
            return Pushed(g, w, [], [])
        later = nn.functional.pad(trace.y[:, 1:], (0, 0, 0, 1))
        weights = [y[:, None] * later[None], y, slope]
        return Pushed(g, w, [trace.a, trace.c, trace.log_diag], weights)


def bound_rows(a: Float[Tensor, "state state *batch"]) -> Float[Tensor, "state state *batch"]:
    """Shrink each row so that its absolute sum r becomes tanh(r) < 1."""
    # Adding a tiny number keeps 0/0 away; tanh(r)/r is 1 there to rounding.
    r = a.abs().sum(1, keepdim=True) + 1e-6
    return a * (torch.tanh(r) / r)
