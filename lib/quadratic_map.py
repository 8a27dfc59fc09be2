"""Monotone map of one number, quadratic by pieces: gives each component of ϑ tails of its own."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

REACH = 4.0  # of the knots, in units of the noise
KNOTS = 17
STEP = 2 * REACH / (KNOTS - 1)
TAIL = 1.5  # where ``lengthen`` begins; it is all there one unit of noise further
LONGER = 0.25  # by this share of the slope


class Piece(NamedTuple):
    """The piece of each value: its first knot z_i, T_i, the slope s_i and by how much it rises."""

    z: Float[Tensor, "mc theta"]
    x: Float[Tensor, "mc theta"]
    slope: Float[Tensor, "mc theta"]
    rise: Float[Tensor, "mc theta"]


class QuadraticMap(nn.Module):
    r"""T of each component, with T(0) = 0 and a slope s that is linear between knots.

    .. math:: T(z) = T_i + h\,\bigl(s_i t + \tfrac12 (s_{i+1} - s_i) t^2\bigr), \quad
        t = (z - z_i)/h

    (Müller et al. 2019). Beyond the outermost knots the slope stays. It begins as the identity.

    Args:
        size: Number d of components.

    >>> [tuple(a.shape) for a in QuadraticMap(3)(torch.zeros(5, 3))]
    [(5, 3), (5, 3)]
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.log_slope = nn.Parameter(torch.zeros(size, KNOTS))

    def forward(
        self, z: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, "mc theta"]]:
        """T(z) and log T'(z)."""
        piece = self._piece(self._place(z), *self._table())
        t = (z - piece.z) / STEP
        log_slope = (piece.slope + piece.rise * t).log()
        return piece.x + STEP * t * (piece.slope + 0.5 * piece.rise * t), log_slope

    def inverse(
        self, x: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, "mc theta"]]:
        """z of T(z) = x, and log T'(z)."""
        slope, at = self._table()
        place = torch.searchsorted(at.detach(), x.detach().mT.contiguous(), right=True).mT - 1
        piece = self._piece(place, slope, at)
        y = (x - piece.x) / STEP
        # The root that is stable where the slope hardly rises.
        t = 2 * y / (piece.slope + (piece.slope.square() + 2 * piece.rise * y).sqrt())
        return piece.z + STEP * t, (piece.slope + piece.rise * t).log()

    @torch.no_grad()
    def lengthen(self) -> None:
        r"""Multiply s by 1 up to :math:`|z| = 1.5`, by 5/4 from 2.5 on: longer tails.

        Importance weights need a q that falls off later than the posterior (Owen and Zhou 2000);
        one that is fitted to draws falls off where they end.
        """
        z = STEP * torch.arange(KNOTS).to(self.log_slope) - REACH
        self.log_slope += (LONGER * (z.abs() - TAIL).clamp(0, 1)).log1p()

    def push_score(
        self, z: Float[Tensor, "mc theta"], g: Float[Tensor, "mc theta"]
    ) -> Float[Tensor, "mc theta"]:
        r"""Score at T(z) from g, that at z: :math:`(g - T''/T')/T'`."""
        piece = self._piece(self._place(z), *self._table())
        slope = piece.slope + piece.rise * (z - piece.z) / STEP
        return (g - piece.rise / STEP / slope) / slope

    def _table(self) -> tuple[Float[Tensor, "theta knots"], Float[Tensor, "theta knots"]]:
        """Slopes at the knots, and T there."""
        slope = self.log_slope.exp()
        areas = 0.5 * STEP * (slope[:, 1:] + slope[:, :-1])
        at = nn.functional.pad(areas.cumsum(1), (1, 0))
        return slope, at - at[:, KNOTS // 2, None]

    @staticmethod
    def _place(z: Tensor) -> Tensor:
        """The knot at or below each value; -1 below them all."""
        return ((z + REACH) / STEP).floor().clamp(-1, KNOTS - 1).long()

    @staticmethod
    def _piece(place: Tensor, slope: Tensor, at: Tensor) -> Piece:
        """What begins at that knot; beyond the outermost ones the slope does not rise."""
        here, ahead = place.clamp(0, KNOTS - 1), (place + 1).clamp(0, KNOTS - 1)
        first = slope.mT.gather(0, here)
        rise = slope.mT.gather(0, ahead) - first
        return Piece(STEP * here.to(slope) - REACH, at.mT.gather(0, here), first, rise)
