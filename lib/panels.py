"""Densities on adaptive Gauss-Legendre panels: f(x) ≈ Σ_k c_k P_k(ξ) in each (no paper eq.)."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ORDER = 8  # nodes a panel
TOLERANCE = 1e-5  # of the total mass: what a panel's last two Legendre terms may hold

_POINTS, _GAUSS = np.polynomial.legendre.leggauss(ORDER)
# Masses of a panel's nodes → c_k = (2k + 1)/2 Σ_j mass_j P_k(ξ_j), but for the half-width.
_MASS_TO_COEFFICIENT = torch.from_numpy(
    np.polynomial.legendre.legvander(_POINTS, ORDER - 1) * (2 * np.arange(ORDER) + 1) / 2
)


def nodes(
    panels: Float[Tensor, "panels 2"],
) -> tuple[Float[Tensor, "panels order"], Float[Tensor, "panels order"]]:
    """Gauss-Legendre nodes of intervals (left, right), and their weights."""
    centre, half = panels.mean(1, keepdim=True), (panels[:, 1:] - panels[:, :1]) / 2
    return centre + half * torch.from_numpy(_POINTS), half * torch.from_numpy(_GAUSS)


def coefficients(
    panels: Float[Tensor, "panels 2"], mass: Float[Tensor, " nodes"]
) -> Float[Tensor, "panels order"]:
    """Legendre coefficients c of the density whose masses at all nodes are given."""
    half = (panels[:, 1:] - panels[:, :1]) / 2
    return mass.reshape(-1, ORDER) / half @ _MASS_TO_COEFFICIENT


def density(
    panels: Float[Tensor, "panels 2"],
    c: Float[Tensor, "panels order"],
    points: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    """f at the points; 0 outside the panels."""
    xi = _local(points, panels)
    inside = (xi >= -1) & (xi < 1)
    return ((_legendre(xi.clamp(-1, 1), ORDER - 1) * c).sum(-1) * inside).sum(-1)


def cumulative(
    panels: Float[Tensor, "panels 2"],
    c: Float[Tensor, "panels order"],
    points: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    """∫ f from the first panel up to the points.

    ∫_{-1}^{ξ} P_k = (P_{k+1}(ξ) − P_{k−1}(ξ)) / (2k + 1), and 1 + ξ for k = 0.
    """
    xi = _local(points, panels).clamp(-1, 1)
    basis, k = _legendre(xi, ORDER), torch.arange(1, ORDER)
    higher = (basis[..., 2:] - basis[..., :-2]) / (2 * k + 1)
    integral = torch.cat([1 + xi[..., None], higher], dim=-1)
    half = (panels[:, 1] - panels[:, 0]) / 2
    return ((integral * c).sum(-1) * half).sum(-1)


def unresolved(
    mass: Float[Tensor, "rows columns order order"],
) -> tuple[Bool[Tensor, " rows"], Bool[Tensor, " columns"]]:
    """Rows and columns of a product of panels whose series, slice by slice, still have a tail."""
    last = _MASS_TO_COEFFICIENT[:, -2:]
    rows = torch.einsum("rcij,ik->rcjk", mass, last).abs().sum((1, 2, 3))
    columns = torch.einsum("rcij,jk->rcik", mass, last).abs().sum((0, 2, 3))
    return 2 * rows > TOLERANCE, 2 * columns > TOLERANCE


def uneven(panels: Float[Tensor, "panels 2"]) -> Bool[Tensor, " panels"]:
    """More than twice as wide as a neighbour: mass at the border may lie between its nodes."""
    width = panels[:, 1] - panels[:, 0]
    beside = torch.nn.functional.pad(width, (1, 1), value=torch.inf)
    return width > 2.001 * torch.minimum(beside[:-2], beside[2:])


def refine(
    panels: Float[Tensor, "panels 2"], split: Bool[Tensor, " panels"]
) -> tuple[Float[Tensor, "refined 2"], Int[Tensor, " refined"], Bool[Tensor, " refined"]]:
    """Halve panels; also the index each came from, and whether it is unchanged."""
    source = torch.arange(len(panels)).repeat_interleave(torch.where(split, 2, 1))
    second = torch.zeros_like(source, dtype=torch.bool)
    second[1:] = source[1:] == source[:-1]
    first = split[source] & ~second
    left, right = panels[source].unbind(1)
    middle = (left + right) / 2
    left, right = torch.where(second, middle, left), torch.where(first, middle, right)
    return torch.stack([left, right], dim=1), source, ~split[source]


def _local(
    points: Float[Tensor, "*batch"], panels: Float[Tensor, "panels 2"]
) -> Float[Tensor, "*batch panels"]:
    """Coordinate ξ of each point in each panel, −1..1 inside."""
    left, right = panels.unbind(1)
    return (2 * points.double()[..., None] - left - right) / (right - left)


def _legendre(xi: Float[Tensor, "*batch"], degree: int) -> Float[Tensor, "*batch terms"]:
    """P_0..P_degree at ξ."""
    return torch.from_numpy(np.polynomial.legendre.legvander(xi.numpy(), degree))
