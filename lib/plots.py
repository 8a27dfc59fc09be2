"""Figures of arrays; those of a fit come from ``plots_fit`` and ``plots_theta``."""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from lib.plots_fit import paths, predictive, trace
from lib.plots_parts import (
    BAND_LEVELS,
    FAN_LEVELS,
    INK,
    LINES,
    PALETTE,
    TRUTH,
    band,
    density,
    elbo_trace,
    fan,
    legend_above,
    quantiles,
    row,
    set_style,
    stack,
)
from lib.plots_studies import KINDS, error_against_seconds, growth, robustness
from lib.plots_theta import pairs, parameters

# What notebooks and benchmarks find here.
__all__ = [
    "BAND_LEVELS",
    "FAN_LEVELS",
    "KINDS",
    "band",
    "compare_bands",
    "elbo_trace",
    "error_against_seconds",
    "fan",
    "forecast",
    "growth",
    "marginals",
    "observed",
    "pairs",
    "parameters",
    "paths",
    "predictive",
    "quantiles",
    "robustness",
    "set_style",
    "smoothing",
    "trace",
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
    figure, axes = stack(len(panels), height=1.75)
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
            w = None if weights is None else weights.get(name)
            density(axis, values[:, j], PALETTE[k], LINES[k % len(LINES)], name, w)
        if truth is not None:
            axis.axvline(truth[j], color=TRUTH, lw=1, ls=":", label="true value")
        ends = [np.quantile(values[:, j].numpy(), (0.01, 0.99)) for values in draws.values()]
        ends += [curve[j][0].numpy() for curve in (curves or {}).values()]
        axis.set_xlim(min(part.min() for part in ends), max(part.max() for part in ends))
        axis.set(xlabel=label, ylabel="density" if j == 0 else "", yticks=[])
    sns.despine(figure)
    return legend_above(figure, axes)


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
