"""The problems of the comparison: data, model, where to start, the quantiles that are right."""

import json
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributions import Normal

import lib
from lib.start import find_start

DT = 0.1
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
NAMES = {
    "ou": ("log_theta1", "theta2", "log_theta3"),
    "sir": ("log_theta1", "log_theta2", "log_sigma"),
}
PRIOR_SD = {"ou": 10.0, "sir": 3.0}
OU_TRUTH = (0.2, 5.0, 1.0)
GROWTH_SEED = 100  # of the longer OU series, as notebook 01 simulates them


class Problem(NamedTuple):
    """Model and data."""

    model: lib.StateSpaceModel
    observations: lib.Observations


def problem(name: str, num_obs: int | None = None) -> Problem:
    """``"ou"`` (data/ou_a.csv, or a simulated series of that many) or ``"sir"``."""
    prior = Normal(torch.zeros(3), PRIOR_SD[name])
    if name == "sir":
        path = lib.data_path("boarding_school_1978.csv")
        observations = lib.read_csv(path, dt=DT, time="day", observed=["in_bed"])
        seen = lib.GaussianObservation([[0.0], [1.0]], "sigma")
        model = lib.StateSpaceModel(lib.SIR(population=763), seen, prior, x0=[762.0, 1.0])
        return Problem(model, observations)
    seen = lib.GaussianObservation([[1.0]], 1.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), seen, prior, x0=[20.0])
    if num_obs is None:
        return Problem(model, lib.read_csv(lib.data_path("ou_a.csv"), dt=DT))
    return Problem(model, simulate_ou(num_obs))


def simulate_ou(num_obs: int) -> lib.Observations:
    """The exact solution at t = 0.1, 0.2, …, with noise of sd 1."""
    generator = torch.Generator().manual_seed(GROWTH_SEED)
    noise = torch.randn(2, num_obs, generator=generator, dtype=torch.float64)
    transition = lib.ou_transition(torch.tensor(OU_TRUTH, dtype=torch.float64), DT)
    path = lib.simulate_linear_gaussian(transition, 20.0, noise[0])
    return lib.Observations(DT * np.arange(1, num_obs + 1), path[1:] + noise[1], dt=DT)


@cache
def reference(name: str, num_obs: int | None = None) -> np.ndarray:
    """Quantiles of each ϑ at LEVELS, (levels, d): by quadrature, or from the long particle run."""
    if name == "sir":
        known = json.loads(lib.data_path("reference/sir_outbreaks.json").read_text())
        return np.array([[known[s]["q"][str(level)] for s in NAMES[name]] for level in LEVELS])
    y = problem(name, num_obs).observations.y[:, 0]
    exact, levels = lib.ou_posterior(y, DT, exact=False), torch.tensor(LEVELS, dtype=y.dtype)
    return torch.stack([exact.quantile(s, levels) for s in NAMES[name]], 1).numpy()


def write_for_peers(path: Path, name: str, num_obs: int | None, seed: int) -> float:
    """Data, and the start of our own fit, for a process without torch; the seconds of that start.

    Arrays are those of ``densities.Data``; ``path`` is x_1, …, x_N.
    """
    model, observations = problem(name, num_obs)
    grid, clock = observations.grid(), time.process_time()
    start = find_start(model, grid, seed)
    seconds = time.process_time() - clock
    np.savez(
        path,
        y=grid.y[1:, 0],
        observed=grid.observed[1:, 0],
        x0=model.x0_value.double(),
        dt=grid.dt,
        prior_sd=PRIOR_SD[name],
        vartheta=start.vartheta,
        vartheta_sd=start.vartheta_sd,
        path=start.path[1:],
        path_sd=start.path_sd[1:],
    )
    return seconds
