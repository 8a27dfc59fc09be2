"""Growth: seconds and memory to equal quality on longer series and finer grids, ours and NUTS."""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import growth_problems
import growth_reference
import growth_report
import numpy as np
import pandas as pd
import pool
import side_run
import yardstick
from problems import LEVELS, NAMES

from lib import plots

DAYS = 14  # of the epidemic: its grid has so many over dt steps
OURS, NUTS, REFERENCE = "contenders", "peers", "growth_reference"  # scripts
# What a reference needs of lib.
LIB = ("lib/quadrature.py", "lib/kalman.py", "lib/panels.py", "lib/weights.py")
PARTS = ("contact_posterior.py", "guided_filter.py", "outbreak.py", "problems.py", "yardstick.py")
SEEDS = 3
# Problem → size (observations; days) → seeds and draws of NUTS.
CHAINS = {
    "ou": {200: (3, 20_000), 1000: (3, 10_000), 5000: (3, 8000), 20_000: (1, 5000)},
    "sir": {0.1: (3, 20_000), 0.05: (3, 20_000), 0.02: (3, 10_000), 0.01: (2, 8000)},
}
# Draws of NUTS on the path itself. Where that is long or fine it mixes too slowly to be waited for.
CENTRED = {
    "ou": {200: 20_000, 1000: 10_000, 5000: 4000},
    "sir": {0.1: 6000, 0.05: 6000, 0.02: 3000},
}
# Draws of ours: on the coarsest grid log σ has the longest tail.
DRAWS = {
    problem: dict.fromkeys(CHAINS[problem], n) for problem, n in (("ou", 10_000), ("sir", 20_000))
}
DRAWS["sir"][0.1] = 60_000
DIGITS = {"setup_seconds": 2, "start_seconds": 2, "seconds": 2, "worst_error": 5, "ess": 0}
DIGITS |= {"unweighted_error": 5, "k_hat": 2, "memory_mb": 0, "reference_error": 3}
ABOUT = (
    f"{__doc__} Rows are named like 'ou 5000, NUTS'. Seconds are of the processor, one thread "
    "each, since the process began. Without its reference a run is not in the table yet."
)


def names() -> list[str]:
    """Of the rows."""
    places = [(problem, size) for problem, sizes in CHAINS.items() for size in sizes]
    return [_name(*place, side) for place in places for side in _jobs(*place)]


def _name(problem: str, size: float, side: str) -> str:
    return f"{problem} {size:g}, {side}"


def specs(rows: Sequence[str], trial: int | None = None) -> dict[str, pool.Spec]:
    """What to run, by label: a seed of every size before the next seed, then the references.

    Args:
        rows: Of ``names``.
        trial: Steps of each fit, draws of each chain, to try the scripts with one seed.
    """
    found, references = {}, {}
    for seed in range(1 if trial else SEEDS):
        for problem, sizes in CHAINS.items():
            for size, (seeds, _) in sizes.items():
                about = {"problem": problem, "size": size, "seed": seed}
                for side, job in _jobs(problem, size).items():
                    name = _name(problem, size, side)
                    if name not in rows or seed >= seeds:
                        continue
                    spec = about | {"side": side} | pool.shortened(job, trial)
                    found[f"{name}, seed {seed}"] = spec
                    references[f"{problem} {size:g}, reference"] = reference(problem, size)
    return found | references


def _jobs(problem: str, size: float) -> dict[str, pool.Spec]:
    """By side: ours, NUTS on the innovations, and perhaps on the path."""
    nuts = {"script": NUTS, "method": "nuts", "warmup": 500}
    nuts |= {"accept": 0.8 if problem == "ou" else 0.9}
    # Without flows: the smoother of a linear model is exact, the steps of the other are guided.
    ours = {"script": OURS, "method": "growing", "steps": 1, "num_flows": 0}
    jobs = {
        "ours": ours | {"guided": problem == "sir", "draws": DRAWS[problem][size]},
        "NUTS": nuts | {"path": "innovation", "draws": CHAINS[problem][size][1]},
    }
    if size in CENTRED[problem]:
        jobs["NUTS, centred"] = nuts | {"path": "centred", "draws": CENTRED[problem][size]}
    return jobs


def reference(problem: str, size: float) -> pool.Spec:
    """The right quantiles of a problem."""
    spec = {"problem": problem, "size": size, "script": REFERENCE, "seed": 1}
    return spec | ({} if problem == "ou" else {"draws": 40_000, "particles": 100})


def source(script: str) -> str:
    """Fingerprint of what a script's numbers depend on; of lib NUTS has the start only."""
    here, text = [side_run.HERE / "growth_problems.py"], ""
    if script != REFERENCE:
        text = side_run.source(script)
    else:
        here += [side_run.HERE / name for name in (*PARTS, f"{REFERENCE}.py")]
        here += [pool.ROOT / name for name in LIB]
    whole = hashlib.sha256(text.encode())
    for path in sorted(here):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def results(wanted: Mapping[str, pool.Spec], args: argparse.Namespace) -> dict[str, pool.Result]:
    """By label: what is there, and unless --finished the rest too; NUTS comes first."""
    found = {}
    for script in (NUTS, OURS, REFERENCE):
        part = {label: spec for label, spec in wanted.items() if spec["script"] == script}
        measure = (growth_reference if script == REFERENCE else growth_problems).measure
        if args.finished:
            found |= pool.finished(part, args.journal, source(script))
        elif part:
            if script == NUTS and not side_run.PEERS.is_file():
                raise SystemExit(side_run.MAKE_PEERS)
            found |= pool.run(part, measure, args.journal, source(script), args.workers)
    return found


