"""The OU posterior without Monte Carlo: p(ϑ | y) ∝ p(ϑ) p(y | θ) by quadrature (appendix C).

Corrects the end of appendix C, which calls p(y) intractable.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import max_pool2d

from lib import panels
from lib.kalman import LinearGaussian, forward_filter, ou_transition

NAMES = ("log_theta1", "theta2", "log_theta3")
REACH = 6.0  # prior standard deviations covered: 2e-9 of the prior mass lies outside
WIDEST = 5.0  # first panels, log units: nodes at most 0.9 apart, for modes to be seen
NEGLIGIBLE = 1e-16  # of the total mass: a cell below this, like its neighbours, is empty
HOPELESS = 1e11  # nats below zero, where the likelihood is taken as 0
MAX_ROUNDS = 40  # each halves panels or looks one cell further along a ridge
CHUNK = 2048  # grid points filtered at once, to stay in the cache

Value = float | int | Float[Tensor, "*batch"]


class QuadraturePosterior(NamedTuple):
    """p(ϑ | y) on a grid of (log θ1, log θ3), normal in θ2 given the two.

    ``weights`` is the posterior mass at the nodes and sums to 1. A panel is an interval
    (left, right) of one axis, with 8 consecutive nodes.

    >>> ou_posterior(torch.tensor([19.5, 18.9, 19.2]), 0.1, exact=True).mean.shape
    torch.Size([3])
    """

    log_evidence: float  # log p(y), accurate to 0.001
    grid_log_theta1: Float[Tensor, " rows"]
    grid_log_theta3: Float[Tensor, " columns"]
    weights: Float[Tensor, "rows columns"]
    theta2_mean: Float[Tensor, "rows columns"]
    theta2_var: Float[Tensor, "rows columns"]
    panels_log_theta1: Float[Tensor, "panels 2"]
    panels_log_theta3: Float[Tensor, "panels 2"]

    @property
    def mean(self) -> Float[Tensor, "3"]:
        """E ϑ, in the order of NAMES."""
        return torch.stack([(self.weights * value).sum() for value in self._values()])

    @property
    def covariance(self) -> Float[Tensor, "3 3"]:
        """Cov ϑ."""
        values = torch.stack(torch.broadcast_tensors(*self._values()))
        centred = values - self.mean[:, None, None]
        between = torch.einsum("irc,jrc,rc->ij", centred, centred, self.weights)
        within = torch.zeros_like(self.mean)
        within[1] = (self.weights * self.theta2_var).sum()
        return between + within.diag()

    @property
    def sd(self) -> Float[Tensor, "3"]:
        """Standard deviations of ϑ."""
        return self.covariance.diagonal().sqrt()

    @property
    def correlation(self) -> Float[Tensor, "3 3"]:
        """Correlations of ϑ."""
        return self.covariance / self.sd / self.sd[:, None]

    def marginal(self, name: str, points: Value) -> Float[Tensor, "*batch"]:
        """Density of one component of ϑ; absolute error below 1e-4 of its peak.

        Args:
            name: One of "log_theta1", "theta2", "log_theta3".
            points: Where to evaluate it.
        """
        points = torch.as_tensor(points, dtype=torch.float64)
        if _known(name) == "theta2":
            return self._theta2_average(points, _normal_density)
        return panels.density(*self._expansion(name), points)

    def probability_below(self, name: str, value: Value) -> Float[Tensor, "*batch"]:
        """P(component < value | y), in the shape of value."""
        value = torch.as_tensor(value, dtype=torch.float64)
        if _known(name) == "theta2":
            return self._theta2_average(value, lambda z, sd: torch.special.ndtr(z))
        return panels.cumulative(*self._expansion(name), value)

    def quantile(self, name: str, levels: Value) -> Float[Tensor, "*batch"]:
        """Quantiles of one component of ϑ by bisection, in the shape of levels."""
        levels = torch.as_tensor(levels, dtype=torch.float64)
        if not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"levels must lie between 0 and 1; got {levels.tolist()}.")
        if _known(name) == "theta2":
            _, mean, sd = self._mixture()
            low, high = (mean - 10 * sd).min(), (mean + 10 * sd).max()
        else:
            intervals, _ = self._expansion(name)
            low, high = intervals.min(), intervals.max()
        low, high = low.expand_as(levels), high.expand_as(levels)
        for _ in range(50):
            middle = (low + high) / 2
            below = self.probability_below(name, middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def _values(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.grid_log_theta1[:, None], self.theta2_mean, self.grid_log_theta3

    def _mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        """θ2 | y as a mixture of normals: mass, mean and s.d. of the components that count."""
        counts = self.weights > 1e-13
        return self.weights[counts], self.theta2_mean[counts], self.theta2_var[counts].sqrt()

    def _theta2_average(
        self, points: Float[Tensor, "*batch"], kernel: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "*batch"]:
        """Σ mass · kernel((point − mean)/sd, sd) over the mixture, a few points at a time."""
        mass, mean, sd = self._mixture()
        chunks = points.reshape(-1, 1).split(64)
        return torch.cat([kernel((x - mean) / sd, sd) @ mass for x in chunks]).reshape(points.shape)

    def _expansion(self, name: str) -> tuple[Tensor, Tensor]:
        """Panels, and the Legendre coefficients of the marginal density in each."""
        axis = NAMES.index(name) // 2
        intervals = (self.panels_log_theta1, self.panels_log_theta3)[axis]
        return intervals, panels.coefficients(intervals, self.weights.sum(1 - axis))


def ou_posterior(
    y: Float[Tensor, "..."],
    dt: float | int | Float[Tensor, " time"],
    exact: bool,
    x0: float | int = 20.0,
    sigma2: float | int = 1.0,
    prior_sd: float | int = 10.0,
) -> QuadraturePosterior:
    """Posterior of the OU model's ϑ = (log θ1, θ2, log θ3) and the evidence log p(y).

    log p(y | θ) is quadratic in θ2, so that three filter runs integrate θ2 out exactly. Over
    (log θ1, log θ3) a product of Gauss-Legendre panels covers the prior's ±6 s.d.; panels are
    halved until their Legendre series has converged, and evaluated no further from the mass than
    its neighbours. Tails, ridges and separate modes are kept. A few seconds for N = 200.

    Args:
        y: Observations at t_1..t_N; NaN = missing.
        dt: Step, or the N steps of an irregular grid.
        exact: True for the exact transition, False for Euler-Maruyama.
        x0: Known state at t_0.
        sigma2: Known observation variance σ².
        prior_sd: The prior is N(0, prior_sd²) on each component of ϑ.

    Raises:
        ValueError: If prior_sd is not positive, or as :func:`lib.kalman.forward_filter`.
        RuntimeError: If 40 rounds do not resolve the posterior.
    """
    if not 0 < prior_sd < math.inf:
        raise ValueError(f"prior_sd must be positive and finite; got {prior_sd}.")
    model = _Model(y, dt, exact, x0, sigma2, float(prior_sd))
    count = max(4, math.ceil(2 * REACH * prior_sd / WIDEST))
    edges = torch.linspace(-REACH * prior_sd, REACH * prior_sd, count + 1, dtype=torch.float64)
    rows = columns = torch.stack([edges[:-1], edges[1:]], dim=1)
    cells = torch.empty(count, count, 3, panels.ORDER, panels.ORDER, dtype=torch.float64)
    known = torch.zeros(count, count, dtype=torch.bool)
    missing = ~known
    for _ in range(MAX_ROUNDS):
        cells[missing] = _evaluate(model, rows, columns, missing)
        known = known | missing
        weights, log_evidence = _weights(rows, columns, cells[:, :, 0])
        # A cell is empty only if its neighbours are: a ridge may pass between its nodes.
        alive = max_pool2d(weights.sum((2, 3))[None], 3, stride=1, padding=1)[0] > NEGLIGIBLE
        split_rows, split_columns = panels.unresolved(weights)
        split_rows |= panels.uneven(rows)
        split_columns |= panels.uneven(columns)
        if not (split_rows.any() or split_columns.any() or (alive & ~known).any()):
            keep = alive.any(1), alive.any(0)
            return _posterior(rows, columns, cells, weights, log_evidence, *keep)
        # What looks empty stays: a ridge narrower than the first panels is found once they are
        # halved, and then followed from cell to cell.
        rows, from_row, same_row = panels.refine(rows, split_rows)
        columns, from_column, same_column = panels.refine(columns, split_columns)
        known = known[from_row][:, from_column] & same_row[:, None] & same_column
        missing = alive[from_row][:, from_column] & ~known
        cells = cells[from_row][:, from_column]
        cells[~known, 0] = -math.inf
    raise RuntimeError(f"quadrature must converge in {MAX_ROUNDS} rounds; it did not for this y.")


class _Model(NamedTuple):
    y: Tensor
    dt: float | int | Tensor
    exact: bool
    x0: float | int
    sigma2: float | int
    prior_sd: float


def _evaluate(
    model: _Model,
    rows: Float[Tensor, "rows 2"],
    columns: Float[Tensor, "columns 2"],
    missing: Bool[Tensor, "rows columns"],
) -> Float[Tensor, "cells 3 order order"]:
    """log p(log θ1, log θ3, y), mean and variance of θ2 given them, at the missing cells' nodes."""
    row, column = missing.nonzero().unbind(1)
    u, v = panels.nodes(rows)[0][row], panels.nodes(columns)[0][column]
    u, v = torch.broadcast_tensors(u[:, :, None], v[:, None, :])
    points = torch.stack([u, v], dim=-1).reshape(-1, 2)
    chunks = [_theta2_given(model, chunk) for chunk in points.split(CHUNK)]
    values = torch.cat(chunks, dim=1).reshape(3, *u.shape).movedim(0, 1)
    log_norm = math.log(2 * math.pi) + 2 * math.log(model.prior_sd)
    values[:, 0] -= 0.5 * (u.square() + v.square()) / model.prior_sd**2 + log_norm
    return values


