"""Kalman filter and backward kernels of a linear-Gaussian model, one for each ϑ of a batch."""

from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

FLOOR = 1e-12  # of what a reading leaves of a variance, relative: rounding must not make it 0

# The small matrices lead and the batch comes last, so that a product is a few long operations.


class Chain(NamedTuple):
    r"""A path's law given the data: :math:`u = \text{mean} + \text{sd}\,v`, v of unit variance.

    Backwards in time :math:`v_i = A_i v_{i+1} + L_i z_i`, with A = 0 at the last. ``entries`` are
    those of L below its diagonal, row by row, and ``log_diag`` the logs of those on it.
    """

    a: Float[Tensor, "state state time mc"]
    entries: Float[Tensor, "entries time mc"]
    log_diag: Float[Tensor, "state time mc"]
    mean: Float[Tensor, "state time mc"]
    log_sd: Float[Tensor, "state time mc"]


Law = TypeVar("Law", bound=tuple)


def part_of(law: Law, rows: slice | Int[Tensor, " rows"]) -> Law:
    """The chains of some draws, or any law of the path whose tensors have the draws last."""
    return type(law)(*(whole[..., rows].contiguous() for whole in law))


class Transitions(NamedTuple):
    """u_i ~ N(F_i u_{i-1} + c_i, Q_i); that of the first time has no F and is its prior."""

    F: Float[Tensor, "time state state mc"]
    c: Float[Tensor, "time state mc"]
    Q: Float[Tensor, "time state state mc"]


class Readings(NamedTuple):
    """y = H u + noise of variance r; ``seen`` lists which components each time has."""

    y: Float[Tensor, "time obs"]
    H: Float[Tensor, "time obs state"]
    r: Float[Tensor, "obs mc"]
    seen: list[list[int]]


def smooth(model: Transitions, data: Readings) -> Chain:
    r"""The chain of u given the data, by a run forward in time and one back.

    With m, P the filtered moments and :math:`S = F P F' + Q` the next predicted covariance,

    .. math:: A = P F' S^{-1}, \quad b = m - A (F m + c), \quad L L' = P - A F P.

    Readings are taken in one at a time, which needs no inverse. A run over time costs the same few
    operations for one ϑ as for some hundred.
    """
    gains, shifts, rests = [], [], []
    F, c, Q = model.F.unbind(), model.c.unbind(), model.Q.unbind()
    m, P = c[0], Q[0]
    for i, seen in enumerate(data.seen):
        if i:
            FP = product(F[i], P)
            S = product(FP, F[i].transpose(0, 1)) + Q[i]
            gains.append(product(FP.transpose(0, 1), inverse(S)))
            rests.append(P - product(gains[-1], FP))
            ahead = apply(F[i], m) + c[i]
            shifts.append(m - apply(gains[-1], ahead))
            m, P = ahead, S
        for k in seen:
            h = data.H[i, k][:, None]
            Ph, miss = (P * h).sum(1), data.y[i, k] - (h * m).sum(0)
            s = (h * Ph).sum(0) + data.r[k]
            gain = Ph / s
            m, kept = m + gain * miss, P - gain[:, None] * Ph
            # Joseph's form: what a reading of next to no noise leaves stays positive.
            kept = kept - (kept * h).sum(1)[:, None] * gain
            P = kept + gain[:, None] * gain * data.r[k]
    means, variances = [m], [P]
    for A, b, V in zip(gains[::-1], shifts[::-1], rests[::-1], strict=True):
        means.append(b + apply(A, means[-1]))
        variances.append(product(product(A, variances[-1]), A.transpose(0, 1)) + V)
    a, V = torch.stack([*gains, torch.zeros_like(P)], 2), torch.stack([*rests, P], 2)
    mean, variance = torch.stack(means[::-1], 1), torch.stack(variances[::-1], 2)
    sd = variance.diagonal().permute(2, 0, 1).clamp(min=torch.finfo(V.dtype).tiny).sqrt()
    later = torch.cat([sd[:, 1:], sd[:, -1:]], 1)
    entries, log_diag = _cholesky(V / (sd[:, None] * sd[None]))
    return Chain(a * later[None] / sd[:, None], entries, log_diag, mean, sd.log())


def product(one: Tensor, other: Tensor) -> Tensor:
    """Product of small matrices (rows, columns, mc)."""
    return (one[:, :, None] * other[None]).sum(1)


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector (columns, mc)."""
    return (matrix * vector[None]).sum(1)


def inverse(s: Float[Tensor, "state state mc"]) -> Float[Tensor, "state state mc"]:
    """Inverse of a small matrix, written out for one and two states."""
    if len(s) == 1:
        return s.reciprocal()
    if len(s) == 2:
        adjugate = torch.stack([s[1, 1], -s[0, 1], -s[1, 0], s[0, 0]]).unflatten(0, (2, 2))
        return adjugate / (s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0])
    return torch.linalg.inv_ex(s.permute(2, 0, 1))[0].permute(1, 2, 0)


def factor(V: Float[Tensor, "state state mc"]) -> Float[Tensor, "state state mc"]:
    """Lower Cholesky factor of small matrices as one tensor."""
    below, logs = _cholesky(V)
    diagonal, zero, rows, entry = logs.exp(), torch.zeros_like(V[0, 0]), [], 0
    for r in range(len(V)):
        rows += [*below[entry : entry + r], diagonal[r], *[zero] * (len(V) - r - 1)]
        entry += r
    return torch.stack(rows).unflatten(0, V.shape[:2])


def _cholesky(
    V: Float[Tensor, "state state *time mc"],
) -> tuple[Float[Tensor, "entries *time mc"], Float[Tensor, "state *time mc"]]:
    """Factor L of small matrices: entries below the diagonal row by row, logs of the diagonal."""
    tril: list[list[Tensor]] = []
    entries, logs = [], []
    for r in range(len(V)):
        tril.append([])
        for c in range(r):
            rest = V[r, c]
            for k in range(c):
                rest = rest - tril[r][k] * tril[c][k]
            tril[r].append(rest / tril[c][c])
        rest = V[r, r]
        for entry in tril[r]:
            rest = rest - entry.square()
        smallest = FLOOR * V[r, r].abs() + torch.finfo(V.dtype).tiny
        logs.append(0.5 * torch.maximum(rest, smallest).log())
        entries += tril[r]
        tril[r].append(logs[-1].exp())
    below = torch.stack(entries) if entries else V.new_zeros(0, *V.shape[2:])
    return below, torch.stack(logs)
