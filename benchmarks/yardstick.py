"""How near draws are: error of the worst marginal quantile in interquartile sds; ESS; times."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from problems import LEVELS
from timed_run import Run

from lib.weights import arviz, ess_fraction, k_hat, nan_is_no_mass, psis_weights, weighted_quantiles

IQR_OF_NORMAL = 1.349  # in its standard deviations
BAR = 0.1  # interquartile sds
TARGET_ESS = 1000


def quantiles(vartheta: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Of each column of (draws, d) at LEVELS, (levels, d)."""
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    w = None if weights is None else torch.as_tensor(weights)
    return weighted_quantiles(torch.as_tensor(vartheta), levels, w).numpy()


def worst_error(found: Sequence, reference: np.ndarray, names: Sequence[str]) -> tuple[float, str]:
    """Largest error of a quantile (levels, d), in IQR/1.349 of the reference; and which it is."""
    low, high = (reference[LEVELS.index(level)] for level in (0.25, 0.75))
    error = np.abs(np.asarray(found, dtype=float) - reference) / ((high - low) / IQR_OF_NORMAL)
    i, j = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    return float(np.nan_to_num(error[i, j], nan=np.inf)), f"{LEVELS[i]:.0%} of {names[j]}"


def bulk_ess(theta: np.ndarray) -> float:
    """Smallest of the parameters' bulk effective sample sizes, from (chains, draws, d)."""
    with np.errstate(invalid="ignore", divide="ignore"):  # a chain that stands still has none
        each = [arviz.ess(theta[..., j], method="bulk") for j in range(theta.shape[-1])]
    return float(np.min(each))


def looks(run: Run) -> list[dict[str, object]]:
    """What each checkpoint of a run has: draws, seconds, quantiles, ESS; as JSON has it."""
    look = _weighted_look if len(run.log_weight) else _look
    ends, seconds = run.ends.tolist(), run.seconds.tolist()
    return [
        {"draws": end, "seconds": time} | look(run.theta[:, :end], run.log_weight[:end])
        for end, time in zip(ends, seconds, strict=True)
    ]


def _look(theta: np.ndarray, _: np.ndarray) -> dict[str, object]:
    """The draws of chains."""
    values = quantiles(theta.reshape(-1, theta.shape[-1])).tolist()
    return {"ess": bulk_ess(theta), "k_hat": None, "quantiles": values, "unweighted": values}


def _weighted_look(theta: np.ndarray, log_weight: np.ndarray) -> dict[str, object]:
    """The draws of a fit, with PSIS weights; refuses draws that all have no mass."""
    log_weight = nan_is_no_mass(torch.as_tensor(log_weight))
    if not log_weight.max().isfinite():
        raise ArithmeticError("no draw has a finite weight")
    (theta,) = theta
    return {
        "ess": len(theta) * ess_fraction(log_weight),
        "k_hat": k_hat(log_weight),
        "quantiles": quantiles(theta, psis_weights(log_weight)).tolist(),
        "unweighted": quantiles(theta).tolist(),
    }


def lasting(seconds: Sequence[float], errors: Sequence[float], bar: float = BAR) -> float:
    """Smallest of the times, rising, from which on the error stays at or below the bar, or ∞."""
    below = np.logical_and.accumulate(np.asarray(errors)[::-1] <= bar)[::-1]
    return float(np.asarray(seconds)[below].min()) if below.any() else float("inf")


def curve(rows: pd.DataFrame, column: str, seeds: Sequence[int]) -> pd.DataFrame:
    """Median seconds and error, and the range of the error, after each number of draws of a method.

    A seed without numbers counts as infinitely far.
    """
    spread = rows.pivot(index="draws", columns="seed", values=column)
    spread = spread.reindex(columns=list(seeds)).fillna(np.inf)
    seconds = rows.groupby("draws").seconds.median()
    middle = {"seconds": seconds, "error": spread.median(axis=1)}
    table = pd.DataFrame(middle | {"low": spread.min(axis=1), "high": spread.max(axis=1)})
    return table.sort_values("seconds")


def seconds_to_ess(look: dict[str, object], base: float, target: float = TARGET_ESS) -> float:
    """Seconds to so many effective draws, at the rate of a look; ``base`` are before the first."""
    if not look["ess"] > 0:
        return float("inf")
    return base + (look["seconds"] - base) * target / look["ess"]
