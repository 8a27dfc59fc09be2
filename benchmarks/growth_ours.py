"""Ours on the problems that grow: a fit, then draws with their weights."""

import growth_problems
import numpy as np
import timed_run
import torch

import lib

CHUNK = 1000  # draws at a time: their paths are not kept
SEEDS_APART = 1000  # of the draws of one run and of the next


def ours(job: timed_run.Job) -> timed_run.Run:
    """A fit of so many steps, then draws with their weights."""
    given = growth_problems.problem(job["problem"], job["size"])
    family = lib.Family(num_flows=job["num_flows"])
    config = lib.FitConfig(family=family, num_steps=job["steps"], refits=job["refits"])
    setup = timed_run.seconds()
    fit = lib.fit(*given, config, job["seed"], device="cpu", progress=False)
    base = timed_run.seconds()
    first = SEEDS_APART * (job["seed"] + 1)
    parts = [fit.draws(CHUNK, seed=first + k) for k in range(job["draws"] // CHUNK)]
    theta, log_weight = (
        torch.cat([getattr(part, name) for part in parts]).numpy()
        for name in ("vartheta", "log_weight")
    )
    ends, times = np.array([len(theta)]), np.array([timed_run.seconds()])
    return timed_run.Run(theta[None], log_weight, setup, base, ends, times)


if __name__ == "__main__":
    timed_run.main({"ours": ours})
