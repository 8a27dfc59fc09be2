"""Figures of any fit; those of the heavier studies come from ``plots_studies``."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from lib.plots_parts import (
    BAND_LEVELS,
    COLUMN,
    FAN_LEVELS,
    INK,
    LINES,
    PALETTE,
    TRUTH,
    band,
    fan,
    legend_above,
    quantiles,
    row,
    set_style,
)
from lib.plots_studies import KINDS, robustness

# What notebooks and benchmarks find here.
__all__ = [
    "BAND_LEVELS",
    "FAN_LEVELS",
    "KINDS",
    "band",
    "compare_bands",
    "elbo_trace",
    "fan",
    "forecast",
    "marginals",
    "observed",
    "quantiles",
    "robustness",
    "set_style",
    "smoothing",
]


def smoothing(
    t: Float[Tensor, " time"],
    x: Float[Tensor, "mc time state"],
    labels: Sequence[str],
    *,
    time_label: str,
    points: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    truth: tuple[Tensor, Tensor] | None = None,
    num_paths: int = 50,
) -> Figure:
    """Smoothing draws of each component with the 95 % band (Figure 1 of the paper, left).

    Args:
        t: Grid times.
        x: Draws of the path.
        labels: Axis label, with unit, of each component.
        time_label: Axis label, with unit, of time.
        points: Component → (times, values) of its observations.
        truth: (times, values) of the first component's true path, if it is known.
        num_paths: Paths drawn as lines; the band uses all.
    """
    figure, axes = row(x.shape[-1], height=2.7)
    for j, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        band(axis, t, x[..., j], PALETTE[0], "95 % of q")
        axis.plot(t, x[:num_paths, :, j].T, color=PALETTE[0], lw=0.4, alpha=0.4)
        axis.plot([], [], color=PALETTE[0], lw=1, label=f"{num_paths} draws of q")
        if truth is not None and j == 0:
            axis.plot(*truth, color=TRUTH, lw=1.2, label="true path")
        if points and j in points:
            axis.plot(*points[j], ".", color=INK, ms=3.5, label="observations")
        axis.set(xlabel=time_label, ylabel=label)
    sns.despine(figure)
    return legend_above(figure, axes)


def forecast(
    panels: Mapping[str, Sequence[tuple[Tensor, Tensor]]],
    t: Float[Tensor, " rows"],
    y: Float[Tensor, " rows"],
    label: str,
    *,
    time_label: str,
) -> Figure:
    """Fans of new data within the time of a fit and of forecasts after it, panel below panel.

    Args:
        panels: Title → (times, draws) of new data, then (times, draws) of forecasts.
        t: Times of all data; those after the first pair's times are drawn as held out.
        y: Their values.
        label: Axis label of the data, with unit.
        time_label: Axis label of time, with unit.
    """
    size = (COLUMN * 1.25, 0.5 + 1.75 * len(panels))
    figure, grid = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
    axes = list(grid[:, 0])
    for axis, (title, (fitted, future)) in zip(axes, panels.items(), strict=True):
        fan(axis, *fitted, PALETTE[0], "new data")
        fan(axis, *future, PALETTE[1], "forecast")
        used = t < (fitted[0][-1] + future[0][0]) / 2
        axis.axvline(fitted[0][-1], color=INK, lw=0.8, ls=":")
        axis.plot(t[used], y[used], ".", color=INK, ms=4, label="data of the fit")
        axis.plot(t[~used], y[~used], "D", color=INK, mfc="white", ms=3, label="held out")
        axis.set(ylabel=label, title=title)
    axes[-1].set_xlabel(time_label)
    sns.despine(figure)
    return legend_above(figure, axes)


def observed(
    t: Float[Tensor, " rows"],
    y: Float[Tensor, " rows"],
    label: str,
    *,
    time_label: str,
    truth: tuple[Tensor, Tensor] | None = None,
) -> Figure:
    """The data of one component; ``truth`` is (times, values) of the true path, if it is known."""
    figure, (axis,) = row(1, height=2.2)
    if truth is not None:
        axis.plot(*truth, color=TRUTH, lw=1.2, label="true path")
    axis.plot(t, y, ".", color=INK, ms=3.5, label="observations")
    axis.set(xlabel=time_label, ylabel=label)
    if truth is not None:
        axis.legend(fontsize="x-small", handlelength=1.5)
    sns.despine(figure)
    figure.tight_layout()
    return figure


def marginals(
    draws: Mapping[str, Float[Tensor, "mc theta"]],
    labels: Sequence[str],
    *,
    curves: Mapping[str, Sequence[tuple[Tensor, Tensor]]] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    truth: Sequence[float] | None = None,
) -> Figure:
    """Marginal densities of the parameters, one panel each (Figure 1 of the paper, right).

    Args:
        draws: Name → draws; drawn as kernel density estimates.
        labels: Axis label of each parameter.
        curves: Name → one (points, density) pair for each parameter, e.g. of an exact posterior.
        weights: Name → importance weights of its draws.
        truth: Values the data were simulated with.
    """
    figure, axes = row(len(labels), height=2.6)
    for j, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        for k, (name, curve) in enumerate((curves or {}).items()):
            axis.plot(*curve[j], color=INK, lw=1.6 - 0.6 * k, ls=LINES[k], label=name)
        for k, (name, values) in enumerate(draws.items()):
            style = {"color": PALETTE[k], "ls": LINES[k % len(LINES)], "lw": 1.4, "label": name}
            w = None if weights is None else weights.get(name)
            sns.kdeplot(x=values[:, j].numpy(), weights=w, ax=axis, cut=0, **style)
        if truth is not None:
            axis.axvline(truth[j], color=TRUTH, lw=1, ls=":", label="true value")
        ends = [np.quantile(values[:, j].numpy(), (0.01, 0.99)) for values in draws.values()]
        ends += [curve[j][0].numpy() for curve in (curves or {}).values()]
        axis.set_xlim(min(part.min() for part in ends), max(part.max() for part in ends))
        axis.set(xlabel=label, ylabel="density" if j == 0 else "", yticks=[])
    sns.despine(figure)
    return legend_above(figure, axes)


def elbo_trace(
    runs: Mapping[str, np.ndarray], log_evidence: float | None = None, window: int = 50
) -> Figure:
    """ELBO against step; where log p(y) is known, its distance from the ELBO on a log axis.

    Args:
        runs: Name → ELBO of each step; NaN where a step was skipped.
        log_evidence: log p(y), which no ELBO exceeds.
        window: Steps averaged by the line; the values of single steps lie behind it.
    """
    (figure, (axis,)), smallest = row(1, height=2.4), np.inf
    for k, (name, elbo) in enumerate(runs.items()):
        values = elbo if log_evidence is None else log_evidence - elbo
        style, span = {"color": PALETTE[k % len(PALETTE)]}, min(window, len(values))
        smooth = np.convolve(values, np.ones(span) / span, "valid")
        smallest = min(smallest, smooth.min(where=smooth > 0, initial=np.inf))
        axis.plot(np.arange(1, len(values) + 1), values, lw=0.3, alpha=0.3, **style)
        axis.plot(
            np.arange(span, len(values) + 1), smooth, lw=1.3, label=name, ls=LINES[k % 4], **style
        )
    if log_evidence is None:
        usable = np.concatenate([elbo[np.isfinite(elbo)] for elbo in runs.values()])
        axis.set_ylim(np.quantile(usable, 0.1) - 5, usable.max() + 2)
    else:
        # A single step's estimate may exceed log p(y): it has no place on this axis.
        axis.set_yscale("log", nonpositive="mask")
        if np.isfinite(smallest):
            axis.set_ylim(bottom=smallest / 3)
    ylabel = "ELBO (nats)" if log_evidence is None else "log p(y) − ELBO (nats)"
    axis.set(xlabel="step", ylabel=ylabel)
    sns.despine(figure)
    return legend_above(figure, [axis])


def compare_bands(
    t: Sequence[float | int],
    ours: Sequence[Float[Tensor, "levels time"]],
    reference: Sequence[Float[Tensor, "levels time"]],
    labels: Sequence[str],
    *,
    time_label: str,
    names: tuple[str, str] = ("q", "reference"),
) -> Figure:
    """Medians and 95 % intervals of q beside a reference's, one panel a component."""
    figure, axes = row(len(labels), height=2.7)
    place = np.asarray(t, dtype=float)
    width = 0.12 * np.min(np.diff(place))
    for j, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        for side, (name, value) in zip(
            (-1, 1), zip(names, (ours, reference), strict=True), strict=True
        ):
            low, middle, high = value[j].numpy()
            color, mark = (PALETTE[0], "o") if side < 0 else (INK, "s")
            style = {"fmt": mark, "ms": 2.5, "lw": 1, "color": color}
            style["label"] = f"{name}: median, 95 %"
            axis.errorbar(place + side * width, middle, (middle - low, high - middle), **style)
        axis.set(xlabel=time_label, ylabel=label)
    sns.despine(figure)
    return legend_above(figure, axes)
