"""Where a fit starts: near the data for the study's models, and never spoilt by what explodes."""

import json
from functools import cache

import pytest
import torch
from torch.distributions import LogNormal, Normal, Uniform

import lib
from lib import start
from lib.start import NUM_DRAWS, Start, find_start


def sir(x0=(762.0, 1.0), F=((0.0,), (1.0,)), days=14) -> tuple[lib.StateSpaceModel, lib.data.Grid]:
    data = lib.read_csv(
        lib.data_path("boarding_school_1978.csv"), dt=0.1, time="day", observed=["in_bed"]
    )
    observation = lib.GaussianObservation([list(row) for row in F], "sigma")
    x0 = list(x0) if isinstance(x0, tuple) else x0
    model = lib.StateSpaceModel(lib.SIR(), observation, Normal(torch.zeros(3), 3.0), x0)
    return model, lib.Observations(data.times[:days], data.y[:days], 0.1).grid()


@cache
def sir_start() -> Start:
    return find_start(*sir(), seed=0)


def ou(prior_sd=10.0) -> lib.StateSpaceModel:
    return lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), prior_sd),
        x0=[20.0],
    )


def drift_only(vartheta: torch.Tensor, num_steps: int, infected=1.0) -> torch.Tensor:
    """Euler steps of dS = −θ1SI, dI = θ1SI − θ2I from (762, infected), in plain numbers."""
    theta1, theta2 = vartheta[:2].exp().tolist()
    path = [(762.0, infected)]
    for _ in range(num_steps):
        s, i = path[-1]
        path.append((s - 0.1 * theta1 * s * i, i + 0.1 * (theta1 * s - theta2) * i))
    return torch.tensor(path)


def test_sir_starts_near_the_reference_posterior():
    """Kills a start left at the prior: log θ1 = 0 is 80 reference sds away."""
    start, grid = sir_start(), sir()[1]
    reference = json.loads(lib.data_path("reference/sir_outbreaks.json").read_text())
    for j, name in enumerate(("log_theta1", "log_theta2", "log_sigma")):
        off = float(start.vartheta[j]) - reference[name]["mean"]
        assert abs(off) < 4 * reference[name]["sd"], name
    assert start.path.shape == start.path_sd.shape == (141, 2) and (start.path > 0).all()
    seen = grid.observed[:, 0] > 0
    torch.testing.assert_close(start.path[seen, 1], grid.y[seen, 0])
    torch.testing.assert_close(start.vartheta_sd, torch.full((3,), 0.3), atol=0.03, rtol=0.0)


def test_the_search_ends_when_nothing_is_gained(monkeypatch):
    """Kills a search that stops short, and one that goes on for nothing: N = 20,000 took 47 s."""
    grid = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1).grid()
    calls, path = [], start._Residuals.path
    monkeypatch.setattr(start._Residuals, "path", lambda *a: calls.append(1) or path(*a))
    found, used = find_start(ou(), grid, seed=0), len(calls)
    monkeypatch.setattr(start, "PATIENCE", start.NUM_ITERATIONS)
    best, all_calls = find_start(ou(), grid, seed=0), len(calls) - used
    assert used < 0.5 * all_calls
    off = (found.vartheta - best.vartheta) / best.vartheta_sd
    assert off.abs().max() < 1e-3


def test_unobserved_component_follows_the_drift_and_sigma_its_residuals():
    """Kills an S that is interpolated or constant, another dt, a σ left at the prior."""
    start, grid = sir_start(), sir()[1]
    path = drift_only(start.vartheta, 140)
    torch.testing.assert_close(start.path[:, 0], path[:, 0])
    rms = (path[10::10, 1] - grid.y[10::10, 0]).square().mean().sqrt()
    assert start.vartheta[2].item() == pytest.approx(rms.log().item(), rel=1e-6)


def test_a_mixture_of_states_is_not_taken_for_one_of_them():
    """Kills a path through the data where y is S + I: no component is observed on its own."""
    start = find_start(*sir(F=((1.0,), (1.0,)), days=3), seed=0)
    path = drift_only(start.vartheta, 30)
    torch.testing.assert_close(start.path, torch.maximum(path, 1e-3 * path.amax(0)))


def test_spread_is_positive_and_keeps_positive_states_positive():
    start = sir_start()
    assert (start.path_sd > 0).all() and (start.path_sd <= 0.5 * start.path).all()
    assert start.path_sd.isfinite().all()


