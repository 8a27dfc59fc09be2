"""Where a fit starts: least squares of the drift-only path, from many prior draws."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.bounds import Bounds
from lib.data import Grid
from lib.features import interpolate, mean_sd, steps_since
from lib.ssm import StateSpaceModel

NUM_DRAWS = 2000
NUM_REFINED = 16
# Done when no start gains such a share so many times in a row: it only has to be near.
SMALLEST_GAIN, PATIENCE = 1e-4, 3
NUM_ITERATIONS = 30
RESIDUAL_SHARE = 0.1
WIDEST_LOG = 30.0
SMALLEST_SHARE = 1e-3
TOLERANCE = 1e-8  # relative to the largest entry of β


class Start(NamedTuple):
    """Centre and spread of q at the start of training; path includes x_0."""

    vartheta: Float[Tensor, " theta"]
    vartheta_sd: Float[Tensor, " theta"]
    path: Float[Tensor, "time state"]
    path_sd: Float[Tensor, "time state"]


def find_start(model: StateSpaceModel, grid: Grid, seed: int) -> Start:
    """Fit the drift ODE to the data by Levenberg-Marquardt from the best of many prior draws.

    What is unknown of x_0 is fitted too: held at its prior's median, a rate would make up for it.
    Parameters that do not move the drift stay at the prior's median, except an unknown σ, which
    starts at the size of the residuals. Draws whose path explodes are dropped; if all do, the start
    is the prior's median.

    Args:
        model: In float64 on the CPU.
        grid: The data, likewise.
        seed: Of the prior draws.

    Raises:
        ValueError: β is not positive definite somewhere on the path through the data.
    """
    d, draws = model.num_theta, _draw_unknowns(model, seed)
    low, median, high = torch.nanquantile(
        draws, torch.tensor([0.16, 0.5, 0.84], dtype=draws.dtype), dim=0
    )
    spread = 0.5 * (high - low)
    residuals = _Residuals(model, grid, median, spread)
    candidates = torch.cat([median[None], draws])
    cost = residuals(candidates).square().sum(-1).nan_to_num(torch.inf)
    best = candidates[cost.argsort(stable=True)[:NUM_REFINED]]
    found = _least_squares(residuals, best)
    vartheta, path = found[:d], residuals.path(found[None])[0]
    vartheta = _noise_scale(model, grid, vartheta, path)
    path = _through_data(model, grid, path)
    _check_beta(model, grid, vartheta, path)
    # exp of a wider ϑ overflows in nearly every draw, and then no step of a fit is finite.
    spread = torch.where(model.bounds.one_end, spread[:d].clamp(max=WIDEST_LOG), spread[:d])
    return Start(vartheta, 0.1 * spread, path, _path_sd(model, grid, vartheta, path))


def _draw_unknowns(model: StateSpaceModel, seed: int) -> Tensor:
    """Prior draws of ϑ, then of what is unknown of x_0, unconstrained too."""
    free, bounds = _unknown_x0(model)
    x0 = bounds.to_unconstrained(model.sample_x0(NUM_DRAWS, seed)[:, free])
    return torch.cat([model.sample_prior(NUM_DRAWS, seed), x0], -1)


def _unknown_x0(model: StateSpaceModel) -> tuple[Tensor, Bounds]:
    """Which components of x_0 have a density; where those can be."""
    free, bounds = ~model.x0_fixed, model.initial.bounds
    return free, Bounds(bounds.low[free], bounds.high[free])


class _Residuals:
    """Scaled residuals (data, prior) of the drift-only path, from (ϑ, unknown x_0) (batch, …)."""

    def __init__(self, model: StateSpaceModel, grid: Grid, median: Tensor, spread: Tensor) -> None:
        self.model, self.grid = model, grid
        self.median, self.spread = median, spread
        self.scale = RESIDUAL_SHARE * mean_sd(grid)[1]

    def path(self, unknowns: Tensor) -> Tensor:
        """Euler steps of the drift alone, (batch, N+1, p)."""
        model, sde, grid = self.model, self.model.sde, self.grid
        theta, (free, bounds) = model.to_theta(unknowns[:, : model.num_theta]), _unknown_x0(model)
        x = model.x0_value.repeat(len(unknowns), 1)
        x[:, free] = bounds.to_natural(unknowns[:, model.num_theta :])
        steps = [x]
        for t in grid.t[:-1]:
            x = x + sde.drift(*sde.aligned(t.expand(1), x, theta)) * grid.dt
            steps.append(x)
        return torch.stack(steps, 1)

    def __call__(self, unknowns: Tensor) -> Tensor:
        fitted = self.model.observation.mean(self.path(unknowns))
        misfit = (self.grid.y - fitted) * self.grid.observed / self.scale
        # 0 * inf where nothing is observed must not spoil a path that is finite where it matters.
        misfit = torch.where(self.grid.observed > 0, misfit, torch.zeros_like(misfit))
        return torch.cat([misfit.flatten(1), (unknowns - self.median) / self.spread], -1)


def _least_squares(residuals: _Residuals, unknowns: Tensor) -> Tensor:
    """Levenberg-Marquardt on a batch of starts, Jacobian by differences; the best end."""
    batch, d = unknowns.shape
    damping = torch.full((batch, 1), 1e-2, dtype=unknowns.dtype)
    r = residuals(unknowns)
    cost = r.square().sum(-1).nan_to_num(torch.inf)
    step, stale = 1e-5, 0
    for _ in range(NUM_ITERATIONS):
        if stale == PATIENCE:
            break
        moved = unknowns[:, None] + step * torch.eye(d, dtype=unknowns.dtype)
        jacobian = (residuals(moved.flatten(0, 1)).unflatten(0, (batch, d)) - r[:, None]) / step
        jacobian = jacobian.nan_to_num(0.0, 0.0, 0.0)
        normal = jacobian @ jacobian.mT
        normal = normal + torch.diag_embed(damping * normal.diagonal(dim1=-2, dim2=-1) + 1e-9)
        gradient = jacobian @ r.nan_to_num(0.0, 0.0, 0.0)[..., None]
        proposal = unknowns - torch.linalg.solve(normal, gradient)[..., 0]
        r_new = residuals(proposal)
        cost_new = r_new.square().sum(-1).nan_to_num(torch.inf)
        better = cost_new < cost
        stale = 0 if (cost_new < (1 - SMALLEST_GAIN) * cost).any() else stale + 1
        unknowns = torch.where(better[:, None], proposal, unknowns)
        r, cost = torch.where(better[:, None], r_new, r), torch.where(better, cost_new, cost)
        damping = torch.where(better[:, None], damping / 3, damping * 4)
    return unknowns[cost.argmin()]


def _noise_scale(model: StateSpaceModel, grid: Grid, vartheta: Tensor, path: Tensor) -> Tensor:
    """Set each unknown σ to the root mean square of what the drift-only path leaves unexplained."""
    residual = (grid.y - model.observation.mean(path)) * grid.observed
    square, count = residual.square().sum(0), grid.observed.sum(0)
    theta, entries = model.to_theta(vartheta), model.observation.sigma
    for name in model.observation.theta_names:
        columns = [j for j in range(len(count)) if entries[min(j, len(entries) - 1)] == name]
        rms = (square[columns].sum() / count[columns].sum()).sqrt()
        if rms.isfinite() and rms > 0:
            theta[model.theta_names.index(name)] = rms
    # The rest as it was: exp and log would round it, or overflow.
    named = torch.tensor([name in model.observation.theta_names for name in model.theta_names])
    return torch.where(named, model.to_vartheta(model.bounds.inside(theta)), vartheta)


def _through_data(model: StateSpaceModel, grid: Grid, path: Tensor) -> Tensor:
    """Replace each component that is observed on its own by the interpolated data."""
    path = path.clone()
    anchored, values = grid.observed.clone(), grid.y.clone()
    F = model.observation.F
    for column in range(F.shape[1]):
        rows = F[:, column].nonzero()[:, 0]
        if len(rows) != 1 or not grid.observed[:, column].any():
            continue
        state, factor = rows[0], F[rows[0], column]
        if model.x0_fixed[state] and not anchored[0, column]:
            anchored[0, column], values[0, column] = 1.0, factor * model.x0_value[state]
        line = interpolate(values[:, [column]], anchored[:, [column]])[:, 0]
        path[:, state] = line / factor
    return admissible(model, path)


def admissible(model: StateSpaceModel, path: Tensor) -> Tensor:
    """Lift positive components to a small share of their largest value; fill what exploded."""
    path = torch.where(path.isfinite(), path, model.x0_value)
    lowest = SMALLEST_SHARE * path.abs().amax(0).clamp(min=1e-6)
    positive = torch.tensor(model.positive_states)
    return torch.where(positive & (path < lowest), lowest, path)


def _check_beta(model: StateSpaceModel, grid: Grid, vartheta: Tensor, path: Tensor) -> None:
    """Refuse a β that holds at x_0 but not along the data: no step of the fit would be finite."""
    sde = model.sde
    arguments = sde.aligned(grid.t[:-1, None], path[:-1], model.to_theta(vartheta))
    beta = sde.diffusion(*arguments).expand(len(path) - 1, -1, -1)
    finite = beta.isfinite().all((-2, -1))
    size = beta.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(beta.dtype).tiny)
    # A β of 0, at a count of 0 say, is no fault: the draws of q are not exactly there.
    lowest = torch.linalg.eigvalsh(torch.where(finite[:, None, None], beta / size, 0.0))[:, 0]
    bad = (lowest < -TOLERANCE).nonzero()[:, 0].tolist()
    if bad:
        t, x, theta = (part[bad[0]].tolist() for part in arguments)
        raise ValueError(
            "diffusion must be positive definite on a path through the data, where the fit starts; "
            f"got {beta[bad[0]].tolist()} at t = {t}, x = {x}, theta = {theta}, and in "
            f"{len(bad)} of {len(beta)} steps. Is a name missing from positive_state?"
        )


def _path_sd(model: StateSpaceModel, grid: Grid, vartheta: Tensor, path: Tensor) -> Tensor:
    """Spread of a diffusion since the nearest observation: sqrt(β_jj · (gap + dt)).

    Kept between 0.1 % and 30 % of the component's largest value, and for a positive state below
    half of its own: a start only has to be near.
    """
    theta = model.to_theta(vartheta)
    beta = model.sde.diffusion(*model.sde.aligned(grid.t[:, None], path, theta))
    gap = torch.minimum(steps_since(grid.observed), steps_since(grid.observed.flip(0)).flip(0))
    gap = gap.amin(-1, keepdim=True).clamp(max=0.1 * len(path)) + 1
    variance = beta.diagonal(dim1=-2, dim2=-1) * gap * grid.dt
    largest = path.abs().amax(0) + path.std(0)
    sd = variance.sqrt().nan_to_num(0.0, 0.0, 0.0)
    floor = 1e-3 * largest.clamp(min=1e-6)
    sd = torch.maximum(torch.minimum(sd, 0.3 * largest), floor)
    positive = torch.tensor(model.positive_states)
    return torch.where(positive, torch.minimum(sd, 0.5 * path), sd)
