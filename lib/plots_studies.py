"""Figures of the heavier studies, benchmarks/; ``lib.plots`` hands them on."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from lib.diagnostics import K_HAT_LIMIT
from lib.plots_parts import COLUMN, INK, LINES, PALETTE, legend_above, stack

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
            style = {"color": PALETTE[k], "ls": LINES[k % len(LINES)], "marker": MARKS[k]}
            axis.plot(seconds, error, lw=1.3, ms=3.5, label=name, **style)
        axis.axhline(bar, color=INK, lw=0.8, ls=":")
        axis.set(xscale="log", yscale="log", title=title, ylabel="worst quantile error (sd)")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    axes[-1].set_xlabel("seconds of one CPU core, set-up included")
    sns.despine(figure)
    return legend_above(figure, axes)
