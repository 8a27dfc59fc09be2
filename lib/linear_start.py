"""A better start: the posterior under the linearised model, by adaptive importance sampling."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid
from lib.elbo import log_ratio
from lib.family import Family
from lib.posterior import VariationalPosterior
from lib.ssm import StateSpaceModel
from lib.start import Start, admissible
from lib.weights import ess_fraction, tempered

NUM_DRAWS = 500
MOST_ROUNDS = 12
FREEDOM = 5  # of Student's t, the proposal
SMALLEST_SHARE = 0.1  # effective, to which weights are tempered
ENOUGH = 0.3  # effective share of a round that is the last
COMMON = 4  # paths for each ϑ
SHARES = (1.0, 0.4)  # of the way to the mean path
NUM_PATHS = 64  # to compare paths by
PLAIN = Family(num_flows=0, theta_flows=0)  # q(x | ϑ) is the smoother alone


@torch.no_grad()
def linear_start(model: StateSpaceModel, grid: Grid, start: Start, seed: int) -> Start:
    """ϑ and its spread, and the path about which the model is best linearised.

    Rounds of draws from a Student t with the weighted moments of the round before (Oh and Berger
    1992). A weight is that of the smoother's own paths under the model itself, from noise common to
    all ϑ: the linearised model's evidence would be wrong where its path is far from ``start.path``.
    Before each round the path goes towards the smoother's mean (iterated Kalman smoother, Bell
    1994), if draws about it are then likelier. Where hardly any has mass the start stays as it is.
    """
    tril, generator = torch.diag(start.vartheta_sd), torch.Generator().manual_seed(seed)
    for k in range(MOST_ROUNDS):
        start, q = _best_path(model, grid, start, seed + k)
        vartheta, log_proposal = _student(start.vartheta, tril, generator)
        log_weight = log_ratio(model, q, grid, vartheta, generator, COMMON) - log_proposal
        shrunk = tempered(log_weight, partial(torch.softmax, dim=0), SMALLEST_SHARE)
        if shrunk is None:
            break
        weight = torch.softmax(shrunk, 0)
        mean = weight @ vartheta
        centred = weight.sqrt()[:, None] * (vartheta - mean)
        tril = torch.linalg.cholesky(centred.T @ centred)
        start = start._replace(vartheta=mean, vartheta_sd=tril.square().sum(1).sqrt())
        if ess_fraction(log_weight) > ENOUGH:
            break
    return start


def _best_path(
    model: StateSpaceModel, grid: Grid, start: Start, seed: int
) -> tuple[Start, VariationalPosterior]:
    """The start's path, or that on the way to the smoother's mean whose draws are likeliest; its q.

    Likeliest is the highest median log weight, at the start's ϑ.
    """

    def merit(q: VariationalPosterior) -> Tensor:
        """That median."""
        vartheta = start.vartheta.expand(NUM_PATHS, -1)
        return log_ratio(model, q, grid, vartheta, torch.Generator().manual_seed(seed)).median()

    about = VariationalPosterior(model, grid, PLAIN, start, 0)
    move = about.chain(start.vartheta[None]).mean[..., 0].T
    tried = [(merit(about), start, about)]
    for share in SHARES:
        x = about.with_x0(about.to_range(about.loc0 + share * move)[0][None])[0]
        other = start._replace(path=admissible(model, x))
        q = VariationalPosterior(model, grid, PLAIN, other, 0)
        tried.append((merit(q), other, q))
    return max(tried, key=lambda each: each[0])[1:]


def _student(
    mean: Tensor, tril: Tensor, generator: torch.Generator
) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
    """Draws of the multivariate t, and their log density up to a constant."""
    d = len(mean)
    noise = torch.randn(NUM_DRAWS, d + FREEDOM, generator=generator, dtype=mean.dtype)
    z = noise[:, :d] * (FREEDOM / noise[:, d:].square().sum(1)).sqrt()[:, None]
    return mean + z @ tril.T, -0.5 * (FREEDOM + d) * torch.log1p(z.square().sum(1) / FREEDOM)
