"""Ablation: one option of a fit changed at a time, and the paper's own settings (section 4)."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import pool
from fits import measure_fit, pack

import lib

MODELS = ("ou", "sir")
SEEDS = (0, 1, 2)
PAPER = {"num_steps": 4000, "num_samples": 50}
BEST = "paper, best of grid"
DIGITS = {"kl_median": 3, "kl_min": 3, "kl_max": 3, "ess_median": 3, "k_hat_median": 2}
DIGITS |= {"cpu_seconds_median": 0, "sd_ratio_min": 2}


class Variant(NamedTuple):
    """A row for each of its models: what differs from a preset.

    Attributes:
        name: Of the row; the paper's grid starts with ``paper``.
        config: Changes of ``FitConfig``.
        family: Changes of ``Family``.
        models: For which it is run.
        preset: ``"study"`` or ``"paper"``.
        note: What a reader must know of it.
    """

    name: str
    config: dict[str, object] = {}
    family: dict[str, object] = {}
    models: Sequence[str] = MODELS
    preset: str = "study"
    note: str = ""

    def option(self) -> str:
        """The changes in words."""
        changes = self.config | self.family
        return ", ".join(f"{k} = {v}" for k, v in changes.items()) or f"{self.preset} preset"

    def fit_config(self, steps: int | None) -> lib.FitConfig:
        """The preset with the changes; ``steps`` replaces the steps of a trial of this script."""
        base = lib.FitConfig() if self.preset == "study" else lib.FitConfig.paper(**PAPER)
        family = dataclasses.replace(base.family, **self.family)
        trial = {"num_steps": steps} if steps else {}
        return dataclasses.replace(base, **self.config | trial, family=family)


def paper_grid() -> list[Variant]:
    """OU: α × learning rate; SIR: unit × α. The paper gives none of them."""
    grid = []
    for alpha in (1.0, 2.0, 10.0):
        for rate in (1e-3, 5e-3):
            changes = {"tempering": alpha, "learning_rate": rate}
            name = f"paper alpha {alpha:g} lr {rate:g}"
            grid.append(Variant(name, changes, {}, ("ou",), "paper"))
    for unit in (1.0, 100.0):
        for alpha in (1.0, 10.0):
            name = f"paper unit {unit:g} alpha {alpha:g}"
            grid.append(Variant(name, {"tempering": alpha}, {"unit": unit}, ("sir",), "paper"))
    return grid


TOGETHER = "coupling needs the unbounded gate, so both are changed; OU has no coupling"
# The most telling first, for when the time is short.
VARIANTS = [
    Variant("study"),
    Variant("no refits", {"refits": 0}),
    Variant("no wide draws", {"wide_samples": 0}),
    Variant("gradient total", {"gradient": "total"}),
    Variant("optimizer adam", {"optimizer": "adam"}),
    *(Variant(f"k {k}", {}, {"receptive_field": k}) for k in (5, 20)),
    Variant("m 2", {}, {"num_flows": 2}),
    Variant("no base", {}, {"base": False}),
    Variant("no base, unit 100", {}, {"base": False, "unit": 100.0}, ("sir",)),
    Variant("no taps", {}, {"taps": False}),
    Variant("no coupling", {}, {"coupling": False}, ("sir",)),
    Variant("theta raw", {}, {"standardise_theta": False}),
    Variant("features past", {}, {"features": "past"}),
    Variant("gate sigmoid", {}, {"gate": "sigmoid", "coupling": False}, note=TOGETHER),
    *paper_grid(),
]


def specs(variants: Sequence[Variant], steps: int | None) -> dict[str, pool.Spec]:
    """What to fit, by label, in the order of the variants."""
    return {
        f"{model}, {variant.name}, seed {seed}": {
            "model": model,
            "seed": seed,
            "config": pack(variant.fit_config(steps)),
        }
        for variant in variants
        for model in variant.models
        for seed in SEEDS
    }


def row(variant: Variant, model: str, fits: Sequence[pool.Result]) -> dict[str, object]:
    """One line of the table; a fit without numbers counts as infinitely far."""
    kl = [fit.get("kl", float("inf")) for fit in fits]
    whole = [fit for fit in fits if "error" not in fit]
    notes = [variant.note] + [_fault(s, f) for s, f in zip(SEEDS, fits, strict=True)]
    ratio, parameter = smallest_ratio(whole)
    return {
        "model": model,
        "variant": variant.name,
        "option": variant.option(),
        "seeds": len(fits),
        "kl_median": statistics.median(kl),
        "kl_min": min(kl),
        "kl_max": max(kl),
        "ess_median": statistics.median(fit.get("ess", 0.0) for fit in fits),
        "k_hat_median": statistics.median(fit.get("k_hat", float("inf")) for fit in fits),
        "cpu_seconds_median": statistics.median(
            fit.get("cpu_seconds", float("nan")) for fit in fits
        ),
        "flagged": f"{sum(fit.get('flagged', True) for fit in fits)} of {len(fits)}",
        "converged": f"{sum(fit.get('converged', False) for fit in fits)} of {len(fits)}",
        "sd_ratio_min": ratio,
        "sd_ratio_param": parameter,
        "note": "; ".join(filter(None, notes)),
    }


def _fault(seed: int, fit: pool.Result) -> str:
    """Why a fit has no numbers, or stopped before its end."""
    reason = fit.get("error") or fit["reason"]
    return f"seed {seed}: {reason}" if "error" in fit or reason.startswith("stopped") else ""


def smallest_ratio(fits: Sequence[pool.Result]) -> tuple[float, str]:
    """Smallest over the marginals of sd(q) over sd(reference), the median over seeds; whose."""
    if not fits:
        return float("nan"), ""
    names = fits[0]["sd_ratio"]
    ratios = {name: statistics.median(fit["sd_ratio"][name] for fit in fits) for name in names}
    name = min(ratios, key=ratios.get)
    return ratios[name], name


def table(variants: Sequence[Variant], found: dict[str, pool.Result]) -> pd.DataFrame:
    """The rows whose fits are all there: by model, then in the order of the variants."""
    rows = []
    for model in MODELS:
        mine, grid = [], []
        for variant in (v for v in variants if model in v.models):
            labels = [f"{model}, {variant.name}, seed {seed}" for seed in SEEDS]
            if all(label in found for label in labels):
                line = row(variant, model, [found[label] for label in labels])
                (grid if variant.preset == "paper" else mine).append(line)
        rows += mine + grid
        if len(grid) > 1 and len(grid) == sum(model in v.models for v in paper_grid()):
            best = min(grid, key=lambda line: line["kl_median"])
            rows.append(best | {"variant": BEST, "note": f"is: {best['variant']}"})
    return pd.DataFrame(rows).round(DIGITS)


def markdown(frame: pd.DataFrame) -> str:
    """A table to read."""
    lines = [list(map(str, line)) for line in [list(frame), *frame.itertuples(index=False)]]
    lines.insert(1, ["---"] * len(frame.columns))
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fits what is missing, then writes results/ablation.csv or prints the table."""
    args = pool.parse("ablation", __doc__, argv)
    names = pool.matching([variant.name for variant in VARIANTS], args.only)
    variants = [variant for variant in VARIANTS if variant.name in names]
    found = pool.results(specs(variants, args.steps), measure_fit, args)
    frame = table(variants, found)
    if args.save_to is None:
        print(markdown(frame))
    else:
        pool.save(frame, found, args)
    return 0


if __name__ == "__main__":
    pool.guarded(main)
