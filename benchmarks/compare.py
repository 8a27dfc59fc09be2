"""Side by side: ours, NUTS, guides and MH on the same posteriors, error against seconds."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import pool
import side_run
import yardstick
from problems import NAMES, reference

import lib
from lib import plots

SEEDS = range(5)
DRAWS = {"ou": 10_000, "sir": 60_000}  # of ours
FLOWS = lib.Family().num_flows
WARM_UP = 500  # of NUTS
DIGITS = {"setup_seconds": 2, "seconds": 2, "worst_error": 5, "unweighted_error": 5, "k_hat": 2}
DIGITS |= {"ess": 0, "seconds_to_ess": 1, "memory_mb": 0}
ABOUT = (
    f"{__doc__} Further options: --problem {' or '.join(NAMES)}; --num-obs N, of a simulated OU "
    "series, whose table is printed. Seconds are of the processor, one thread each, since the "
    "process began."
)


class Method(NamedTuple):
    """What is run for each problem and seed.

    Attributes:
        name: Of its rows.
        side: ``"ours"``, ``"NUTS"``, ...: the best method of a side is drawn.
        script: That runs it, without .py.
        jobs: By problem, a method may lack one.
    """

    name: str
    side: str
    script: str
    jobs: dict[str, pool.Spec]


def nuts(path: str, draws: tuple[int, int]) -> Method:
    """One chain with so many draws for OU and for the epidemic."""
    jobs = {
        problem: {"method": "nuts", "path": path, "warmup": WARM_UP, "draws": n, "accept": rate}
        for problem, n, rate in zip(NAMES, draws, (0.8, 0.9), strict=True)
    }
    return Method(f"NUTS, {path}", "NUTS", "peers", jobs)


def guides(name: str, title: str, rate: float) -> list[Method]:
    """A guide of ϑ and the innovations, which did no worse than one of ϑ and the path."""
    job = {"method": "guide", "guide": name, "path": "innovation", "rate": rate, "particles": 1}
    return [
        Method(
            f"{title}, {steps} steps",
            title,
            "peers",
            dict.fromkeys(NAMES, job | {"steps": steps, "draws": 20_000}),
        )
        for steps in (2000, 16_000)
    ]


def ours(name: str, steps: int, num_flows: int, *problems: str, guided: bool = False) -> Method:
    """Our fit, with its default options but for these."""
    job = {"method": "ours", "steps": steps, "num_flows": num_flows, "guided": guided}
    jobs = {problem: job | {"draws": DRAWS[problem]} for problem in problems}
    return Method(name, "ours", "contenders", jobs)


CHAINS = {"method": "filter MH", "chains": 64, "warmup": 500, "draws": 2000}
PARTICLES = {"method": "particle MH", "chains": 16, "particles": 100, "warmup": 500, "draws": 2000}
METHODS = [
    # The smoother is all of q(x | ϑ), which is right for a linear model, and no other.
    ours("ours, no IAF on the path", 1, 0, "ou"),
    ours("ours, guided", 1, 0, "sir", guided=True),
    ours("ours, 250 steps", 250, FLOWS, *NAMES),
    ours("ours, 1000 steps", 1000, FLOWS, "sir"),
    nuts("innovation", (40_000, 20_000)),
    nuts("centred", (40_000, 6000)),
    *guides("normal", "AutoMultivariateNormal", rate=1e-2),
    *guides("low rank", "AutoLowRank", rate=1e-2),
    *guides("iaf", "AutoIAFNormal", rate=1e-3),  # at 1e-2 its weights are NaN within 20 steps
    Method("filter + MH", "MH on a filter", "contenders", {"ou": CHAINS}),
    Method("particle MH", "MH on a filter", "contenders", {"sir": PARTICLES}),
]
SIDES = {method.name: method.side for method in METHODS}


def specs(
    methods: Sequence[Method],
    problems: Sequence[str],
    num_obs: int | None = None,
    trial: int | None = None,
) -> dict[str, pool.Spec]:
    """What to run, by label, all methods of a seed before the next seed.

    Args:
        methods: Of METHODS.
        problems: Of NAMES.
        num_obs: Length of a simulated OU series; None for the study's own data.
        trial: Steps of each fit, draws of each chain, to try the scripts with one seed.
    """
    found = {}
    for seed in SEEDS[:1] if trial else SEEDS:
        for problem in problems:
            for method in (m for m in methods if problem in m.jobs):
                about = {"problem": problem, "num_obs": num_obs, "seed": seed}
                about |= {"name": method.name, "script": method.script}
                job = pool.shortened(method.jobs[problem], trial)
                found[f"{problem}, {method.name}, seed {seed}"] = about | job
    return found


def table(wanted: Mapping[str, pool.Spec], found: Mapping[str, pool.Result]) -> pd.DataFrame:
    """A row for each checkpoint of each run that is there; a failed run has one."""
    rows = [row for label in wanted if label in found for row in _rows(wanted[label], found[label])]
    return pd.DataFrame(rows)


def _rows(spec: pool.Spec, result: pool.Result) -> list[dict[str, object]]:
    about = {"problem": spec["problem"], "method": spec["name"], "seed": spec["seed"]}
    if "error" in result:
        failed = {"draws": spec["draws"], "worst_error": np.inf, "unweighted_error": np.inf}
        failed |= dict.fromkeys(("seconds", "setup_seconds", "memory_mb"), np.nan)
        return [about | failed | {"seconds_to_ess": np.inf, "note": result["error"]}]
    truth, names = reference(spec["problem"], spec["num_obs"]), NAMES[spec["problem"]]
    lines = []
    for look in result["looks"]:
        error, which = yardstick.worst_error(look["quantiles"], truth, names)
        line = about | {"draws": look["draws"]}
        line |= {"setup_seconds": result["setup"], "seconds": look["seconds"]}
        line |= {"worst_error": error, "worst_quantile": which}
        line["unweighted_error"] = yardstick.worst_error(look["unweighted"], truth, names)[0]
        line |= {name: look[name] for name in ("ess", "k_hat")}
        lines.append(line | {"memory_mb": result["memory"], "seconds_to_ess": np.nan, "note": ""})
    lines[-1]["seconds_to_ess"] = result["seconds_to_ess"]
    return lines


def summary(frame: pd.DataFrame, seeds: Sequence[int]) -> pd.DataFrame:
    """A row for each method: when its median error is below the bar for good, and its ESS 1,000.

    ``to_nuts`` is the time over that of the better NUTS; ``best`` marks the best of each side.
    """
    groups = frame.groupby(["problem", "method"], sort=False)
    lines = [_summarise(*keys, rows, seeds) for keys, rows in groups]
    lines = pd.DataFrame(lines)
    sides = lines.method.map(SIDES)
    for _, rows in lines.groupby(["problem", sides], sort=False):
        ranked = rows.sort_values(["seconds_to_accuracy", "lowest_error"])
        lines.loc[ranked.index[0], "best"] = True
    for problem in lines.problem.unique():
        here = lines.problem == problem
        rival = lines[here & (sides == "NUTS")].seconds_to_accuracy.min()
        lines.loc[here, "to_nuts"] = lines[here].seconds_to_accuracy / rival
    return lines.astype({"best": bool})


def _summarise(
    problem: str, method: str, rows: pd.DataFrame, seeds: Sequence[int]
) -> dict[str, object]:
    curve = yardstick.curve(rows, "worst_error", seeds)
    raw = yardstick.curve(rows, "unweighted_error", seeds)
    last = rows[rows.draws == rows.draws.max()]
    return {
        "problem": problem,
        "method": method,
        "seeds": rows.seed.nunique(),
        "setup_seconds": rows.setup_seconds.median(),
        "seconds_to_accuracy": yardstick.lasting(curve.seconds, curve.error),
        "seconds_to_accuracy_unweighted": yardstick.lasting(raw.seconds, raw.error),
        "lowest_error": curve.error.min(),
        "last_seconds": curve.seconds.max(),
        "seconds_to_ess": last.seconds_to_ess.median(),
        "last_error": curve.error[last.draws.max()],
        "memory_mb": rows.memory_mb.median(),
        "best": False,
    }


def curves(frame: pd.DataFrame, lines: pd.DataFrame, seeds: Sequence[int]) -> dict[str, dict]:
    """Of each problem the best method of each side, as ``plots.error_against_seconds`` has it."""
    titles = {"ou": "Ornstein–Uhlenbeck", "sir": "epidemic"}
    found = {}
    for line in lines[lines.best].itertuples():
        rows = frame[(frame.problem == line.problem) & (frame.method == line.method)]
        curve = yardstick.curve(rows, "worst_error", seeds)
        found.setdefault(titles[line.problem], {})[SIDES[line.method]] = curve.to_dict("list")
    return found


def claims(lines: pd.DataFrame) -> pd.DataFrame:
    """A row of README's table for each problem: what the best method of each side took."""
    titles, rows = {"ou": "OU", "sir": "Epidemic"}, []
    for problem, group in lines[lines.best].groupby("problem", sort=False):
        if not {"ours", "NUTS"} <= set(group.method.map(SIDES)):
            continue  # a part of the study
        each = [f"{line.method} {_reached(line)}" for line in group.itertuples()]
        few = [
            f"{SIDES[line.method]} has {line.seeds}, the others count as far off"
            for line in group.itertuples()
            if line.seeds < len(SEEDS)
        ]
        mine, rival = (group[group.method.map(SIDES) == side].iloc[0] for side in ("ours", "NUTS"))
        rows.append(
            {
                "claim": f"{titles[problem]}: seconds until every quantile stays within "
                f"{yardstick.BAR:g} sd, set-up counted",
                "paper": "not given",
                "ours": "; ".join([*each, f"median of {len(SEEDS)} seeds, one core", *few]),
                "verdict": _verdict(mine, rival),
                "notebook": "compare",
            }
        )
    return pd.DataFrame(rows, columns=pool.CLAIM)


