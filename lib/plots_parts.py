"""What the figures of ``plots`` share: style, panels, shaded bands, the legend above them."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

COLUMN = 3.5  # inches, one column of a journal page
BAND_LEVELS = (0.025, 0.5, 0.975)
FAN_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
INK, TRUTH = "#222222", "#d55e00"
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


def row(panels: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, of a width that suits their number; height in inches."""
    width = COLUMN * (1.25 if panels == 1 else 1.8 if panels == 2 else 2.16)
    figure, axes = plt.subplots(1, panels, figsize=(width, height), squeeze=False)
    return figure, list(axes[0])


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
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.21 * rows / figure.get_figheight()))
    return figure
