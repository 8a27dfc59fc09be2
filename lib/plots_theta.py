"""Figures of a fit's parameters: densities and pairs of ϑ under q, weighted, and p(ϑ)."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import gaussian_kde
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal

from lib.plots_fit import Weighing, check_draws, weigh
from lib.plots_parts import COLUMN, GREY, INK, LINES, PALETTE, TRUTH, density, legend_above, row
from lib.priors import NaturalPrior
from lib.probe import check_bounds
from lib.result import Draws, FitResult
from lib.ssm import StateSpaceModel
from lib.weights import weighted_quantile

SHOWN = (0.002, 0.998)  # quantiles of q(ϑ) between which ϑ is shown
PRIOR_DRAWS = 10_000
MAX_PAIRS = 12
POINTS = 500  # of a pair: more would hide each other
OUTSIDE = (0.05, 0.5)  # shares of the mass outside a pair's contours
SLANTED = {"rotation": 30, "ha": "right", "fontsize": "small"}
LYING = {"rotation": 0, "ha": "right", "va": "center", "fontsize": "small"}

Truth = Sequence[float | int] | Tensor | None


def parameters(fit: FitResult, draws: Draws, truth: Truth = None) -> Figure:
    """Density of each ϑ: of q, of the same draws with PSIS weights, and of the prior.

    Args:
        fit: A fit of any model.
        draws: Draws of that fit.
        truth: θ that the data were simulated with, on the natural scale, if it is known.

    Raises:
        ValueError: If the draws or the truth are not of this fit's parameters.
    """
    check_draws(fit, draws)
    true, (weights, label) = _unconstrained(fit.model, truth), weigh(draws)
    figure, axes = row(fit.model.num_theta, height=2.5)
    for j, (axis, name) in enumerate(zip(axes, vartheta_names(fit.model), strict=True)):
        values = draws.vartheta[:, j]
        limits = _limits(values, weights, true[j])
        points = torch.linspace(*limits, 200, dtype=torch.float64)
        axis.plot(points, prior_density(fit.model, j, points), color=GREY, lw=1.2, label="prior")
        density(axis, values, PALETTE[0], LINES[0], "q")
        if weights is None:
            axis.plot([], [], ls="none", label=label)
        else:
            density(axis, values, INK, LINES[1], f"q, {label}", weights)
        if truth is not None:
            axis.axvline(true[j], color=TRUTH, lw=1.2, ls=":", label="true value")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set(xlim=limits, xlabel=name, ylabel="" if j % 3 else "density", yticks=[])
    sns.despine(figure)
    return legend_above(figure, axes)


def pairs(
    fit: FitResult,
    draws: Draws,
    truth: Truth = None,
    weighted: bool = False,
    names: Sequence[str] | None = None,
) -> Figure:
    """Densities of ϑ on the diagonal; below it draws of each pair and their 50 and 95 % contours.

    Args:
        fit: A fit of any model.
        draws: Draws of that fit.
        truth: θ that the data were simulated with, on the natural scale, if it is known.
        weighted: Give the draws PSIS weights; the points are redrawn in proportion to them.
        names: Which of the model's ``theta_names``, in the order shown; all if left out.

    Raises:
        ValueError: If there are more than 12 parameters, a name is not the model's, k-hat forbids
            weights, or the draws or the truth are not of this fit's parameters.
    """
    check_draws(fit, draws)
    chosen, true = _chosen(fit.model.theta_names, names), _unconstrained(fit.model, truth)
    weighing = weigh(draws)
    weights = _trusted(weighing) if weighted else None
    figure, axes = _triangle([vartheta_names(fit.model)[j] for j in chosen])
    for (i, j), axis in axes.items():
        x, y = draws.vartheta[:, chosen[j]], draws.vartheta[:, chosen[i]]
        if i == j:
            density(axis, x, PALETTE[0], LINES[0], "q, weighted" if weighted else "q", weights)
        else:
            _pair(axis, torch.stack([x, y], -1), weights)
            axis.set_ylim(_limits(y, weights, true[chosen[i]]))
        axis.set_xlim(_limits(x, weights, true[chosen[j]]))
        if truth is not None:
            style = {"color": TRUTH, "lw": 1, "ls": ":"}
            axis.axvline(true[chosen[j]], label="true value", **style)
            if i != j:
                axis.axhline(true[chosen[i]], **style)
    if weighing.weights is None:
        axes[0, 0].plot([], [], ls="none", label=weighing.label)
    legend_above(figure, list(axes.values()))
    figure.subplots_adjust(wspace=0.12, hspace=0.12)
    figure.align_labels()
    return figure


def prior_density(
    model: StateSpaceModel, j: int, points: Float[Tensor, " points"]
) -> Float[Tensor, " points"]:
    """Marginal density of ϑ_j under the prior; a kernel estimate where it has no simple form."""
    prior = model.prior
    if isinstance(prior, NaturalPrior):
        whole = points[:, None].expand(-1, model.num_theta)
        value, log_slope = prior.bounds.to_natural(whole)[:, j], prior.bounds.log_slope(whole)[:, j]
        return (prior.parts[j].log_prob(value) + log_slope).exp()
    joint = prior.distribution
    while isinstance(joint, Independent):
        joint = joint.base_dist
    if isinstance(joint, MultivariateNormal):
        joint = Normal(joint.loc, joint.variance.sqrt())
    if not joint.event_shape:
        return joint.log_prob(points[:, None].expand(-1, model.num_theta))[:, j].exp()
    kernels = gaussian_kde(model.sample_prior(PRIOR_DRAWS, seed=0)[:, j].numpy())
    return torch.as_tensor(kernels(points.numpy()))


def vartheta_names(model: StateSpaceModel) -> list[str]:
    """Labels of ϑ: the logarithm of a positive parameter, say."""
    return [model.bounds.label(name, j) for j, name in enumerate(model.theta_names)]


def _unconstrained(model: StateSpaceModel, truth: Truth) -> Float[Tensor, " theta"]:
    """ϑ of the true θ, NaN where there is none."""
    if truth is None:
        return torch.full((model.num_theta,), torch.nan, dtype=torch.float64)
    theta = torch.as_tensor(truth, dtype=torch.float64)
    if theta.shape != (model.num_theta,):
        raise ValueError(
            f"truth must be θ, one number for each of {model.theta_names}; got {theta.tolist()}."
        )
    check_bounds("truth", theta[None], model.theta_names, model.bounds)
    return model.to_vartheta(theta)


def _limits(
    values: Float[Tensor, " mc"], weights: Float[Tensor, " mc"] | None, true: Tensor
) -> tuple[float, float]:
    """Where the draws have their mass, weighted or not, and the true value, if there is one."""
    levels = torch.tensor(SHOWN, dtype=values.dtype)
    ends = [weighted_quantile(values, levels, w) for w in (None, weights)]
    ends = np.concatenate([*ends, [true]])
    low, high = np.nanmin(ends), np.nanmax(ends)
    margin = 0.03 * (high - low)
    return low - margin, high + margin


def _chosen(theta_names: Sequence[str], names: Sequence[str] | None) -> list[int]:
    """Places of the parameters to show."""
    names = theta_names if names is None else names
    strangers = set(names) - set(theta_names)
    if isinstance(names, str) or strangers or not 0 < len(names) == len(set(names)):
        raise ValueError(f"names must be some of {tuple(theta_names)}, each once; got {names!r}.")
    if len(names) > MAX_PAIRS:
        raise ValueError(
            f"pairs can show at most {MAX_PAIRS} parameters; got {len(names)}. Choose with names=."
        )
    return [theta_names.index(name) for name in names]


def _trusted(weighing: Weighing) -> Float[Tensor, " mc"]:
    weights, note = weighing
    if weights is None:
        raise ValueError(f"weighted=True must have weights to trust; got {note}. Leave it out.")
    return weights


def _triangle(labels: Sequence[str]) -> tuple[Figure, dict[tuple[int, int], Axes]]:
    """Lower triangle of panels (row, column); names and ticks on its left and lower edge alone."""
    d, axes = len(labels), {}
    narrow = d > 4  # too narrow for a long name: those of columns slant, those of rows lie
    size = COLUMN * min(2.16, 0.65 + 0.35 * d)
    figure = plt.figure(figsize=(size, size))
    for i, j in np.argwhere(np.tri(d)).tolist():
        axis = axes[i, j] = figure.add_subplot(d, d, i * d + j + 1, sharex=axes.get((j, j)))
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(2 if narrow else 4))
        axis.tick_params(labelsize="x-small", labelbottom=i == d - 1, labelleft=j == 0)
        axis.tick_params(axis="x", rotation=45 if narrow else 0)
        if i == j:
            axis.set_yticks([])
        if i == d - 1:
            axis.set_xlabel(labels[j], **SLANTED if narrow else {})
        if j == 0:
            axis.set_ylabel(labels[i] if i else "density", **LYING if narrow else {})
    sns.despine(figure)
    return figure, axes


def _pair(axis: Axes, xy: Float[Tensor, "mc 2"], weights: Float[Tensor, " mc"] | None) -> None:
    """Some draws as points, and contours of the density of all."""
    shown = xy[:POINTS]
    if weights is not None:
        at = (torch.arange(POINTS).to(weights) + 0.5) / POINTS
        shown = xy[torch.searchsorted(weights.cumsum(0), at).clamp(max=len(xy) - 1)]
    style = {"color": PALETTE[0], "alpha": 0.3, "ms": 2.5, "mew": 0, "rasterized": True}
    axis.plot(*shown.T, ".", **style)
    axis.plot([], [], ".", color=PALETTE[0], label=f"{len(shown)} draws")
    contours = {"levels": OUTSIDE, "gridsize": 50, "color": INK, "linewidths": 0.8}
    sns.kdeplot(x=xy[:, 0].numpy(), y=xy[:, 1].numpy(), weights=weights, ax=axis, **contours)
    axis.plot([], [], color=INK, lw=0.8, label="50, 95 % contours")
