"""Figures of any fit over time: q(x), its weighted draws p(x | y), new data y; its ELBO."""

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import seaborn as sns
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lib.data import Observations
from lib.plots_parts import (
    BAND_LEVELS,
    GREY,
    INK,
    LINES,
    PALETTE,
    TRUTH,
    elbo_trace,
    fan,
    legend_above,
    stack,
)
from lib.result import Draws, FitResult, Forecast, check_kind
from lib.weights import K_HAT_LIMIT, k_hat, psis_weights, weighted_quantiles

MARKS = (".", "^", "s", "D")  # of the observed components that share a panel
FEWEST_DRAWS = 20
AVERAGED = 50  # steps, at most, of an ELBO's smooth line


class View(NamedTuple):
    """A panel of paths: the combination c'x of the states, and which data read it.

    Attributes:
        label: Of the panel's axis.
        weights: c, one entry a state.
        readings: (component j of y, factor): y_j over the factor is a noisy reading of c'x.
    """

    label: str
    weights: Float[Tensor, " state"]
    readings: tuple[tuple[int, float], ...]


class Weighing(NamedTuple):
    """PSIS weights of the draws, None where k-hat forbids them, and what a legend says."""

    weights: Float[Tensor, " mc"] | None
    label: str


def paths(
    fit: FitResult, draws: Draws, truth: tuple[Tensor, Tensor] | None = None, num_paths: int = 30
) -> Figure:
    """The hidden path: a panel a state, and one of F'x for each component of y that mixes states.

    Bands and draws are those of q. The dashed lines are quantiles of all draws with PSIS weights;
    where k-hat is above 0.7 the legend says so instead.

    Args:
        fit: A fit of any model.
        draws: Draws of that fit.
        truth: (t, x) of the true path, x (time, state), if it is known.
        num_paths: Draws shown as lines; the bands use all.

    Raises:
        ValueError: If the draws or the truth are not of this fit's states and times.
    """
    check_draws(fit, draws)
    _check_path(truth, fit.model.num_states)
    obs, weighing = fit.observations, weigh(draws)
    t, panels = obs.grid().t, views(fit.model.observation.F, fit.model.state_names, obs.names)
    figure, axes = stack(len(panels), height=1.7)
    for axis, view in zip(axes, panels, strict=True):
        x = draws.x @ view.weights
        fan(axis, t, x, PALETTE[0], "q")
        axis.plot(t, x[:num_paths].T, color=GREY, lw=0.4, alpha=0.5, zorder=0)
        axis.plot([], [], color=GREY, lw=0.6, label=f"{len(x[:num_paths])} draws of q")
        _weighted_band(axis, t, x, weighing)
        if truth is not None:
            axis.plot(
                truth[0], truth[1].double() @ view.weights, color=TRUTH, lw=1.2, label="true path"
            )
        _readings(axis, obs, view)
        axis.set_ylabel(view.label)
    return _over_time(figure, axes)


def predictive(
    fit: FitResult, y_new: Float[Tensor, "mc time obs"], future: Forecast | None = None
) -> Figure:
    """Replicated observations beside those of the fit, a panel a component.

    Args:
        fit: A fit of any model.
        y_new: Replicated observations, from ``fit.predict``.
        future: What follows the data's end, from ``fit.forecast``.

    Raises:
        ValueError: If the new observations are not of this fit, or no path of the forecast is left.
    """
    _check_new(fit, y_new, future)
    obs = fit.observations
    figure, axes = stack(fit.model.num_observed, height=1.75)
    for j, axis in enumerate(axes):
        fan(axis, obs.grid().t, y_new[..., j], PALETTE[0], "new data")
        if future is not None:
            kept = "" if future.alive == 1 else f" ({future.alive:.0%} of paths)"
            fan(axis, future.t, future.y[..., j], PALETTE[1], f"forecast{kept}")
            axis.axvline(obs.grid().t[-1], color=INK, lw=0.8, ls=":")
        _readings(axis, obs, View(obs.names[j], fit.model.observation.F[:, j], ((j, 1.0),)))
        axis.set_ylabel(obs.names[j])
    return _over_time(figure, axes)