def _theta2_given(model: _Model, points: Float[Tensor, "points 2"]) -> Float[Tensor, "3 points"]:
    r"""log p(y | θ1, θ3), mean and variance of θ2 given the two and y.

    With log p(y | θ) = A + Bθ2 + Cθ2² from θ2 = −s, 0, s (s the prior s.d.) and τ = 1/s² − 2C:
    :math:`\log p(y | θ_1, θ_3) = A + B^2/(2τ) - \log(τ s^2)/2`, mean B/τ, variance 1/τ.
    """
    s = model.prior_sd
    theta1, theta3 = points.exp().unbind(-1)
    theta = torch.stack([theta1, torch.ones_like(theta1), theta3], dim=-1)
    phi, b, q = ou_transition(theta, model.dt, model.exact)
    # b is proportional to θ2, and the variances do not depend on it: one recursion for all three.
    theta2 = torch.tensor([-s, 0.0, s], dtype=torch.float64)[:, None]
    transition = LinearGaussian(phi[:, None], b[:, None] * theta2, q[:, None])
    runs = forward_filter(model.y, transition, model.x0, 0.0, model.sigma2).log_likelihood
    low, middle, high = runs.unbind(-1)
    slope, curvature = (high - low) / (2 * s), (high + low - 2 * middle) / (2 * s**2)
    precision = 1 / s**2 - 2 * curvature
    log_density = middle + slope.square() / (2 * precision) - (precision * s**2).log() / 2
    # Beyond this the differences are rounding errors. It takes a path that data cannot follow: an
    # unstable Euler recursion (θ1·dt > 2), or an overflow.
    valid = runs.abs().amax(-1) < HOPELESS
    log_density = torch.where(valid, log_density, -math.inf)
    mean, var = torch.where(valid, slope / precision, 0.0), torch.where(valid, 1 / precision, s**2)
    return torch.stack([log_density, mean, var])


