"""Posterior quantiles of the growing problems: OU by quadrature, the epidemic by particles.

Importance sampling over ϑ with w = p(ϑ) p̂(y|ϑ) / q(ϑ), p̂ by a guided particle filter.
"""

import json

import growth_problems
import numpy as np
import pool
import torch
import yardstick
from contact_posterior import CELLS, Kernels
from guided_filter import Array, Plan, particle_filter
from outbreak import Outbreak
from problems import DT, LEVELS, NAMES, PRIOR_SD
from scipy.special import logsumexp
from scipy.stats import norm

import lib

WIDTH = 0.5  # of a kernel, in posterior sds
PRIOR_SHARE = 0.1  # of the proposal: the left tail of log σ is the prior's, that of log σ alone
BATCHES = 10


def measure(spec: pool.Spec) -> pool.Result:
    """Quantiles (levels, d), how they were found, and their Monte Carlo error in sds."""
    if spec["problem"] == "ou":
        return exact(spec["size"])
    return kept() if spec["size"] == DT else particles(spec)


def exact(num_obs: int) -> pool.Result:
    """Of OU's Euler posterior."""
    y = growth_problems.problem("ou", num_obs).observations.y[:, 0]
    posterior, levels = lib.ou_posterior(y, DT, exact=False), torch.tensor(LEVELS, dtype=y.dtype)
    found = torch.stack([posterior.quantile(name, levels) for name in NAMES["ou"]], 1)
    return {"quantiles": found.tolist(), "by": "quadrature", "uncertainty": 0.0}


def kept() -> pool.Result:
    """Of the study's epidemic; the kept draws' effective size was 50,476."""
    known = json.loads(lib.data_path("reference/sir_outbreaks.json").read_text())
    found = [[known[s]["q"][str(level)] for s in NAMES["sir"]] for level in LEVELS]
    return {"quantiles": found, "by": "particles, kept", "uncertainty": 0.01}


def particles(spec: pool.Spec) -> pool.Result:
    """Of the epidemic on another grid; the proposal is wider than the posterior on the kept one."""
    rng, n = np.random.default_rng(spec["seed"]), spec["draws"]
    y = growth_problems.problem("sir", spec["size"]).observations.y[:, 0].numpy()
    plan = Plan(y, steps=round(1 / spec["size"]), dt=spec["size"])
    kernels, rates = _kernels()
    vartheta, sd = kernels.sample(n, rng), PRIOR_SD["sir"]
    chosen = rng.random(n) < PRIOR_SHARE
    vartheta[chosen, 2] = sd * rng.standard_normal(chosen.sum())
    log_prior = norm.logpdf(vartheta, 0, sd)
    each = [rates.log_prob(vartheta[:, :2]) + log_prior[:, 2], kernels.log_prob(vartheta)]
    log_weight = log_prior.sum(-1) - logsumexp(each, axis=0, b=[[PRIOR_SHARE], [1 - PRIOR_SHARE]])
    parts = np.array_split(vartheta, -(-n * spec["particles"] // CELLS))
    filtered = [particle_filter(Outbreak(part), plan, spec["particles"], rng) for part in parts]
    log_weight += np.concatenate([f.log_likelihood for f in filtered])
    return _judged(vartheta, np.exp(log_weight - logsumexp(log_weight)))


def _kernels() -> tuple[Kernels, Kernels]:
    """About the kept draws; the same without log σ."""
    path = lib.data_path("reference/sir_outbreaks_draws.csv")
    centres = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1, 2))[::4]
    tril = WIDTH * np.linalg.cholesky(np.cov(centres.T))
    return Kernels(centres, tril), Kernels(centres[:, :2], tril[:2, :2])


def _judged(vartheta: Array, weight: Array) -> pool.Result:
    """The error is that of the worst quantile: its sd over batches of the draws, over √batches."""
    found = yardstick.quantiles(vartheta, weight)
    batches = [
        yardstick.quantiles(vartheta[i::BATCHES], weight[i::BATCHES] / weight[i::BATCHES].sum())
        for i in range(BATCHES)
    ]
    spread = np.std(batches, axis=0, ddof=1) / np.sqrt(BATCHES)
    error, _ = yardstick.worst_error(found + spread, found, NAMES["sir"])
    ess = float(1 / (weight**2).sum())
    return {"quantiles": found.tolist(), "by": "particles", "uncertainty": error, "ess": ess}
