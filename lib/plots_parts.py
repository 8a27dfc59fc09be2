"""What the figures of ``plots`` share: style, panels, bands, densities, the legend above."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

COLUMN = 3.5  # inches, one column of a journal page
ROW_HEIGHT = 1.8  # inches, of a further row of panels
BAND_LEVELS = (0.025, 0.5, 0.975)
FAN_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
INK, GREY, TRUTH = "#222222", "#8c8c8c", "#d55e00"
PALETTE = sns.color_palette("colorblind")
LINES = ("-", "--", ":", "-.")


def set_style() -> None:
    """Fonts and lines that stay readable at column width; colour-blind safe palette."""
    sns.set_theme(context="paper", style="ticks", palette=PALETTE, font_scale=0.95)
    plt.rcParams |= {"figure.dpi": 110, "savefig.dpi": 200, "legend.frameon": False}


def quantiles(x: Float[Tensor, "mc time"], levels: Sequence[float] = BAND_LEVELS) -> Tensor:
    """Quantiles over the draws, one row for each level."""
    return torch.as_tensor(np.quantile(x.numpy(), levels, axis=0))


def band(axis: Axes, t: Tensor, x: Float[Tensor, "mc time"], color: object, label: str) -> None:
    """Shade the central 95 % of draws at each time."""
    low, _, high = np.quantile(x.numpy(), BAND_LEVELS, axis=0)
    axis.fill_between(t, low, high, color=color, alpha=0.25, lw=0, label=label)


def fan(axis: Axes, t: Tensor, x: Float[Tensor, "mc time"], color: object, label: str) -> None:
    """The central 95 and 50 % of draws and their median at each time."""
    low, lower, middle, upper, high = np.quantile(x.numpy(), FAN_LEVELS, axis=0)
    outer = f"{label}: median, 50, 95 %"
    axis.fill_between(t, low, high, color=color, alpha=0.28, lw=0, label=outer)
    axis.fill_between(t, lower, upper, color=color, alpha=0.4, lw=0)
    axis.plot(t, middle, color=color, lw=1)


def density(
    axis: Axes,
    x: Float[Tensor, " mc"],
    color: object,
    line: str,
    label: str,
    weights: Float[Tensor, " mc"] | None = None,
) -> None:
    """Kernel density estimate of the draws, weighted if they have weights."""
    style, ylabel = {"color": color, "ls": line, "lw": 1.4, "label": label}, axis.get_ylabel()
    sns.kdeplot(x=x.numpy(), weights=weights, ax=axis, cut=0, **style)
    axis.yaxis.set_label_text(ylabel)  # seaborn writes its own where there is none


def row(panels: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, at most three in a row; height in inches of the first row."""
    width = COLUMN * (1.25 if panels == 1 else 1.8 if panels == 2 else 2.16)
    rows, columns = -(-panels // 3), min(panels, 3)
    size = (width, height + ROW_HEIGHT * (rows - 1))
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for spare in grid.flat[panels:]:
        spare.remove()
    return figure, list(grid.flat[:panels])


def stack(panels: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Panels below each other, over one axis of time; height in inches of one panel."""
    size = (COLUMN * 1.25, 0.5 + height * panels)
    figure, grid = plt.subplots(panels, 1, figsize=size, sharex=True, squeeze=False)
    return figure, list(grid[:, 0])


def legend_above(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """One legend for all panels, where no curve is."""
    named = {}
    for axis in axes:
        named |= {n: h for h, n in zip(*axis.get_legend_handles_labels(), strict=True)}
    longest = max(len(name) for name in named)
    fitting = int(figure.get_figwidth() / (0.45 + 0.05 * longest))  # inches: handle and letters
    rows = -(-len(named) // max(1, min(4, fitting)))
    columns = -(-len(named) // rows)
    legend = {"loc": "upper center", "ncols": columns, "fontsize": "x-small"}
    figure.legend(named.values(), named.keys(), **legend)
    inches = 0.07 + 0.145 * rows
    figure.tight_layout(rect=(0, 0, 1, 1 - inches / figure.get_figheight()))
    return figure


def elbo_trace(
    runs: Mapping[str, np.ndarray],
    log_evidence: float | None = None,
    window: int = 50,
    title: str = "",
) -> Figure:
    """ELBO against step; where log p(y) is known, its distance from the ELBO on a log axis.

    Args:
        runs: Name → ELBO of each step; NaN where a step was skipped.
        log_evidence: log p(y), which no ELBO exceeds.
        window: Steps averaged by the line; the values of single steps lie behind it.
        title: Above the axis.
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
        if usable.size:
            axis.set_ylim(np.quantile(usable, 0.1) - 5, usable.max() + 2)
    else:
        # A single step's estimate may exceed log p(y): it has no place on this axis.
        axis.set_yscale("log", nonpositive="mask")
        if np.isfinite(smallest):
            axis.set_ylim(bottom=smallest / 3)
    ylabel = "ELBO (nats)" if log_evidence is None else "log p(y) − ELBO (nats)"
    axis.set(xlabel="step", ylabel=ylabel)
    axis.set_title(title, fontsize="small")
    sns.despine(figure)
    return legend_above(figure, [axis])
