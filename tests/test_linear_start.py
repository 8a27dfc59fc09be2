"""The start by importance sampling: near the exact posterior, repeatable, harmless otherwise."""

import pytest
import torch
from scipy.stats import f, multivariate_t
from torch.distributions import Normal

import lib
from lib.data import Grid
from lib.elbo import log_ratio
from lib.linear_start import (
    FREEDOM,
    NUM_PATHS,
    PLAIN,
    _best_path,
    _student,
    linear_start,
)
from lib.posterior import VariationalPosterior
from lib.start import Start, find_start
from tests.test_linearised import sir


def ou() -> tuple[lib.StateSpaceModel, lib.Observations]:
    """The study's: its posterior has no long tails."""
    seen = lib.GaussianObservation([[1.0]], 1.0)
    prior = Normal(torch.zeros(3), 10.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), seen, prior, [20.0])
    return model, lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)


def test_mean_and_spread_are_near_those_of_the_exact_posterior() -> None:
    """Kills weights without the proposal's density, and moments of the draws themselves."""
    model, data = ou()
    start = linear_start(model, data.grid(), find_start(model, data.grid(), 0), 0)
    exact = lib.ou_posterior(data.y[:, 0], 0.1, exact=False)
    assert ((start.vartheta - exact.mean) / exact.sd).abs().max() < 0.25
    assert (start.vartheta_sd / exact.sd - 1).abs().max() < 0.4


def test_it_repeats_and_leaves_the_global_generator_alone() -> None:
    model, data = sir()
    first, state = find_start(model, data.grid(), 0), torch.get_rng_state()
    one, two = (linear_start(model, data.grid(), first, 5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    other = linear_start(model, data.grid(), first, 6)
    assert not torch.equal(one.vartheta, other.vartheta)
    assert (one.path > 0).all() and torch.equal(one.path[0], first.path[0])


def test_where_no_draw_has_mass_the_start_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = sir()
    first = find_start(model, data.grid(), 0)
    nothing = lambda *args: torch.full((len(args[3]),), -torch.inf, dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr("lib.linear_start.log_ratio", nothing)
    found = linear_start(model, data.grid(), first, 0)
    assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_the_proposal_is_a_multivariate_t_up_to_a_constant() -> None:
    """10⁴ draws; kills draws of a normal with the density of a t."""
    mean = torch.tensor([1.0, -2.0, 0.5])
    tril = torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.3, 0.0], [-1.0, 0.2, 0.7]])
    generator = torch.Generator().manual_seed(0)
    drawn = [_student(mean, tril, generator) for _ in range(20)]
    vartheta, log_proposal = (torch.cat(part) for part in zip(*drawn, strict=True))
    law = multivariate_t(mean.numpy(), (tril @ tril.T).numpy(), df=FREEDOM)
    apart = log_proposal - torch.as_tensor(law.logpdf(vartheta.numpy()))
    torch.testing.assert_close(apart, apart[:1].expand_as(apart), rtol=0, atol=1e-9)
    distance = torch.linalg.solve_triangular(tril, (vartheta - mean).T, upper=False)
    above = (distance.square().mean(0) > f.ppf(0.9, 3, FREEDOM)).double().mean()
    assert abs(above - 0.1) < 5 * (0.09 / len(vartheta)) ** 0.5


def merit(model: lib.StateSpaceModel, grid: Grid, start: Start) -> torch.Tensor:
    """Median log weight of the smoother's paths about a start's path."""
    q, vartheta = VariationalPosterior(model, grid, PLAIN, start, 0), start.vartheta
    generator = torch.Generator().manual_seed(3)
    return log_ratio(model, q, grid, vartheta.expand(NUM_PATHS, -1), generator).median()


def test_the_path_moves_only_to_where_draws_are_likelier() -> None:
    """Kills a move that is not judged, and one judged the wrong way round."""
    model, data = sir()
    grid = data.grid()
    near = find_start(model, grid, 0)
    path = near.path.clone()
    path[1:, 1] *= 4
    for start in (near, near._replace(path=path)):
        before = [part.clone() for part in start]
        moved, q = _best_path(model, grid, start, 3)
        assert torch.equal(q.loc0, VariationalPosterior(model, grid, PLAIN, moved, 0).loc0)
        assert all(torch.equal(a, b) for a, b in zip(start, before, strict=True))
        stays = torch.equal(moved.path, start.path)
        gain = merit(model, grid, moved) - merit(model, grid, start)
        assert gain == 0 if stays else gain > 0
    assert not stays


def test_common_noise_is_shared_by_all_theta_and_its_ratio_is_a_mean() -> None:
    """Kills a sum in place of the mean, and noise of each ϑ's own."""

    def ratios(problem: tuple[lib.StateSpaceModel, lib.Observations], common: int) -> torch.Tensor:
        model, data = problem
        start = find_start(model, data.grid(), 0)
        q, vartheta = VariationalPosterior(model, data.grid(), PLAIN, start, 0), start.vartheta
        generator = torch.Generator().manual_seed(1)
        return log_ratio(model, q, data.grid(), vartheta.expand(8, -1), generator, common)

    assert ratios(sir(), 3).std() < 1e-9 and ratios(sir(), 0).std() > 0.1
    # Of OU every path has the same ratio, and so has every mean.
    torch.testing.assert_close(ratios(ou(), 3), ratios(ou(), 0), rtol=1e-9, atol=1e-8)
