"""Ours, and what needs no path: filter + MH for OU, particle MH for the epidemic."""

from collections.abc import Callable

import growth_problems
import numpy as np
import timed_run
import torch
from guided_filter import Plan, particle_filter
from outbreak import Outbreak
from problems import DT, Problem, problem
from torch import Tensor

import lib
from lib.start import find_start

SPREAD = 0.3  # of the chains' starts, in the spreads that our own fit starts with
CHUNK = 1000  # draws of ours at a time: their paths are not kept
SEEDS_APART = 1000  # of the draws of one run and of the next


def ours(job: timed_run.Job) -> timed_run.Run:
    """A fit of so many steps, then draws with their weights."""
    return _fit(job, problem(job["problem"], job["num_obs"]))


def growing(job: timed_run.Job) -> timed_run.Run:
    """The same on a problem that grows."""
    return _fit(job, growth_problems.problem(job["problem"], job["size"]))


def _fit(job: timed_run.Job, given: Problem) -> timed_run.Run:
    family = lib.Family(num_flows=job["num_flows"], guided=job["guided"])
    config = lib.FitConfig(family=family, num_steps=job["steps"])
    setup = timed_run.seconds()
    fit = lib.fit(*given, config, job["seed"], device="cpu", progress=False)
    base, chunk = timed_run.seconds(), min(CHUNK, job["draws"])
    parts, times = [], []
    for k in range(job["draws"] // chunk):
        parts.append(fit.draws(chunk, seed=SEEDS_APART * (job["seed"] + 1) + k))
        times.append(timed_run.seconds())
    theta, log_weight = (
        torch.cat([getattr(part, name) for part in parts]).numpy()
        for name in ("vartheta", "log_weight")
    )
    looks = timed_run.checkpoints(len(parts), first=1)
    times = np.array(times)[looks - 1]
    return timed_run.Run(theta[None], log_weight, setup, base, chunk * looks, times)


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
    methods = {"ours": ours, "growing": growing, "filter MH": filter_mh, "particle MH": particle_mh}
    timed_run.main(methods)
