"""Gauss-Markov map of the path flow: a chain of given laws, run backwards in time."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import lower_product, solve_lower_transposed
from lib.smoother import Chain


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


def run_chain(chain: Chain, z: Float[Tensor, "state time mc"]) -> Float[Tensor, "state time mc"]:
    r"""v of :math:`v_i = A_i v_{i+1} + L_i z_i`; its log-Jacobian is Σ log diag L."""
    c = chain.log_diag.exp() * z
    if len(z) > 1:
        c = c + lower_product(chain.entries, z)
    return backward_scan(chain.a, c)


@torch.no_grad()
def push_chain(
    chain: Chain,
    g: Float[Tensor, "state time mc"],
    free: Float[Tensor, "state time 1"] | None,
) -> Float[Tensor, "state time mc"]:
    r"""The score at u from g, that at z: J = du/dz = (I − A S)⁻¹ L, S shifts by one step.

    So J⁻ᵀg is local: (I − A S)ᵀ L⁻ᵀg.
    """
    inverse_diag = torch.exp(-chain.log_diag)
    inverse_diag = inverse_diag if free is None else inverse_diag * free
    y = solve_lower_transposed(chain.entries, inverse_diag, g)
    back = (chain.a * y[:, None]).sum(0)
    return y - nn.functional.pad(back[:, :-1], (0, 0, 1, 0))
