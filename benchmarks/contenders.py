"""Ours, and what needs no path: filter + MH for OU, particle MH for the epidemic."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import timed_run
import torch
from guided_filter import Plan, particle_filter
from problems import DT, Problem, problem
from torch import Tensor

import lib
from lib.start import find_start

SPREAD = 0.3  # of the chains' starts, in the spreads that our own fit starts with
JUMPS = np.array([[-1.0, 1.0], [0.0, -1.0]])  # what an infection and a removal do to (S, I)


def ours(job: timed_run.Job) -> timed_run.Run:
    """A fit of so many steps, then draws with their weights."""
    given = problem(job["problem"], job["num_obs"])
    family = lib.Family(num_flows=job["num_flows"])
    config = lib.FitConfig(family=family, num_steps=job["steps"], refits=job["refits"])
    setup = timed_run.seconds()
    fit = lib.fit(*given, config, job["seed"], device="cpu", progress=False)
    base = timed_run.seconds()
    draws = fit.draws(job["draws"], seed=job["seed"] + 1)
    ends, times = np.array([job["draws"]]), np.array([timed_run.seconds()])
    theta, log_weight = draws.vartheta.numpy()[None], draws.log_weight.numpy()
    return timed_run.Run(theta, log_weight, setup, base, ends, times)


def filter_mh(job: timed_run.Job) -> timed_run.Run:
    """Random-walk MH on the exact likelihood of the Euler grid."""
    given = problem(job["problem"], job["num_obs"])
    y = given.observations.y[:, 0]

    def log_likelihood(vartheta: Tensor) -> Tensor:
        transition = lib.ou_transition(given.model.to_theta(vartheta), DT, exact=False)
        return lib.forward_filter(y, transition, 20.0, 0.0, 1.0).log_likelihood

    return _chains(job, given, log_likelihood)


def particle_mh(job: timed_run.Job) -> timed_run.Run:
    """The same on a guided particle filter's estimate, which a chain keeps until it moves."""
    given = problem(job["problem"])
    y, rng = given.observations.y[:, 0].numpy(), np.random.default_rng(job["seed"])
    plan = Plan(y, steps=given.observations.num_steps // len(y), dt=DT)

    def log_likelihood(vartheta: Tensor) -> Tensor:
        outbreak = Outbreak(vartheta.numpy())
        filtered = particle_filter(outbreak, plan, job["particles"], rng)
        return torch.as_tensor(filtered.log_likelihood)

    return _chains(job, given, log_likelihood)


class Outbreak(NamedTuple):
    """The epidemic for the particle filter: a ``guided_filter.Process`` of (S, I)."""

    vartheta: np.ndarray  # (batch, 3): log θ1, log θ2, log σ
    jumps: np.ndarray = JUMPS
    positive: tuple[int, ...] = (0, 1)
    observed: int = 1

    @property
    def variance(self) -> np.ndarray:
        """σ²."""
        return np.exp(2 * self.vartheta[:, 2:])

    def start(self, particles: int, rng: np.random.Generator) -> np.ndarray:
        """(762, 1), which is known."""
        x0 = np.array([762.0, 1.0])
        return np.tile(x0[:, None, None], (1, len(self.vartheta), particles))

    def flows(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drift, and the rates θ1SI and θ2I."""
        theta1, theta2 = np.exp(self.vartheta[:, :2]).T[..., None]
        rates = np.stack([theta1 * x[0] * x[1], theta2 * x[1]])
        return np.tensordot(JUMPS.T, rates, 1), rates


def _chains(
    job: timed_run.Job, given: Problem, log_likelihood: Callable[[Tensor], Tensor]
) -> timed_run.Run:
    """Chains side by side, from points spread about the start of our own fit."""
    stamps, setup = [], timed_run.seconds()
    start = find_start(given.model, given.observations.grid(), job["seed"])
    generator = torch.Generator().manual_seed(job["seed"])
    noise = torch.randn(job["chains"], 3, generator=generator, dtype=torch.float64)

    def log_density(vartheta: Tensor) -> Tensor:
        value = given.model.log_prior(vartheta) + log_likelihood(vartheta)
        stamps.append(timed_run.seconds())
        return value

    result = lib.random_walk_mh(
        log_density,
        start.vartheta + SPREAD * start.vartheta_sd * noise,
        job["draws"],
        job["warmup"],
        seed=job["seed"],
    )
    # The first call is of the starting points, then there is one a step.
    ends = timed_run.checkpoints(job["draws"], first=10)
    times = np.array(stamps)[job["warmup"] + ends]
    base = stamps[job["warmup"]]
    return timed_run.Run(result.samples.numpy(), np.empty(0), setup, base, ends, times)


if __name__ == "__main__":
    timed_run.main({"ours": ours, "filter MH": filter_mh, "particle MH": particle_mh})
