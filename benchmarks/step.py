"""Step: CPU milliseconds of a training step on one thread, beside those of its products alone."""

from collections.abc import Sequence

import pandas as pd
import pool
import step_time

import lib
from lib.machine import settled

DRAWS = ((40, 20), (50, 0))  # inner, wide: the defaults, and the paper's number
PROBLEMS = ("ou", "sir")
REPEATS = 200
BAR_MS, BAR_RATIO, AIM_RATIO = 12.0, 5.0, 3.0  # of OU with 50 draws
COLUMNS = ["problem", "draws", "step_ms", "products_ms", "ratio", "update_ms", "gflop", "note"]


def specs(steps: int | None) -> dict[str, pool.Spec]:
    """What to measure, by label; ``steps`` replaces the repeats of a trial of this script."""
    return {
        f"{problem} {inner} + {wide}": {
            "problem": problem,
            "draws": [inner, wide],
            "repeats": steps or REPEATS,
        }
        for problem in PROBLEMS
        for inner, wide in DRAWS
    }


def measure(spec: pool.Spec) -> pool.Result:
    """The step, its products and the optimiser's part of it, in turns."""
    inner, wide = spec["draws"]
    config = lib.FitConfig(num_samples=inner, wide_samples=wide)
    with settled(threads=1):
        step = step_time.make_step(spec["problem"], None, config, "cpu")
        products = step_time.record(step.call).products
        optimizer = step.run.optimizer
        gradients = [gradient.clone() for gradient in optimizer.gradients]
        whole, alone, update = step_time.cpu_ms(
            [step.call, lambda: step_time.replay(products), lambda: optimizer.step(gradients)],
            spec["repeats"],
        )
    return {
        "step_ms": whole,
        "products_ms": alone,
        "update_ms": update,
        "gflop": 1e-9 * step_time.flops(products),
    }


def table(wanted: dict[str, pool.Spec], found: dict[str, pool.Result]) -> pd.DataFrame:
    """A row for each problem and number of draws."""
    rows = []
    for label, spec in wanted.items():
        if label in found:
            result, draws = found[label], "+".join(map(str, spec["draws"]))
            row = {"problem": spec["problem"], "draws": draws} | result
            row["note"] = result.get("error", "")
            row["ratio"] = row.get("step_ms", float("nan")) / row.get("products_ms", float("nan"))
            rows.append(row)
    return pd.DataFrame(rows).reindex(columns=COLUMNS).round(3)


def verdicts(frame: pd.DataFrame) -> list[str]:
    """The bars in words, where their row is there."""
    found = []
    for row in frame[(frame.problem == "ou") & (frame.draws == "50+0")].itertuples():
        met = row.step_ms <= BAR_MS and row.ratio <= BAR_RATIO
        found.append(
            f"OU, 50 draws: {row.step_ms:.1f} ms (bar {BAR_MS:g}), {row.ratio:.1f} times its "
            f"products (bar {BAR_RATIO:g}, aim {AIM_RATIO:g}): {'met' if met else 'not met'}."
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing; then writes results/step.csv, or prints the table and the bars."""
    args = pool.parse("step", __doc__, argv)
    wanted = specs(args.steps)
    wanted = {label: wanted[label] for label in pool.matching(list(wanted), args.only)}
    found = step_time.results(wanted, measure, args)
    frame = table(wanted, found)
    if args.save_to is None:
        print(frame.to_string(index=False), *verdicts(frame), sep="\n")
    else:
        pool.save(frame, found, args)
    return 0


if __name__ == "__main__":
    pool.guarded(main)
