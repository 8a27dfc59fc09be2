"""What the growth study says: who is first at each size, powers of N, README's rows, the figure."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pool
import yardstick
from problems import DT, LEVELS
from problems import NAMES as PARAMETERS

# Title and what its size is.
NAMES = {"ou": ("OU, longer series", "N"), "sir": ("Epidemic, finer grid", "dt")}
OURS, RIVAL, NEITHER = "ours", "NUTS", "neither"


def _first(lines: pd.DataFrame) -> Iterator[tuple[str, float, float, float, str]]:
    """Of each problem and size: seconds of ours and of the better NUTS, and who is first.

    It is "" where one side is not run yet.
    """
    for (problem, size), rows in lines.groupby(["problem", "size"], sort=False):
        own = rows.side == OURS
        ours, nuts = (rows.seconds_to_accuracy[side].min() for side in (own, ~own))
        first = OURS if ours <= nuts else RIVAL
        if np.isnan([ours, nuts]).any():
            first = ""
        elif np.isinf([ours, nuts]).all():
            first = NEITHER
        yield problem, size, ours, nuts, first


def verdict(lines: pd.DataFrame) -> list[str]:
    """For each size a sentence that says who is first to the bar."""
    said = []
    for problem, size, ours, nuts, first in _first(lines):
        end = {
            "": "one side is not run yet",
            NEITHER: f"neither is within {yardstick.BAR:g} sd",
            OURS: "we win, " + (f"1 to {nuts / ours:.1f}" if np.isfinite(nuts) else "NUTS far off"),
            RIVAL: "we lose, " + (f"{ours / nuts:.1f} to 1" if np.isfinite(ours) else "far off"),
        }[first]
        said.append(f"{problem} {size:g}: ours {ours:.0f} s, NUTS {nuts:.0f} s: {end}.")
    return said


def slopes(lines: pd.DataFrame) -> pd.DataFrame:
    """Powers of N by least squares on the logs, of what is finite; NaN of fewer than two sizes."""
    found = []
    for (problem, side), rows in lines.groupby(["problem", "side"], sort=False):
        line = {"problem": problem, "side": side}
        for column in ("seconds_to_accuracy", "run_to_accuracy", "memory_mb"):
            known = rows[np.isfinite(rows[column])]
            x, y = np.log(known.grid_steps), np.log(known[column])
            line[column] = np.polyfit(x, y, 1)[0] if len(x) > 1 else np.nan
        found.append(line)
    return pd.DataFrame(found)


def claims(lines: pd.DataFrame) -> pd.DataFrame:
    """A row of README's table for each problem: who is first at which size."""
    rows = []
    for problem, group in lines.groupby("problem", sort=False):
        (title, unit), each, winners = NAMES[problem], [], {}
        for _, size, ours, nuts, first in _first(group):
            if first:
                each.append(f"{unit} = {size:,g}: ours {_reached(ours)}, NUTS {_reached(nuts)}")
                winners.setdefault(first, []).append(f"{size:,g}")
        if not each:
            continue
        power = slopes(group).set_index("side").seconds_to_accuracy
        known = {side: power.get(side, np.nan) for side in (OURS, RIVAL)}
        text = [f"{side} {value:.2f}" for side, value in known.items() if np.isfinite(value)]
        each += [f"power of the number of grid steps: {', '.join(text)}"] if text else []
        rows.append(
            {
                "claim": f"{title}: seconds until every quantile stays within {yardstick.BAR:g} sd",
                "paper": "not given",
                "ours": "; ".join([*each, f"{group.seeds.max()} seed(s), the better NUTS"]),
                "verdict": "; ".join(
                    f"{who}{'' if who == NEITHER else ' first'} at {unit} = {', '.join(sizes)}"
                    for who, sizes in winners.items()
                ),
                "notebook": "growth",
            }
        )
    return pd.DataFrame(rows, columns=pool.CLAIM)


def _reached(seconds: float) -> str:
    return f"{seconds:,.0f} s" if np.isfinite(seconds) else "not reached"


def step_claims(references: pd.DataFrame) -> pd.DataFrame:
    """A row of README's table: how far the study's Euler step moves the epidemic's posterior.

    The references of each dt against that of the finest; no row unless there are two.
    """
    names = PARAMETERS["sir"]
    tables = {
        size: rows.pivot_table(index="level", columns="parameter", values="quantile")[list(names)]
        for size, rows in references[references.problem == "sir"].groupby("size")
    }
    if DT not in tables or len(tables) < 2:
        return pd.DataFrame(columns=pool.CLAIM)
    finest, median = min(tables), LEVELS.index(0.5)
    right, moved, each = tables.pop(finest).to_numpy(), {}, []
    for size, table in sorted(tables.items(), reverse=True):
        found = table.to_numpy()
        worst, which = yardstick.worst_error(found, right, names)
        medians = right.copy()
        medians[median] = found[median]
        moved[size] = worst, yardstick.worst_error(medians, right, names)[0]
        each.append(f"dt = {size:g}: medians {moved[size][1]:.2f} sd, {which} {worst:.2f} sd")
    worst, middle = moved[DT]
    row = {"claim": f"Epidemic: the Euler step of {DT:g} day is fine enough", "paper": "not given"}
    error = references.uncertainty.max()
    row["ours"] = f"moved from dt = {finest:g} by at most, {'; '.join(each)}; error {error:.2f} sd"
    held = worst <= yardstick.BAR
    row["verdict"] = "holds" if held else f"not for every quantile: medians within {middle:.2f} sd"
    return pd.DataFrame([row | {"notebook": "growth"}], columns=pool.CLAIM)


def panels(lines: pd.DataFrame) -> dict[str, dict]:
    """Of each problem and side the columns of ``plots.growth``."""
    found = {}
    for (problem, side), rows in lines.groupby(["problem", "side"], sort=False):
        columns = {"grid_steps": "steps", "seconds_to_accuracy": "seconds", "last_seconds": "spent"}
        columns |= {"memory_mb": "memory"}
        columns = rows[list(columns)].rename(columns=columns).sort_values("steps")
        found.setdefault(NAMES[problem][0], {})[side] = columns.to_dict("list")
    return found
