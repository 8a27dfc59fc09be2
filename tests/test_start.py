"""Where a fit starts: near the data for the study's models, and never spoilt by what explodes."""

import json

import pytest
import torch
from torch.distributions import LogNormal, Normal

import lib
from lib.start import find_start


def sir(x0=(762.0, 1.0)) -> tuple[lib.StateSpaceModel, lib.Observations]:
    data = lib.read_csv(
        lib.data_path("boarding_school_1978.csv"), dt=0.1, time="day", observed=["in_bed"]
    )
    observation = lib.GaussianObservation([[0.0], [1.0]], "sigma")
    x0 = list(x0) if isinstance(x0, tuple) else x0
    return lib.StateSpaceModel(lib.SIR(), observation, Normal(torch.zeros(3), 3.0), x0), data


def test_sir_starts_near_the_reference_posterior():
    """Kills a start left at the prior: log θ1 = 0 is 80 reference sds away."""
    model, data = sir()
    start = find_start(model, data.grid(), seed=0)
    reference = json.loads(lib.data_path("reference/sir_outbreaks.json").read_text())
    for j, name in enumerate(("log_theta1", "log_theta2", "log_sigma")):
        off = float(start.vartheta[j]) - reference[name]["mean"]
        assert abs(off) < 4 * reference[name]["sd"], name
    assert start.path.shape == start.path_sd.shape == (141, 2)
    assert (start.path > 0).all() and (start.path_sd > 0).all() and start.path_sd.isfinite().all()
    torch.testing.assert_close(start.path[data.index, 1], data.y[:, 0])
    susceptible = start.path[:, 0]
    assert susceptible[0] == 762 and (susceptible.diff() < 0).all() and susceptible[-1] < 100


def test_ou_starts_near_the_exact_posterior():
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 10.0),
        x0=[20.0],
    )
    start = find_start(model, data.grid(), seed=0)
    exact = lib.ou_posterior(data.y[:, 0], 0.1, exact=False)
    assert ((start.vartheta - exact.mean).abs() < 3 * exact.sd)[:2].all()
    torch.testing.assert_close(start.path[1:, 0], data.y[:, 0])


class Explosive(lib.SDE):
    """Grows like x²: most prior draws blow up within the record."""

    state_names, theta_names, positive_theta = ("x",), ("rate", "noise"), ("rate", "noise")

    def drift(self, t, x, theta):
        return theta[..., :1] * x.square()

    def diffusion(self, t, x, theta):
        return theta[..., 1:2, None].square()


def test_draws_that_explode_do_not_spoil_the_start():
    """Kills a NaN that wins the comparison of costs."""
    grid_times = torch.arange(1, 51) * 0.1
    y = 1 / (1 - 0.15 * grid_times)  # the solution for rate 0.15
    model = lib.StateSpaceModel(
        Explosive(), lib.GaussianObservation([[1.0]], 0.1), Normal(torch.zeros(2), 3.0), [1.0]
    )
    start = find_start(model, lib.Observations(grid_times, y, 0.1).grid(), seed=0)
    assert start.vartheta[0].exp().item() == pytest.approx(0.15, rel=0.1)
    assert all(part.isfinite().all() for part in start)


def test_random_x0_and_nothing_observed():
    model, data = sir({"S": 762.0, "I": LogNormal(0.0, 1.0)})
    start = find_start(model, data.grid(), seed=0)
    assert all(part.isfinite().all() for part in start) and (start.path > 0).all()
    empty = data.grid()._replace(observed=torch.zeros_like(data.grid().observed))
    start = find_start(model, empty, seed=0)
    median = model.sample_prior(2000, 0).median(0).values
    torch.testing.assert_close(start.vartheta, median, atol=0.2, rtol=0.0)
    assert all(part.isfinite().all() for part in start)


def test_start_repeats_and_leaves_the_global_generator_alone():
    model, data = sir()
    state = torch.random.get_rng_state()
    first, again = (find_start(model, data.grid(), seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
