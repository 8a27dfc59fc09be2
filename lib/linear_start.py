"""A better start: the posterior of the linearised model, by adaptive importance sampling."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid
from lib.linearised import Linearised, range_map
from lib.ssm import StateSpaceModel
from lib.start import Start, admissible

NUM_DRAWS = 500
NUM_ROUNDS = 12
FREEDOM = 5.0  # of Student's t, the proposal
SMALLEST_SHARE = 0.1  # effective, to which weights are tempered


@torch.no_grad()
def linear_start(model: StateSpaceModel, grid: Grid, start: Start, seed: int) -> Start:
    """ϑ and its spread under the linearised model, and the mean path there.

    Rounds of draws from a Student t with the weighted moments of the round before (Oh and Berger
    1992); the model is linearised anew about the mean path of each (iterated Kalman smoother, Bell
    1994). Where no draw has any mass the start stays as it is.
    """
    first = 0 if model.x0_random else 1
    to_range = range_map(model, len(grid.t) - first)
    path, mean, tril = start.path, start.vartheta, torch.diag(start.vartheta_sd)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_ROUNDS):
        loc = to_range.inverse(path[first:])
        linearised = Linearised(model, grid, loc)
        vartheta, log_proposal = _student(mean, tril, generator)
        log_weight = model.log_prior(vartheta) + linearised(vartheta)[1] - log_proposal
        weight = _tempered(log_weight.nan_to_num(-torch.inf, -torch.inf, -torch.inf))
        if weight is None:
            break
        mean = weight @ vartheta
        centred = weight.sqrt()[:, None] * (vartheta - mean)
        tril = torch.linalg.cholesky(centred.T @ centred)
        chain, _ = linearised(mean[None])
        new = to_range(loc + chain.mean[..., 0].T)[0]
        path = admissible(model, torch.cat([path[:first], new]))
    return start._replace(vartheta=mean, vartheta_sd=tril.square().sum(1).sqrt(), path=path)


def _student(
    mean: Tensor, tril: Tensor, generator: torch.Generator
) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
    """Draws of the multivariate t, and their log density up to a constant."""
    d = len(mean)
    noise = torch.randn(NUM_DRAWS, d + int(FREEDOM), generator=generator, dtype=mean.dtype)
    chi2 = noise[:, d:].square().sum(1)
    z = noise[:, :d] * (FREEDOM / chi2).sqrt()[:, None]
    return mean + z @ tril.T, -0.5 * (FREEDOM + d) * torch.log1p(z.square().sum(1) / FREEDOM)


def _tempered(log_weight: Float[Tensor, " mc"]) -> Float[Tensor, " mc"] | None:
    """Weights of sum 1, their log shrunk until they count as a tenth of the draws; or None."""
    if not log_weight.max().isfinite():
        return None
    power = 1.0
    while power > 1e-6:
        weight = torch.softmax(power * log_weight.clamp(min=-1e30), 0)
        if 1 / weight.square().sum() >= SMALLEST_SHARE * NUM_DRAWS:
            return weight
        power *= 0.7
    return None