def trace(fit: FitResult) -> Figure:
    """ELBO against step, under the run's own verdict: did it converge, and why."""
    _check_fit(fit)
    span = max(1, min(AVERAGED, len(fit.history.elbo) // 20))
    runs = {f"mean of {span} steps": fit.history.elbo}
    return elbo_trace(runs, window=span, title=textwrap.fill(fit.reason, 50))


def views(
    F: Float[Tensor, "state obs"], state_names: Sequence[str], names: Sequence[str]
) -> list[View]:
    """Every state with the components of y that read it alone, then the other components."""
    alone, units = (F != 0).sum(0) == 1, torch.eye(len(F), dtype=F.dtype)
    panels = []
    for row, name, unit in zip(F.tolist(), state_names, units, strict=True):
        own = tuple((j, f) for j, f in enumerate(row) if alone[j] and f != 0)
        panels.append(View(name, unit, own))
    mixing = [j for j in range(len(names)) if not alone[j]]
    return panels + [View(f"F'x, {names[j]}", F[:, j], ((j, 1.0),)) for j in mixing]


def weigh(draws: Draws) -> Weighing:
    """PSIS weights of the draws; none where k-hat is above 0.7."""
    k = k_hat(draws.log_weight)
    if not k <= K_HAT_LIMIT:
        return Weighing(None, f"not weighted: k-hat {k:.2f} > {K_HAT_LIMIT:g}")
    return Weighing(psis_weights(draws.log_weight), "weighted")


def check_draws(fit: object, draws: object) -> None:
    """Refuse what is no draws of this fit's model and grid, and too few for a density."""
    if not (hasattr(fit, "observations") and hasattr(draws, "log_weight")):
        raise TypeError(
            f"fit must be a FitResult and draws its Draws; got {type(fit).__name__} and "
            f"{type(draws).__name__}. Take fit.draws(4000)."
        )
    if len(draws.x) < FEWEST_DRAWS:
        raise ValueError(f"draws must be {FEWEST_DRAWS} or more; got {len(draws.x)}.")
    expected = (fit.observations.num_steps + 1, fit.model.num_states), (fit.model.num_theta,)
    found = tuple(draws.x.shape[1:]), tuple(draws.vartheta.shape[1:])
    if found != expected:
        raise ValueError(
            f"draws must be of this fit, x (n, {expected[0][0]}, {expected[0][1]}) and ϑ (n, "
            f"{expected[1][0]}); got {tuple(draws.x.shape)} and {tuple(draws.vartheta.shape)}."
        )


def _check_fit(fit: object) -> None:
    check_kind("fit", fit, FitResult, "It is what lib.fit returns.")


def _check_new(fit: object, y_new: object, future: object) -> None:
    """New data and a forecast of this fit."""
    _check_fit(fit)
    check_kind("y_new", y_new, Tensor, "Take fit.predict(4000).")
    length, m = fit.observations.num_steps + 1, fit.model.num_observed
    if y_new.shape[1:] != (length, m) or not len(y_new):
        raise ValueError(
            f"y_new must be of this fit, (n, {length}, {m}); got {tuple(y_new.shape)}. Take that "
            "of fit.predict(n)."
        )
    if future is None:
        return
    check_kind("future", future, Forecast, "Take fit.forecast(50, 4000).")
    if not len(future.y):
        raise ValueError("future must hold a path; got none, all had died. Forecast fewer steps.")
    if future.y.shape[2] != m:
        raise ValueError(
            f"future must be of this fit, y (n, steps, {m}); got {tuple(future.y.shape)}."
        )


def _check_path(truth: object, num_states: int) -> None:
    if truth is None:
        return
    got = [type(part).__name__ for part in truth] if isinstance(truth, tuple | list) else truth
    if got != ["Tensor", "Tensor"]:
        raise TypeError(f"truth must be two tensors, (t, x); got {got}.")
    if truth[1].shape != (len(truth[0]), num_states):
        raise ValueError(
            f"truth must be (t, x) with x ({len(truth[0])}, {num_states}), a row for each time; "
            f"got {tuple(truth[1].shape)}."
        )


def _weighted_band(axis: Axes, t: Tensor, x: Float[Tensor, "mc time"], weighing: Weighing) -> None:
    """Dashed median and 95 % limits of the weighted draws, or the note that there are none."""
    weights, label = weighing
    if weights is None:
        axis.plot([], [], ls="none", label=label)
        return
    levels = torch.tensor(BAND_LEVELS, dtype=x.dtype)
    names = [f"{label}: median, 95 %", "", ""]
    axis.plot(
        t, weighted_quantiles(x, levels, weights).T, color=INK, lw=0.8, ls=LINES[1], label=names
    )


def _readings(axis: Axes, obs: Observations, view: View) -> None:
    """The data of a view that are there; several components have their own marks and names."""
    for (component, factor), mark in zip(view.readings, cycle(MARKS)):
        y = obs.y[:, component] / factor
        there = ~y.isnan()
        name = obs.names[component] if len(view.readings) > 1 else "observations"
        label = name if factor == 1 else f"{name} / {factor:g}"
        style = {"color": INK, "mec": "white", "mew": 0.3, "ms": 5.5 if mark == "." else 4}
        axis.plot(obs.times[there], y[there], mark, label=label, **style)


def _over_time(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Name the axis of time, drop the frames, put the legend above."""
    axes[-1].set_xlabel("t")
    sns.despine(figure)
    figure.align_ylabels(axes)
    return legend_above(figure, axes)