def _weights(
    rows: Float[Tensor, "rows 2"],
    columns: Float[Tensor, "columns 2"],
    log_density: Float[Tensor, "rows columns order order"],
) -> tuple[Float[Tensor, "rows columns order order"], float]:
    """Posterior mass at every node, and the log evidence."""
    row_weights, column_weights = panels.nodes(rows)[1], panels.nodes(columns)[1]
    log_mass = log_density + row_weights.log()[:, None, :, None] + column_weights.log()[:, None]
    log_evidence = log_mass.flatten().logsumexp(0)
    return (log_mass - log_evidence).exp(), float(log_evidence)


def _posterior(
    rows: Tensor,
    columns: Tensor,
    cells: Tensor,
    weights: Tensor,
    log_evidence: float,
    keep_rows: Bool[Tensor, " rows"],
    keep_columns: Bool[Tensor, " columns"],
) -> QuadraturePosterior:
    """The cells as one grid, without rows and columns where no mass is."""
    rows, columns = rows[keep_rows], columns[keep_columns]
    cells, weights = (part[keep_rows][:, keep_columns] for part in (cells, weights))
    u, v = panels.nodes(rows)[0].flatten(), panels.nodes(columns)[0].flatten()
    grids = (weights, cells[:, :, 1], cells[:, :, 2])
    weights, mean, var = (part.transpose(1, 2).reshape(len(u), len(v)) for part in grids)
    return QuadraturePosterior(log_evidence, u, v, weights, mean, var, rows, columns)


def _normal_density(z: Tensor, sd: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / (sd * math.sqrt(2 * math.pi))


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}; got '{name}'.")
    return name
