"""The second look: draws of ϑ that go beyond q(ϑ), weighted as draws of the mixture with it."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lib.diagnostics import SecondLook
from lib.weights import nan_is_no_mass

# Chosen by measurement among normals of other factors and Student t of 1 to 3 degrees: finds a mode
# of share 0.3 that lies 10 standard deviations away most often, in 1, 2 and 3 dimensions.
FACTORS = (2.0, 5.0, 10.0)
# Second wave: with it, modes are found in 5 dimensions that the first wave alone misses.
CENTRES = 20
OUTSIDE_LEVEL = 0.001

LogDensity = Callable[[Tensor], Tensor]


class NormalMixture:
    r"""Equal mixture of :math:`N(m_i, f_i^2 C)`.

    Args:
        loc: The m_i.
        factor: The f_i.
        tril: Cholesky factor of C.

    >>> wide = NormalMixture(torch.zeros(2, 3), torch.tensor([2.0, 5.0]), torch.eye(3))
    >>> wide.log_prob(wide(torch.randn(5, 3))).shape
    torch.Size([5])
    """

    def __init__(
        self,
        loc: Float[Tensor, "parts theta"],
        factor: Float[Tensor, " parts"],
        tril: Float[Tensor, "theta theta"],
    ) -> None:
        self.loc, self.factor, self.tril = loc, factor, tril

    def __call__(self, noise: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc theta"]:
        """Draws from standard normal noise; the parts take turns, so each has its share."""
        part = torch.arange(len(noise)) % len(self.loc)
        return self.loc[part] + (self.factor[part, None] * noise) @ self.tril.T

    def log_prob(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, " mc"]:
        """Log density of the mixture."""
        d, factor = vartheta.shape[1], self.factor[:, None]
        white = vartheta - self.loc[:, None]
        white = torch.linalg.solve_triangular(self.tril.T, white, upper=True, left=False)
        log_det = self.tril.diagonal().log().sum() + d * (
            factor.log() + 0.5 * math.log(2 * math.pi)
        )
        log_prob = -0.5 * white.square().sum(-1) / factor.square() - log_det
        return torch.logsumexp(log_prob, 0) - math.log(len(factor))


def second_look(
    log_q: LogDensity,
    log_p: LogDensity,
    reference: Float[Tensor, "draws theta"],
    own: Float[Tensor, "mc theta"],
    log_p_own: Float[Tensor, " mc"],
    noise: Float[Tensor, "wide theta"],
) -> SecondLook:
    """Weights of q's own draws and of two waves of wider ones.

    The first wave stretches the moments of q(ϑ). The second goes where draws of the first, outside
    q(ϑ), have weight: it checks a lucky draw, and fills a mode that a few draws have found.

    Args:
        log_q: log q(ϑ).
        log_p: log p(ϑ, x, y) − log q(x | ϑ), with a fresh x drawn for each ϑ.
        reference: Draws of q(ϑ), for its moments and for where it has next to no mass.
        own: Draws of q(ϑ) whose ``log_p_own`` is known.
        noise: Standard normal, a row for each wider draw.
    """
    half, d = -(-len(noise) // 2), own.shape[1]
    level = log_q(reference).quantile(OUTSIDE_LEVEL)
    tril = torch.linalg.cholesky(reference.T.cov().reshape(d, d))
    stretched = NormalMixture(
        reference.mean(0).expand(len(FACTORS), d), reference.new_tensor(FACTORS), tril
    )
    wave = stretched(noise[:half])
    vartheta, value = torch.cat([own, wave]), torch.cat([log_p_own, log_p(wave)])
    log_density = torch.stack([log_q(vartheta), stretched.log_prob(vartheta)])
    first = _look(value, log_density, [len(own), half], level)
    centres = _resampled(vartheta, first)
    around = NormalMixture(centres, torch.ones_like(centres[:, 0]), tril)
    wave = around(noise[half:])
    vartheta, value = torch.cat([vartheta, wave]), torch.cat([value, log_p(wave)])
    log_density = torch.stack([f(vartheta) for f in (log_q, stretched.log_prob, around.log_prob)])
    return _look(value, log_density, [len(own), half, len(noise) - half], level)


def _look(value: Tensor, log_density: Tensor, counts: list[int], level: Tensor) -> SecondLook:
    """Weights against the mixture of densities, q(ϑ) first, in proportion to their counts."""
    share = value.new_tensor(counts) / sum(counts)
    log_weight = value - torch.logsumexp(log_density + share.log()[:, None], 0)
    log_weight = nan_is_no_mass(log_weight)
    return SecondLook(log_weight, torch.arange(len(value)) >= counts[0], log_density[0] < level)


def _resampled(vartheta: Tensor, look: SecondLook) -> Tensor:
    """CENTRES of the draws outside q(ϑ), in proportion to their weights (systematic)."""
    among = look.outside if look.outside.any() else look.wide
    # The floor makes the weights equal where all of them are zero.
    weight = torch.softmax(look.log_weight[among].clamp(-1e30, 1e30), 0)
    at = (torch.arange(CENTRES).to(weight) + 0.5) / CENTRES
    chosen = torch.searchsorted(weight.cumsum(0), at).clamp(max=len(weight) - 1)
    return vartheta[among][chosen]
