"""Makes data/reference/contact_outbreaks.json: the posterior p(ϑ, x | y) of a drifting contact
rate, against which notebook 04's fit is held. Of lib it uses the reader of data only."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from contact_posterior import NAMES, Epidemic, Weighted, reference
from guided_filter import Array, Plan, particle_filter

import lib

STATES = ("S", "I", "log_contact")
LEVELS = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
BATCHES = 20
BELOW = (("log_sigma", 1.0), ("log_sigma", -3.0), ("log_volatility", -5.0))
MODEL = (
    "notebook 04's epidemic with a drifting contact rate, Euler-Maruyama, dt=0.05 day, x0=(762,1,"
    "N(0,1)) at day 0, I observed days 1..14 with N(0,sigma^2); paths restricted to S>0, I>0"
)
METHOD = (
    "importance sampling over vartheta, likelihood by a guided particle filter; density of y and "
    "of the path staying positive"
)


def quantiles(x: Array, weight: Array, levels: Sequence[float]) -> Array:
    """Weighted quantiles, interpolated between draws at the middle of their weights."""
    order = np.argsort(x)
    middle = np.cumsum(weight[order]) - weight[order] / 2
    return np.interp(np.multiply(levels, weight.sum()), middle, x[order])


def marginal(x: Array, draws: Weighted) -> dict[str, object]:
    """Mean, sd, quantiles, and the standard errors of these from batches of the draws."""
    weight = draws.weight()
    mean = weight @ x
    batches = [quantiles(x[i::BATCHES], weight[i::BATCHES], LEVELS) for i in range(BATCHES)]
    error = np.std(batches, axis=0, ddof=1) / np.sqrt(BATCHES)
    return {
        "mean": float(mean),
        "sd": float(np.sqrt(weight @ (x - mean) ** 2)),
        "q": by_level(quantiles(x, weight, LEVELS), LEVELS),
        "q_error": by_level(error, LEVELS),
    }


def by_level(values: Array, levels: Sequence[float]) -> dict[str, float]:
    """A JSON object of quantiles."""
    return {str(level): float(value) for level, value in zip(levels, values, strict=True)}


def daily(draws: Weighted) -> list[dict[str, object]]:
    """Quantiles of each state at days 0..14."""
    levels, weight = (0.025, 0.5, 0.975), draws.weight()
    return [
        {"day": day}
        | {
            s: by_level(quantiles(x, weight, levels), levels)
            for s, x in zip(STATES, states, strict=True)
        }
        for day, states in enumerate(draws.path.transpose(1, 2, 0))
    ]


def noise(draws: Weighted, plan: Plan, particles: int, seed: int) -> Array:
    """Sd of the estimated log-likelihood, at 100 ϑ of the posterior, from 20 repeats each."""
    rng = np.random.default_rng(seed)
    chosen = draws.vartheta[rng.choice(len(draws.vartheta), 100, p=draws.weight())]
    repeats = [particle_filter(Epidemic(chosen), plan, particles, rng) for _ in range(20)]
    return np.std([repeat.log_likelihood for repeat in repeats], axis=0, ddof=1)


def summary(draws: Weighted, plan: Plan, particles: int, seed: int) -> dict[str, object]:
    """Everything that one run says of the posterior."""
    weight, scatter = draws.weight(), noise(draws, plan, particles, seed)
    value, error = draws.log_evidence
    covariance = np.cov(draws.vartheta.T, aweights=weight)
    sd = np.sqrt(np.diag(covariance))
    columns = dict(zip(NAMES, draws.vartheta.T, strict=True))
    return {
        "sampler": {
            "draws": len(weight),
            "particles": particles,
            "seed": seed,
            "ess": draws.ess,
            "largest_weight": float(weight.max()),
            "log_likelihood_sd": by_level(np.quantile(scatter, (0.5, 0.95)), (0.5, 0.95)),
        },
        "log_evidence": {"value": value, "error": error},
        **{name: marginal(x, draws) for name, x in columns.items()},
        "corr": (covariance / np.outer(sd, sd)).tolist(),
        "probability": {
            f"{name}_below_{bound:g}": float(weight @ (columns[name] < bound))
            for name, bound in BELOW
        },
    }


def apart(one: dict[str, dict], other: dict[str, dict]) -> dict[str, float]:
    """The largest difference of a quantile between two runs, in sds, by parameter."""
    return {
        name: max(abs(one[name]["q"][k] - other[name]["q"][k]) for k in one[name]["q"])
        / one[name]["sd"]
        for name in NAMES
    }


def rounded(value: object) -> object:
    """Numbers to 6 digits, at any depth."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the reference, makes it again in another way, and writes or prints both."""
    parser = argparse.ArgumentParser("benchmarks/contact_reference.py", description=__doc__)
    parser.add_argument("--draws", type=int, default=80_000, help="of the reference")
    parser.add_argument("--save-to", type=Path, help="folder; else the JSON is printed")
    args = parser.parse_args(argv)
    observations = lib.read_csv(
        lib.data_path("boarding_school_1978.csv"), dt=1.0, time="day", observed=["in_bed"]
    )
    plan, found = Plan(observations.y[:, 0].numpy(), steps=20, dt=0.05), []
    # The check has other draws, a fifth as many, and four times the particles for each.
    for seed, n, particles in ((0, args.draws, 100), (1, args.draws // 5, 400)):
        start = time.monotonic()
        draws = reference(plan, n, particles, seed)
        found.append(summary(draws, plan, particles, seed) | {"daily": daily(draws)})
        print(f"seed {seed}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    check = found[1] | {"quantiles_apart_sds": apart(*found)}
    text = json.dumps(
        rounded({"model": MODEL, "method": METHOD} | found[0] | {"check": check}), indent=1
    )
    if args.save_to is None:
        print(text)
    else:
        (args.save_to / "contact_outbreaks.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
