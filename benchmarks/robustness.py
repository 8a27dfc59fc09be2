"""Robustness: 20 simulated OU sets; is a fit near, and does its report say so when it is not?"""

from collections.abc import Sequence

import pandas as pd
import pool
from fits import measure_set, pack

import lib
from lib import plots

DATA_SEEDS = range(100, 120)  # of notebook 01's simulator
STARTS = (0, 1)  # seeds of the fits; the first is the one that is judged
RARE = 0.01  # a tail with less mass than this makes no set irregular
FAR, NARROW = 0.5, 0.05  # nats of KL, exact mass that q lacks: beyond, a fit should be flagged
BARS = (0.1, FAR)  # nats, drawn in the figure
DIGITS = {"kl": 3, "kl_other": 3, "ess": 3, "k_hat": 2, "seconds": 0, "unseen": 4}
DIGITS |= {"uncovered": 4, "uncovered_other": 4}
COUNTED = ("regular", "should_flag", "flagged", "flagged_alone", "missed", "false_alarm")


def specs(names: Sequence[str], steps: int | None) -> dict[str, pool.Spec]:
    """What to fit for each data set, by label."""
    trial = {"num_steps": steps} if steps else {}
    config = pack(lib.FitConfig(**trial))
    return {
        f"data set {name}": {"data_seed": int(name), "starts": list(STARTS), "config": config}
        for name in names
    }


def kind(below: dict[str, float]) -> str:
    """``regular``; ``tailed`` to log θ1 = −∞, Brownian; ``plateau`` to log θ3 = −∞, a smooth path.

    There the likelihood no longer depends on θ3, so the posterior falls as slowly as the prior.
    """
    if below["log_theta3"] >= RARE:
        return "plateau"
    return "tailed" if below["log_theta1"] >= RARE else "regular"


def row(seed: str, result: pool.Result) -> dict[str, object]:
    """One data set. ``uncovered`` is the larger of log θ1's and log θ3's.

    It is the exact mass of a marginal outside the [0.1 %, 99.9 %] range of 20,000 draws of q.
    """
    first, other = result["fits"][0], result["fits"][1]
    kl, uncovered = _kl(first), _uncovered(first)
    should, alone = kl > FAR or uncovered > NARROW, first.get("flagged", True)
    flagged = alone or result["agreement"]["flagged"]
    return {
        "seed": seed,
        "kind": kind(result["below"]),
        "regular": all(mass < RARE for mass in result["below"].values()),
        "kl": kl,
        "kl_other": _kl(other),
        "ess": first.get("ess", 0.0),
        "k_hat": first.get("k_hat", float("inf")),
        "seconds": first.get("seconds", float("nan")),
        "uncovered": uncovered,
        "uncovered_other": _uncovered(other),
        "unseen": first.get("unseen", float("nan")),
        "should_flag": should,
        "flagged": flagged,
        "flagged_alone": alone,
        "missed": should and not flagged,
        "false_alarm": flagged and not should,
        "verdict": first.get("error") or first["verdict"],
        "agreement": result["agreement"]["verdict"],
    }


def _kl(fit: pool.Result) -> float:
    return fit.get("kl", float("inf"))


def _uncovered(fit: pool.Result) -> float:
    return max(fit["uncovered"].values()) if "uncovered" in fit else 1.0


def summary(frame: pd.DataFrame) -> dict[str, object]:
    """The last row: medians of numbers, counts of yes."""
    last = frame[list(DIGITS)].median().to_dict()
    last |= {name: f"{int(frame[name].sum())} of {len(frame)}" for name in COUNTED}
    return {"seed": "all", "kind": "median or count", "verdict": "", "agreement": ""} | last


def table(found: dict[str, pool.Result]) -> pd.DataFrame:
    """A row for each data set; a failed fit has one, a set without an exact posterior cannot."""
    for label, result in found.items():
        if "error" in result:
            raise SystemExit(f"{label} has no exact posterior: {result['error']}")
    rows = [row(label.split()[-1], result) for label, result in found.items()]
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Fits what is missing, then writes the table and its figure, or prints the table."""
    args = pool.parse("robustness", __doc__, argv)
    names = pool.matching([str(seed) for seed in DATA_SEEDS], args.only)
    found = pool.results(specs(names, args.steps), measure_set, args)
    frame = table(found)
    whole = pd.concat([frame.astype(object), pd.DataFrame([summary(frame)])])
    whole = whole.infer_objects().round(DIGITS)
    if args.save_to is None:
        print(whole.drop(columns=["verdict", "agreement"]).to_string(index=False))
        return 0
    pool.save(whole, found, args)
    plots.set_style()
    by_kind = frame.sort_values(
        "kind", kind="stable", key=lambda kinds: kinds.map(list(plots.KINDS).index)
    )
    figure = plots.robustness(by_kind.to_dict("list"), bars=BARS)
    figure.savefig(args.save_to / "figures/robustness.png")
    return 0


if __name__ == "__main__":
    pool.guarded(main)
