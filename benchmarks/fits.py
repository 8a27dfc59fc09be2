"""What the studies measure of one fit: plain values in, plain values out; the workers import it."""

import json
import math
import time
from dataclasses import asdict
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pool import FAILURES, Result, Spec, describe
from torch import Tensor
from torch.distributions import Normal

import lib
from lib.agreement import compare_fits
from lib.weights import ess_fraction

NUM_DRAWS = 20_000  # fresh ones, for ELBO, ESS and moments
K_HAT_DRAWS = 10_000  # for the trust report, as FitResult.diagnostics() has it
RANGE = (0.001, 0.999)  # quantiles of q's draws beyond which q counts as having nothing
DT = 0.1


class Problem(NamedTuple):
    """A model with its data and what is known of its posterior.

    Attributes:
        model: The model.
        observations: The data.
        log_evidence: log p(y), of the same Euler grid as the fit.
        sd: Reference standard deviation of each marginal, by name.
        exact: Posterior by quadrature, where there is one.
    """

    model: lib.StateSpaceModel
    observations: lib.Observations
    log_evidence: float
    sd: dict[str, float]
    exact: lib.QuadraturePosterior | None = None


def pack(config: lib.FitConfig) -> Spec:
    """The options of a fit as JSON has them."""
    return asdict(config)


def unpack(options: Spec) -> lib.FitConfig:
    """Inverse of ``pack``."""
    return lib.FitConfig(**options | {"family": lib.Family(**options["family"])})


@cache
def problem(name: str, data_seed: int = 0) -> Problem:
    """``"ou"`` (data/ou_a.csv, or simulated from a seed that is not 0) or ``"sir"``."""
    if name == "sir":
        return _sir()
    observations = (
        simulate_ou(data_seed) if data_seed else lib.read_csv(lib.data_path("ou_a.csv"), dt=DT)
    )
    return _ou(observations)


def simulate_ou(seed: int) -> lib.Observations:
    """200 observations as notebook 01 simulates them: exact solution, θ = (0.2, 5, 1), σ = 1."""
    truth = torch.tensor([0.2, 5.0, 1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 200, generator=generator, dtype=torch.float64)
    path = lib.simulate_linear_gaussian(lib.ou_transition(truth, DT), 20.0, noise[0])
    return lib.Observations(DT * np.arange(1, 201), path[1:] + noise[1], dt=DT)


def _ou(observations: lib.Observations) -> Problem:
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 10.0),
        x0=torch.tensor([20.0]),
    )
    exact = lib.ou_posterior(observations.y[:, 0], DT, exact=False)
    names = ("log_theta1", "theta2", "log_theta3")
    sd = dict(zip(names, exact.sd.tolist(), strict=True))
    return Problem(model, observations, exact.log_evidence, sd, exact)


def _sir() -> Problem:
    """The boarding school with the settings of notebook 02, and its long-run references."""
    observations = lib.read_csv(
        lib.data_path("boarding_school_1978.csv"), dt=DT, time="day", observed=["in_bed"]
    )
    model = lib.StateSpaceModel(
        lib.SIR(population=763),
        lib.GaussianObservation([[0.0], [1.0]], "sigma"),
        Normal(torch.zeros(3), 3.0),
        x0=[762.0, 1.0],
    )
    known = json.loads(lib.data_path("reference/sir_outbreaks.json").read_text())
    draws = pd.read_csv(lib.data_path("reference/sir_outbreaks_draws.csv"))
    return Problem(model, observations, known["log_evidence"]["value"], draws.std().to_dict())


def measure_fit(spec: Spec) -> Result:
    """One fit of the ablation; the spec names ``model``, ``seed`` and ``config``."""
    given = problem(spec["model"])
    start = time.process_time()  # not the clock's: a busy machine does not lengthen it
    fit = _fit(given, spec["config"], spec["seed"])
    return assess(given, fit) | {"cpu_seconds": time.process_time() - start}


def measure_set(spec: Spec) -> Result:
    """One data set of the robustness study: its posterior, a fit from each of ``starts``."""
    given = problem("ou", spec["data_seed"])
    below = {
        "log_theta1": float(given.exact.probability_below("log_theta1", -4.0)),
        "log_theta3": float(given.exact.probability_below("log_theta3", -2.0)),
    }
    fits, reports = [], []
    for seed in spec["starts"]:
        try:
            fits.append(_fit(given, spec["config"], seed))
            reports.append(assess(given, fits[-1]))
        except FAILURES as error:
            reports.append({"error": describe(error)})
    agreement = {"flagged": True, "verdict": "A fit has no numbers to compare."}
    if not any("error" in report for report in reports):
        found = compare_fits(fits, K_HAT_DRAWS)
        agreement = {"flagged": found.flagged, "verdict": found.verdict}
    return {"below": below, "fits": reports, "agreement": agreement}


def _fit(given: Problem, options: Spec, seed: int) -> lib.FitResult:
    config = unpack(options)
    return lib.fit(given.model, given.observations, config, seed, device="cpu", progress=False)


def assess(given: Problem, fit: lib.FitResult) -> Result:
    """How far the fit is from the reference, and what its own report says."""
    about = {
        "seconds": float(fit.history.seconds[-1]),
        "converged": fit.converged,
        "reason": fit.reason,
    }
    try:
        return about | _numbers(given, fit)
    except FAILURES as error:
        return about | {"error": f"{fit.reason}; then {describe(error)}"}


def _numbers(given: Problem, fit: lib.FitResult) -> Result:
    draws, report = fit.draws(NUM_DRAWS, seed=1), fit.diagnostics(K_HAT_DRAWS)
    elbo = float(draws.log_weight.mean())
    if not math.isfinite(elbo):
        raise ArithmeticError("the ELBO of fresh draws is not finite")
    values = dict(zip(given.sd, _marginals(given, draws), strict=True))
    uncovered = {}
    if given.exact is not None:
        names = ("log_theta1", "log_theta3")
        uncovered = {name: outside(given.exact, name, values[name]) for name in names}
    return {
        "kl": given.log_evidence - elbo,
        "ess": ess_fraction(draws.log_weight),
        "k_hat": report.k_hat,
        "flagged": report.flagged,
        "verdict": report.verdict,
        "unseen": report.unseen,
        "sd_ratio": {name: float(values[name].std()) / sd for name, sd in given.sd.items()},
        "uncovered": uncovered,
    }


def _marginals(given: Problem, draws: lib.Draws) -> list[Tensor]:
    """Draws of each quantity of ``given.sd``: the ϑ, and R0 after them for the epidemic."""
    columns = list(draws.vartheta.T)
    if isinstance(given.model.sde, lib.SIR):
        columns.append(given.model.sde.r0(draws.theta))
    return columns


def outside(exact: lib.QuadraturePosterior, name: str, values: Tensor) -> float:
    """Exact marginal mass outside the [0.1 %, 99.9 %] range of q's draws; 0.002 if q is exact."""
    low, high = np.quantile(values.numpy(), RANGE)
    return float(exact.probability_below(name, low) + 1 - exact.probability_below(name, high))