def _reached(line: tuple) -> str:
    if np.isinf(line.lowest_error):
        return "failed"
    if np.isfinite(line.seconds_to_accuracy):
        return f"{line.seconds_to_accuracy:.0f} s"
    return f"not reached in {line.last_seconds:.0f} s (at best {line.lowest_error:.2f} sd)"


def _verdict(mine: pd.Series, rival: pd.Series) -> str:
    ours, nuts = mine.seconds_to_accuracy, rival.seconds_to_accuracy
    if np.isinf(ours):
        return "neither gets there" if np.isinf(nuts) else "not reached by ours"
    return (
        "only ours gets there" if np.isinf(nuts) else f"{ours / nuts:.2f} times the seconds of NUTS"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the studies, and of this one."""
    own = argparse.ArgumentParser("benchmarks/compare.py", add_help=False, allow_abbrev=False)
    own.add_argument("--problem", choices=list(NAMES))
    own.add_argument("--num-obs", type=int)
    mine, rest = own.parse_known_args(argv)
    args = pool.parse("compare", ABOUT, rest)
    if mine.num_obs is not None and (mine.problem != "ou" or args.save_to or mine.num_obs < 1):
        own.error("--num-obs is 1 or more, needs --problem ou, and excludes --save-to")
    return argparse.Namespace(**vars(args), **vars(mine))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then writes both tables and the figure, or prints the summary."""
    args = parse(argv)
    names = pool.matching([method.name for method in METHODS], args.only)
    methods = [method for method in METHODS if method.name in names]
    problems = [args.problem] if args.problem else list(NAMES)
    wanted = specs(methods, problems, args.num_obs, args.steps)
    if args.fresh:
        args.journal.unlink(missing_ok=True)
    found = side_run.results(wanted, args)
    frame, seeds = table(wanted, found), sorted({spec["seed"] for spec in wanted.values()})
    lines = summary(frame, seeds)
    if args.save_to is None:
        print(lines.round(2).to_string(index=False))
        return 0
    pool.save(frame.round(DIGITS), found, args)
    lines.round(2).to_csv(args.save_to / "results/compare_summary.csv", index=False)
    claims(lines).to_csv(args.save_to / "results/claims_compare.csv", index=False)
    plots.set_style()
    figure = plots.error_against_seconds(curves(frame, lines, seeds), yardstick.BAR)
    figure.savefig(args.save_to / "figures/compare.png")
    return 0


if __name__ == "__main__":
    pool.guarded(main)
