"""Importance weights w = p(ϑ, x, y) / q(ϑ, x) by their logs: mean, effective share, k-hat, PSIS."""

import importlib
import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

K_HAT_LIMIT = 0.7  # above it weighted numbers mislead
LOWEST = -1e30  # a log weight of no mass whose powers are finite


class _Arviz:
    """The package, imported at its first use: that takes longer than to import torch."""

    def __getattr__(self, name: str) -> object:
        with warnings.catch_warnings():
            # arviz 0.23 announces its own future on the first import of a day.
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(importlib.import_module("arviz"), name)


arviz = _Arviz()


def log_mean(log_weight: Float[Tensor, " mc"]) -> float:
    """Log of the mean weight."""
    return float(torch.logsumexp(log_weight, 0)) - math.log(len(log_weight))


def nan_is_no_mass(log_weight: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Log weights with −∞ for nan: far out the drift may overflow, and p gives no mass there."""
    return log_weight.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def bound(log_weight: Float[Tensor, " mc"]) -> tuple[float, float]:
    """ELBO of q cut to where its log weights are finite, with its standard error; NaN of too few.

    With a share s of the draws there it is their mean plus log s.
    """
    finite = log_weight[log_weight.isfinite()]
    if len(finite) < 2:
        return math.nan, math.nan
    log_share = math.log(len(finite) / len(log_weight))
    return float(finite.mean()) + log_share, float(finite.std()) / math.sqrt(len(finite))


def effective(log_weight: Float[Tensor, " mc"]) -> float:
    """Kish's effective sample size (Σw)² / Σw²."""
    return len(log_weight) * ess_fraction(log_weight)


def ess_fraction(log_weight: Float[Tensor, " mc"]) -> float:
    """Kish's effective sample size over n: (Σw)² / (n Σw²); 0 without any weight."""
    log_weight = nan_is_no_mass(log_weight)
    if not (log_weight > -math.inf).any():
        return 0.0
    log_ess = 2 * torch.logsumexp(log_weight, 0) - torch.logsumexp(2 * log_weight, 0)
    return math.exp(float(log_ess) - math.log(len(log_weight)))


def tempered(
    log_weight: Float[Tensor, " mc"],
    weigh: Callable[[Tensor], Tensor],
    share: float,
    log_base: Float[Tensor, " mc"] | float = 0.0,
) -> Float[Tensor, " mc"] | None:
    r"""Log of :math:`w^b w_0^{1-b}`, b the largest power of 0.7 with which the draws count enough.

    Args:
        log_weight: log w of each draw.
        weigh: Weights from log weights.
        share: What they must count as, (Σw)² / (n Σw²).
        log_base: log w_0; 0 is the law of the draws.

    Returns:
        Log weights; None where a weight is infinite, or so few draws have mass that no b down to
        1e-6 will do.
    """
    if not log_weight.max().isfinite():
        return None
    log_weight, power = log_weight.clamp(min=LOWEST), 1.0
    while power > 1e-6:
        between = power * log_weight + (1 - power) * log_base
        weight = weigh(between)
        if weight.sum().square() >= share * len(weight) * weight.square().sum():
            return between
        power *= 0.7
    return None


def k_hat(log_weight: Float[Tensor, " mc"]) -> float:
    """Pareto shape of the largest weights (Vehtari et al. 2024).

    It is 0 for equal weights, those of a perfect q: they have no tail. It is infinite if a weight
    is, and where the draws with mass are no more than a tail.
    """
    values = nan_is_no_mass(log_weight).double().cpu().numpy()
    mass, n = values[values > -math.inf], len(values)
    if len(mass) <= math.ceil(min(n / 5, 3 * math.sqrt(n))) or mass.max() == math.inf:
        return math.inf
    if np.ptp(mass) == 0:
        return 0.0
    # The Pareto fit tries shapes at which exp overflows; their likelihood is then 0, as it should.
    with np.errstate(over="ignore"):
        return float(arviz.psislw(values)[1])


def psis_weights(log_weight: Float[Tensor, " mc"]) -> Float[Tensor, " mc"]:
    """Self-normalised importance weights, summing to 1, the largest ones Pareto-smoothed (PSIS).

    A draw without mass has none; all are NaN where there is no largest weight.
    """
    log_weight = nan_is_no_mass(log_weight)
    if not log_weight.max().isfinite():
        return torch.full_like(log_weight, torch.nan)
    with np.errstate(over="ignore"):
        smoothed, _ = arviz.psislw(log_weight.double().cpu().numpy())
    return torch.as_tensor(smoothed, dtype=log_weight.dtype).exp()


def weighted_quantile(
    values: Float[Tensor, " mc"],
    levels: Float[Tensor, " levels"],
    weights: Float[Tensor, " mc"] | None = None,
) -> Float[Tensor, " levels"]:
    """Quantiles of weighted draws, interpolated between the mid-points of the weights' steps."""
    return weighted_quantiles(values[:, None], levels, weights)[:, 0]


def weighted_quantiles(
    values: Float[Tensor, "mc columns"],
    levels: Float[Tensor, " levels"],
    weights: Float[Tensor, " mc"] | None = None,
) -> Float[Tensor, "levels columns"]:
    """Those of every column; a draw without weight is none."""
    if weights is not None:
        values, weights = values[weights != 0], weights[weights != 0]
    ordered, order = values.T.contiguous().sort(-1)
    w = torch.ones_like(ordered) / len(values) if weights is None else weights[order]
    columns = zip((w.cumsum(-1) - 0.5 * w).numpy(), ordered.numpy(), strict=True)
    out = np.stack([np.interp(levels.numpy(), *column) for column in columns], 1)
    return torch.as_tensor(out, dtype=values.dtype)