def table(wanted: Mapping[str, pool.Spec], found: Mapping[str, pool.Result]) -> pd.DataFrame:
    """A row for each checkpoint of each run whose reference is there; a failed run has one."""
    lines = []
    for label, spec in wanted.items():
        truth = found.get(f"{spec['problem']} {spec['size']:g}, reference", {})
        if spec["script"] != REFERENCE and label in found and "quantiles" in truth:
            lines += _rows(spec, found[label], truth)
    if not lines:
        raise SystemExit("no run of this version is finished yet, with its reference")
    return pd.DataFrame(lines)


def _rows(spec: pool.Spec, result: pool.Result, truth: pool.Result) -> list[dict[str, object]]:
    problem, size = spec["problem"], spec["size"]
    grid = size if problem == "ou" else round(DAYS / size)
    about = {"problem": problem, "size": size, "grid_steps": grid, "side": spec["side"]}
    about |= {"seed": spec["seed"]}
    last = {"reference": truth["by"], "reference_error": truth["uncertainty"]}
    if "error" in result:
        errors = {"worst_error": np.inf, "unweighted_error": np.inf}
        return [about | {"draws": spec["draws"]} | errors | last | {"note": result["error"]}]
    rows, right = [], np.array(truth["quantiles"])
    for look in result["looks"]:
        error = partial(yardstick.worst_error, reference=right, names=NAMES[problem])
        worst, which = error(look["quantiles"])
        line = about | {"draws": look["draws"], "setup_seconds": result["setup"]}
        line |= {"start_seconds": result["start"]}
        line |= {"seconds": look["seconds"], "worst_error": worst, "worst_quantile": which}
        line["unweighted_error"] = error(look["unweighted"])[0]
        line |= {name: look[name] for name in ("ess", "k_hat")}
        rows.append(line | {"memory_mb": result["memory"]} | last | {"note": ""})
    return rows


def references(wanted: Mapping[str, pool.Spec], found: Mapping[str, pool.Result]) -> pd.DataFrame:
    """A row for each quantile of each reference that is there."""
    rows = []
    for label, spec in wanted.items():
        if spec["script"] != REFERENCE or "quantiles" not in found.get(label, {}):
            continue
        about = {name: spec[name] for name in ("problem", "size")}
        truth, last = found[label], {"uncertainty": found[label]["uncertainty"]}
        for level, values in zip(LEVELS, truth["quantiles"], strict=True):
            for name, value in zip(NAMES[spec["problem"]], values, strict=True):
                where = {"parameter": name, "level": level, "quantile": value}
                rows.append(about | where | last | {"by": truth["by"]})
    return pd.DataFrame(rows)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each size and side: when its median error is below the bar for good, and its cost.

    ``run_to_accuracy`` leaves out set-up; ``to_nuts`` is the time over that of the better NUTS.
    """
    groups = frame.groupby(["problem", "size", "side"], sort=False)
    lines = pd.DataFrame([_summarise(*key, rows) for key, rows in groups])
    chains = lines[lines.side != "ours"].groupby(["problem", "size"]).seconds_to_accuracy.min()
    rival = chains.reindex(pd.MultiIndex.from_frame(lines[["problem", "size"]]))
    lines["to_nuts"] = lines.seconds_to_accuracy / rival.to_numpy()
    return lines


def _summarise(problem: str, size: float, side: str, rows: pd.DataFrame) -> dict[str, object]:
    curve = yardstick.curve(rows, "worst_error", rows.seed.unique())
    seconds = yardstick.lasting(curve.seconds, curve.error)
    last = rows[rows.draws == rows.draws.max()]
    return {
        "problem": problem,
        "size": size,
        "grid_steps": rows.grid_steps.iloc[0],
        "side": side,
        "seeds": rows.seed.nunique(),
        "setup_seconds": rows.setup_seconds.median(),
        "seconds_to_accuracy": seconds,
        "run_to_accuracy": seconds - rows.setup_seconds.median(),
        "lowest_error": curve.error.min(),
        "last_seconds": curve.seconds.max(),
        "last_ess": last.ess.median(),
        "last_k_hat": last.k_hat.astype(float).median(),
        "memory_mb": rows.memory_mb.median(),
        "reference_error": rows.reference_error.iloc[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then writes both tables and the figure, or prints the summary."""
    args = pool.parse("growth", ABOUT, argv)
    wanted = specs(pool.matching(names(), args.only), args.steps)
    if args.fresh:
        args.journal.unlink(missing_ok=True)
    found = results(wanted, args)
    frame = table(wanted, found)
    lines = summary(frame)
    powers = growth_report.slopes(lines).round(2).to_string(index=False)
    print(*growth_report.verdict(lines), "powers of N:", powers, sep="\n")
    if args.save_to is None:
        print(lines.round(2).to_string(index=False))
        return 0
    pool.save(frame.round(DIGITS), found, args)
    lines.round(2).to_csv(args.save_to / "results/growth_summary.csv", index=False)
    truths = references(wanted, found)
    truths.round(5).to_csv(args.save_to / "results/growth_references.csv", index=False)
    claims = pd.concat([growth_report.claims(lines), growth_report.step_claims(truths)])
    claims.to_csv(args.save_to / "results/claims_growth.csv", index=False)
    plots.set_style()
    figure = plots.growth(growth_report.panels(lines), f"error ≤ {yardstick.BAR:g} sd")
    figure.savefig(args.save_to / "figures/growth.png")
    return 0


if __name__ == "__main__":
    pool.guarded(main)
