"""Figures of the heavier studies, benchmarks/; ``lib.plots`` hands them on."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from lib.plots_parts import COLUMN, INK, LINES, PALETTE, legend_above, stack
from lib.weights import K_HAT_LIMIT

MARKS = ("o", "s", "^", "D", "v", "P", "X")  # of methods, beside their colours
KINDS = {"regular": "o", "tailed": "^", "plateau": "s"}  # of posteriors, and their marks


def robustness(table: Mapping[str, Sequence], bars: Sequence[float]) -> Figure:
    """KL of the fit to each data set on a log axis, and k-hat below; flagged fits are ringed.

    Args:
        table: Columns seed, kind (a key of KINDS), kl, k_hat, flagged; in the order drawn.
        bars: Values of KL, nats, drawn as lines.
    """
    size = (COLUMN * 1.25, 4.2)
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, height_ratios=(3, 2))
    kinds, flagged = np.asarray(table["kind"]), np.asarray(table["flagged"], dtype=bool)
    for axis, column in zip(axes, ("kl", "k_hat"), strict=True):
        values = np.asarray(table[column], dtype=float)
        top = 2 * np.max(values, where=np.isfinite(values), initial=1.0)
        values = np.where(np.isfinite(values), values, top)  # a fit without numbers: at the top
        for k, (kind, mark) in enumerate(KINDS.items()):
            (at,) = np.nonzero(kinds == kind)
            axis.plot(at, values[at], mark, color=PALETTE[k], ms=4.5, label=f"{kind} posterior")
        ring = {"mfc": "none", "mec": INK, "ms": 9, "label": "flagged fit"}
        axis.plot(np.nonzero(flagged)[0], values[flagged], "o", **ring)
        axis.margins(y=0.12)
    for k, bar in enumerate(bars):
        axes[0].axhline(bar, color=INK, lw=0.8, ls=LINES[k + 1], label=f"{bar:g} nats")
    limit = {"color": INK, "lw": 0.8, "ls": LINES[3], "label": f"k-hat {K_HAT_LIMIT:g}"}
    axes[1].axhline(K_HAT_LIMIT, **limit)
    axes[0].set(yscale="log", ylabel="log p(y) − ELBO (nats)")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[1].set(xlabel="seed of the data set", ylabel="k-hat")
    axes[1].set_xticks(range(len(kinds)), table["seed"], rotation=90)
    sns.despine(figure)
    return legend_above(figure, list(axes))


def error_against_seconds(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence]]], bar: float
) -> Figure:
    """Error of each method against seconds, log-log: the median over seeds in its range.

    Args:
        panels: Title → method → columns seconds, error, low, high; a method keeps its colour.
        bar: The error that is good enough, drawn as a line.
    """
    figure, axes = stack(len(panels), height=2.3)
    methods = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for name, curve in curves.items():
            k = methods.index(name)
            seconds, error, low, high = (
                np.asarray(curve[column], dtype=float)
                for column in ("seconds", "error", "low", "high")
            )
            axis.fill_between(seconds, low, high, color=PALETTE[k], alpha=0.2, lw=0)
            if len(seconds) == 1:  # an area without width
                axis.vlines(seconds, low, high, color=PALETTE[k], lw=1.3)
            style = {"color": PALETTE[k], "ls": LINES[k % len(LINES)], "marker": MARKS[k]}
            axis.plot(seconds, error, lw=1.3, ms=3.5, label=name, **style)
        axis.axhline(bar, color=INK, lw=0.8, ls=":")
        axis.set(xscale="log", yscale="log", title=title, ylabel="worst quantile error (sd)")
        for side in (axis.xaxis, axis.yaxis):
            _plain_ticks(side)
    axes[-1].set_xlabel("seconds of one CPU core, set-up included")
    sns.despine(figure)
    return legend_above(figure, axes)


def growth(panels: Mapping[str, Mapping[str, Mapping[str, Sequence]]], goal: str) -> Figure:
    """Seconds to a goal and memory against the steps of the grid, log-log, with their slopes.

    A side that misses the goal has an open mark at the seconds that it had, which the slope leaves
    out.

    Args:
        panels: Title → side → columns steps, seconds (∞ where missed), spent, memory.
        goal: What the seconds are to, in words.
    """
    size = (COLUMN * 1.8, 4.6)
    figure, axes = plt.subplots(2, len(panels), figsize=size, sharex="col", squeeze=False)
    for (upper, lower), (title, sides) in zip(axes.T, panels.items(), strict=True):
        for k, (side, table) in enumerate(sides.items()):
            _grow(upper, lower, side, table, k)
        for axis, label in ((upper, f"seconds to {goal}"), (lower, "memory (MB)")):
            axis.set(xscale="log", yscale="log", ylabel=label)
            axis.legend(fontsize="x-small", handlelength=2.6, loc="upper left")
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.8)  # room for the legend
            _plain_ticks(axis.yaxis)
        upper.set_title(title, fontsize="small")
        sizes = sorted({n for table in sides.values() for n in table["steps"]})
        lower.set_xticks(sizes, [f"{n:g}" for n in sizes])
        lower.xaxis.set_minor_locator(NullLocator())
        lower.set_xlabel("steps of the grid, N")
    sns.despine(figure)
    figure.tight_layout()
    return figure


def _plain_ticks(side: Axis) -> None:
    """Numbers at 1, 2 and 5 of each decade, of which a fraction may lack a power of ten."""
    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter("{x:g}")
    side.set_minor_formatter(NullFormatter())


def _grow(upper: Axes, lower: Axes, side: str, table: Mapping[str, Sequence], k: int) -> None:
    """Seconds and memory of a side, the k-th."""
    style = {"color": PALETTE[k], "marker": MARKS[k], "ms": 4.5}
    names = ("steps", "seconds", "spent", "memory")
    steps, seconds, spent, memory = (np.asarray(table[name], dtype=float) for name in names)
    for axis, values in ((upper, seconds), (lower, memory)):
        _power_law(axis, steps, values, side, style | {"ls": LINES[k], "lw": 1.3})
    if (late := ~np.isfinite(seconds)).any():
        upper.plot(steps[late], spent[late], ls="", mfc="none", label=f"{side}: not yet", **style)


def _power_law(
    axis: Axes, steps: np.ndarray, values: np.ndarray, side: str, style: Mapping[str, object]
) -> None:
    """A line through what is finite; its slope, by least squares on both logs, is in the legend."""
    known = np.isfinite(values)
    x, y = np.log(steps[known]), np.log(values[known])
    label = side
    if len(x) > 1:
        label = f"{side}, slope {np.polyfit(x, y, 1)[0]:.2f}"
    axis.plot(steps[known], values[known], label=label, **style)