def test_ou_starts_near_the_exact_posterior():
    """Kills a start away from the data, or a θ3 that the drift's misfit moved."""
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    start = find_start(ou(), data.grid(), seed=0)
    euler = json.loads(lib.data_path("reference/ou_a.json").read_text())["euler"]
    off = (start.vartheta - torch.tensor(euler["mean"])).abs() / torch.tensor(euler["sd"])
    assert (off[:2] < 3).all()
    median = ou().sample_prior(NUM_DRAWS, seed=0)[:, 2].quantile(0.5)
    torch.testing.assert_close(start.vartheta[2], median, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(start.path[1:, 0], data.y[:, 0])


def test_spread_grows_with_the_distance_from_the_data():
    """θ3·sqrt((gap + 1)·dt). Kills a gap counted from one side only."""
    index = torch.cat([torch.arange(1, 31), torch.arange(36, 61)])
    y = 20 + 0.1 * (index % 7)
    data = lib.Observations(index * 0.1, y, 0.1)
    start = find_start(ou(prior_sd=0.5), data.grid(), seed=0)
    gap = torch.tensor([0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0])
    expected = start.vartheta[2].exp() * ((gap + 1) * 0.1).sqrt()
    torch.testing.assert_close(start.path_sd[30:37, 0], expected)
    line = torch.linspace(float(y[29]), float(y[30]), 7)
    torch.testing.assert_close(start.path[30:37, 0], line)


class Explosive(lib.SDE):
    """Grows like x²: most prior draws blow up within the record, to ∞ and then, ∞ − ∞, to NaN."""

    state_names, theta_names, positive_theta = ("x",), ("rate", "noise"), ("rate", "noise")

    def drift(self, t, x, theta):
        return theta[..., :1] * x.square() - 1e-9 * x.pow(3)

    def diffusion(self, t, x, theta):
        return theta[..., 1:2, None].square()


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_that_explode_do_not_spoil_the_start(seed):
    """Kills a NaN that wins the comparison of costs."""
    grid_times = torch.arange(1, 51) * 0.1
    y = 1 / (1 - 0.15 * grid_times)  # the solution for rate 0.15
    model = lib.StateSpaceModel(
        Explosive(), lib.GaussianObservation([[1.0]], 0.1), Normal(torch.zeros(2), 3.0), [1.0]
    )
    start = find_start(model, lib.Observations(grid_times, y, 0.1).grid(), seed=seed)
    assert start.vartheta[0].exp().item() == pytest.approx(0.15, rel=0.1)
    assert all(part.isfinite().all() for part in start)


def test_if_every_draw_explodes_the_start_is_the_priors_median():
    """Kills an arbitrary draw, the first of many infinite costs."""
    prior = Normal(torch.tensor([6.0, 0.0]), 0.1)
    observation = lib.GaussianObservation([[1.0]], 0.1)
    model = lib.StateSpaceModel(Explosive(), observation, prior, [1.0])
    data = lib.Observations(torch.arange(1, 51) * 0.1, torch.ones(50), 0.1)
    start = find_start(model, data.grid(), seed=0)
    assert all(part.isfinite().all() for part in start)
    median = model.sample_prior(NUM_DRAWS, seed=0).quantile(0.5, dim=0)
    torch.testing.assert_close(start.vartheta, median)


def test_a_very_wide_prior_still_starts_where_steps_are_finite():
    """Kills a spread of e^30 for a positive θ; that of a real one keeps its unit."""
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), torch.tensor([300.0, 5000.0, 300.0])),
        x0=[20.0],
    )
    data = lib.Observations(torch.arange(1, 31) * 0.1, 20 - torch.arange(1, 31) * 0.1, 0.1)
    start = find_start(model, data.grid(), seed=0)
    assert all(part.isfinite().all() for part in start)
    torch.testing.assert_close(start.vartheta_sd[[0, 2]], torch.full((2,), 3.0))
    assert 400 < start.vartheta_sd[1] < 600


def test_a_rare_draw_outside_the_parameters_range_is_dropped():
    """log of a negative draw of N(4.2, 1) is NaN. Kills a quantile that becomes NaN too."""
    prior = {"theta1": Normal(4.2, 1.0), "theta2": Normal(0.0, 1.0), "theta3": LogNormal(0.0, 1.0)}
    observation = lib.GaussianObservation([[1.0]], 1.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), observation, prior, x0=[5.0])
    seed = next(s for s in range(999) if model.sample_prior(NUM_DRAWS, s).isnan().any())
    start = find_start(model, lib.Observations([0.1, 0.2], [5.0, 4.0], 0.1).grid(), seed)
    assert all(part.isfinite().all() for part in start)


class Tank(lib.SDE):
    """The noise of a level x in a tank of height 10 vanishes at the rim."""

    state_names, theta_names, positive_theta = ("x",), ("rate", "noise"), ("rate", "noise")

    def drift(self, t, x, theta):
        return theta[..., :1] * torch.ones_like(x)

    def diffusion(self, t, x, theta):
        return (theta[..., 1:] * (10 - x))[..., None]


