"""What the networks see of y at each time: windows, mask, clocks, and what they must not see."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.testing import assert_close

from lib.data import Grid, Observations
from lib.family import Family
from lib.features import centred_features, interpolate, past_features, steps_since
from lib.posterior import VariationalPosterior
from lib.sde import OrnsteinUhlenbeck
from lib.ssm import GaussianObservation, StateSpaceModel
from lib.start import Start

NAN = math.nan
K = 2


def one_series() -> Grid:
    """t_0..t_7 with y observed at t_2, t_3 and t_6."""
    return Observations([0.2, 0.3, 0.6, 0.7], [4.0, -2.0, 7.0, NAN], dt=0.1).grid()


def two_series() -> Grid:
    """t_0..t_6, two components missing at different times, y_0 of the first one observed."""
    y = [[1.0, NAN], [NAN, 3.0], [2.5, -1.0], [NAN, NAN], [6.0, 0.5]]
    return Observations([0.0, 1.0, 3.0, 5.0, 6.0], y, dt=1.0).grid()


def values(grid: Grid) -> list[list[float]]:
    """y as nested lists with 0 where missing: what a reader would write down."""
    return (grid.y * grid.observed).tolist()


def at(rows: list[list[float]], i: int) -> list[float]:
    """Row i, zeros off the series."""
    return rows[i] if 0 <= i < len(rows) else [0.0] * len(rows[0])


class Centred(NamedTuple):
    """The table of centred features taken apart."""

    y: Tensor  # (time, 2k + 1, m)
    observed: Tensor
    inside: Tensor  # (time, 2k + 1)
    clock: Tensor
    since: Tensor
    until: Tensor
    line: Tensor


def centred(grid: Grid, k: int = K) -> Centred:
    table, m = centred_features(grid, k), grid.y.shape[1]
    width = (2 * k + 1) * (2 * m + 1)
    channels = table[:, :width].view(len(table), 2 * k + 1, 2 * m + 1)
    rest = table[:, width:].split([1, m, m, m], -1)
    return Centred(channels[..., :m], channels[..., m : 2 * m], channels[..., -1], *rest)


@pytest.mark.parametrize("make", [one_series, two_series])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_past_features_are_the_k_values_before(make, k: int) -> None:
    """Kills a window that includes y_i, one that is newest first, one that wraps around."""
    grid = make()
    rows = values(grid)
    expected = [sum((at(rows, j) for j in range(i - k, i)), []) for i in range(len(rows))]
    assert_close(past_features(grid, k), torch.tensor(expected))


def paper_posterior(grid: Grid, k: int, x0: object) -> VariationalPosterior:
    model = StateSpaceModel(
        OrnsteinUhlenbeck(),
        GaussianObservation([[1.0] * grid.y.shape[1]], 1.0),
        Normal(torch.zeros(3), torch.ones(3)),
        x0,
    )
    path = torch.ones(len(grid.t), 1)
    start = Start(torch.zeros(3), torch.ones(3), path, path)
    family = Family(features="past", receptive_field=k)
    return VariationalPosterior(model, grid, family, start, seed=0)


@pytest.mark.parametrize("make", [one_series, two_series])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("k", [2, 9])
def test_reversed_layers_see_the_future_of_y(make, first: int, k: int) -> None:
    """Kills a flipped table of features (the same past, in another order) in place of a flipped
    series; the row of time i is y_{i+k}, …, y_{i+1}, zero past N."""
    grid = make()
    x0 = torch.zeros(1) if first else Normal(torch.zeros(1), torch.ones(1))
    q, rows = paper_posterior(grid, k, x0), values(grid)
    times = range(first, len(rows))
    past = [sum((at(rows, j) for j in range(i - k, i)), []) for i in times]
    future = [sum((at(rows, j) for j in range(i + k, i, -1)), []) for i in times]
    assert_close(q.features_ahead, torch.tensor(past))
    assert_close(q.features_behind.flip(0), torch.tensor(future))


@pytest.mark.parametrize("make", [one_series, two_series])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_centred_windows_hold_y_its_mask_and_the_grid(make, k: int) -> None:
    grid = make()
    parts, n = centred(grid, k), len(grid.t)
    seen = grid.observed > 0
    for c in range(grid.y.shape[1]):
        column = grid.y[:, c][seen[:, c]]
        standard = torch.zeros(n)
        standard[seen[:, c]] = (column - column.mean()) / column.std(unbiased=False)
        for i in range(n):
            for position, j in enumerate(range(i - k, i + k + 1)):
                inside = 0 <= j < n
                expected = standard[j] if inside else torch.tensor(0.0)
                assert_close(parts.y[i, position, c], expected)
                assert parts.observed[i, position, c] == (inside and bool(seen[j, c]))
                assert parts.inside[i, position] == inside


def test_clocks_count_grid_steps_to_the_nearest_observations() -> None:
    parts = centred(one_series())
    assert_close(parts.clock[:, 0], torch.linspace(-1, 1, 8))
    since, until = [0, 1, 0, 0, 1, 2, 0, 1], [2, 1, 0, 2, 1, 0, 0, 0]
    # Before the first observation the clock runs from t_0, after the last one it runs to t_N.
    until[6], until[7] = 0, 0
    until[3:6] = [0, 2, 1]
    assert_close(parts.since[:, 0], torch.tensor(since, dtype=parts.since.dtype).log1p() / K)
    assert_close(parts.until[:, 0], torch.tensor(until, dtype=parts.until.dtype).log1p() / K)


def test_steps_since_counts_each_component_by_itself() -> None:
    observed = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 2.0], [1.0, 0.0], [2.0, 1.0]])
    assert steps_since(observed).equal(expected)


def test_interpolation_is_linear_between_and_constant_outside() -> None:
    y = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [0.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    observed = torch.tensor([[0.0, 0], [0, 1], [1, 0], [0, 0], [0, 1], [1, 0]])
    expected = torch.tensor([[4.0, 2], [4, 2], [4, 1], [3, 0], [2, -1], [1, -1]])
    assert_close(interpolate(y, observed), expected)
    assert interpolate(y, torch.zeros_like(y)).equal(torch.zeros_like(y))


def test_interpolated_feature_goes_through_the_standardised_observations() -> None:
    grid = two_series()
    parts, seen = centred(grid), grid.observed > 0
    assert_close(parts.line[seen], parts.y[:, K][seen])


@pytest.mark.parametrize("features", [past_features, centred_features])
@pytest.mark.parametrize("make", [one_series, two_series])
def test_the_number_stored_in_a_missing_cell_does_not_matter(make, features) -> None:
    """Kills sums and windows of y that are not multiplied by the mask."""
    grid = make()
    stuffed = grid._replace(y=torch.where(grid.observed > 0, grid.y, torch.full_like(grid.y, 1e30)))
    assert features(stuffed, K).equal(features(grid, K))


@pytest.mark.parametrize("shift, factor", [(1000.0, 1.0), (0.0, 60.0), (-3.0, -0.1)])
def test_centred_features_do_not_know_the_unit_of_y(shift: float, factor: float) -> None:
    grid = two_series()
    other = grid._replace(y=(grid.y * factor + shift) * grid.observed)
    here, there = centred(grid), centred(other)
    sign = math.copysign(1.0, factor)
    assert_close(there.y, here.y * sign)
    assert_close(there.line, here.line * sign)
    assert there.observed.equal(here.observed)


@pytest.mark.parametrize("y", [[3.0, 3.0, 3.0], [NAN, 3.0, NAN]])
def test_a_constant_series_or_one_observation_gives_finite_features(y: list[float]) -> None:
    grid = Observations([1.0, 2.0, 4.0], y, dt=1.0).grid()
    assert centred_features(grid, K).isfinite().all()
    assert (centred(grid).y == 0).all()