def test_diffusion_that_fails_along_the_data_is_refused():
    """It holds at x_0. Kills a fit that skips 50 steps and then says log_transition."""
    observation = lib.GaussianObservation([[1.0]], 0.5)
    model = lib.StateSpaceModel(Tank(), observation, Normal(torch.zeros(2), 1.0), x0=[1.0])
    data = lib.Observations([0.1, 0.2, 0.3, 0.4], [4.0, 9.0, 12.0, 10.5], 0.1)
    message = (
        r"diffusion must be positive definite on a path .* t = \[0.3\d*\], x = \[12.0\], .* 1 of 4"
    )
    with pytest.raises(ValueError, match=message):
        find_start(model, data.grid(), seed=0)
    # At the rim itself β = 0, and the last state needs none.
    inside = lib.Observations([0.1, 0.2, 0.3, 0.4], [4.0, 9.0, 10.0, 10.5], 0.1)
    assert find_start(model, inside.grid(), seed=0).path[-1] == 10.5


def test_the_number_in_a_missing_cell_does_not_matter():
    model, grid = sir(days=5)
    stuffed = grid._replace(y=torch.where(grid.observed > 0, grid.y, 1e30))
    for a, b in zip(find_start(model, grid, 0), find_start(model, stuffed, 0), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_counts_of_zero_start_above_zero():
    """Kills log 0 in the inverse softplus, and β = 0 where everyone is well."""
    model, grid = sir(days=3)
    start = find_start(model, grid._replace(y=torch.zeros_like(grid.y)), seed=0)
    assert all(part.isfinite().all() for part in start)
    assert (start.path > 0).all() and (start.path_sd > 0).all()


def test_random_positive_x0_starts_inside():
    """Kills: an x_0 whose logarithm is taken for itself."""
    model, grid = sir({"S": 762.0, "I": LogNormal(1.0, 0.5)}, days=5)
    start = find_start(model, grid, seed=0)
    assert all(part.isfinite().all() for part in start) and (start.path > 0).all()
    assert start.path[0, 0] == 762.0
    # I is observed from day 1 on only: before it the line is flat, not tied to x_0.
    torch.testing.assert_close(start.path[:11, 1], torch.full((11,), float(grid.y[10, 0])))


def test_without_data_the_start_is_the_priors_median():
    """Kills 0/0 in the scale of the residuals or in σ."""
    model, grid = sir(days=2)
    start = find_start(model, grid._replace(observed=torch.zeros_like(grid.observed)), seed=0)
    median = model.sample_prior(NUM_DRAWS, seed=0).quantile(0.5, dim=0)
    torch.testing.assert_close(start.vartheta, median)
    assert all(part.isfinite().all() for part in start)


def test_start_repeats_and_leaves_the_global_generator_alone():
    model, grid = sir(days=5)
    state = torch.random.get_rng_state()
    first, again = (find_start(model, grid, seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_is_unknown_of_x0_is_fitted():
    """Data from x_0 = 3 where the prior's median is 0. Kills: x_0 held at its median.

    The parameter would then make up for it: a rate near 40 in place of 1.
    """

    class Decay(lib.SDE):
        state_names, theta_names = ("x", "size"), ("rate",)
        positive_theta, positive_state = ("rate",), ("size",)

        def drift(self, t, x, theta):
            return torch.stack([theta[..., 0] * (1 - x[..., 0]), -0.5 * x[..., 1]], -1)

        def diffusion(self, t, x, theta):
            return 0.01 * torch.eye(2).expand(*x.shape[:-1], 2, 2)

    t = 0.1 * torch.arange(1, 31)
    y = torch.stack([1 + 2 * 0.9 ** torch.arange(1, 31), 5 * 0.95 ** torch.arange(1, 31)], -1)
    x0 = {"x": Normal(0.0, 2.0), "size": LogNormal(0.0, 1.0)}
    model = lib.StateSpaceModel(
        Decay(), lib.GaussianObservation(torch.eye(2), 0.1), {"rate": LogNormal(0.0, 1.0)}, x0
    )
    start = find_start(model, lib.Observations(t, y, dt=0.1).grid(), seed=0)
    assert model.to_theta(start.vartheta).item() == pytest.approx(1.0, rel=0.05)
    assert start.path[0].tolist() == pytest.approx([3.0, 5.0], rel=0.15)


def test_an_unknown_sigma_starts_within_its_prior():
    """Residuals of 40 boys, σ below 5. Kills the root mean square as it is: its logit is NaN."""
    prior = {"theta1": LogNormal(-6.0, 1.0), "theta2": LogNormal(0.0, 1.0)}
    prior["sigma"] = Uniform(0.0, 5.0)
    observation = lib.GaussianObservation([[0.0], [1.0]], "sigma")
    model = lib.StateSpaceModel(lib.SIR(population=763), observation, prior, [762.0, 1.0])
    y = torch.tensor([3.0, 90.0, 4.0, 80.0, 2.0])
    start = find_start(model, lib.Observations(torch.arange(1.0, 6.0), y, 0.25).grid(), seed=0)
    assert start.vartheta.isfinite().all()
    assert 4.9 < model.to_theta(start.vartheta)[2] < 5
