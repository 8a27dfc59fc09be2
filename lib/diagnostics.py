"""How far q is from the posterior: importance weights w = p(ϑ, x, y) / q(ϑ, x) of its draws."""

import importlib
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

K_HAT_LIMIT = 0.7
ESS_LIMIT = 0.1
LEVELS = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
UNSEEN_LIMIT = 0.05
UNSEEN_ESS = 3.0
WIDE_ESS = 20
LOWEST = -1e30  # a log weight of no mass whose powers are finite


class _Arviz:
    """The package, imported at its first use: that takes longer than to import torch."""

    def __getattr__(self, name: str) -> object:
        with warnings.catch_warnings():
            # arviz 0.23 announces its own future on the first import of a day.
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(importlib.import_module("arviz"), name)


arviz = _Arviz()


class SecondLook(NamedTuple):
    """Draws of q(ϑ) and of a wider proposal, x from q(x | ϑ): they see what q(ϑ) never visits.

    Attributes:
        log_weight: log p(ϑ, x, y) − log m(ϑ) q(x | ϑ), m(ϑ) the mixture of both by their counts.
        wide: Which draws are the wider proposal's.
        outside: Where q(ϑ) has next to no mass: log q(ϑ) below the 0.1 % quantile of q's own draws.
    """

    log_weight: Float[Tensor, " mc"]
    wide: Bool[Tensor, " mc"]
    outside: Bool[Tensor, " mc"]


class Diagnostics(NamedTuple):
    """Trust report of a fit.

    Attributes:
        elbo: Mean of log w, in nats; ``elbo_se`` its standard error. Where some w is not finite it
            is of q cut to the rest.
        log_evidence: log mean w, the importance-sampling estimate of log p(y).
        ess_fraction: (Σw)² / (n Σw²), between 0 and 1.
        k_hat: Pareto shape of the largest weights (PSIS); above 0.7 weighted numbers mislead.
        flagged: Whether something is wrong; ``verdict`` says what, in words.
        wide_log_evidence: log mean w of the second look, another estimate of log p(y).
        unseen: Share of the second look's weight where q(ϑ) has next to no mass.
        unseen_ess: How many effective draws carry that share.
    """

    elbo: float
    elbo_se: float
    log_evidence: float
    ess_fraction: float
    k_hat: float
    flagged: bool
    verdict: str
    wide_log_evidence: float = math.nan
    unseen: float = math.nan
    unseen_ess: float = math.nan


def diagnose(
    log_weight: Float[Tensor, " mc"],
    path_size: int,
    converged: bool,
    reason: str,
    second: SecondLook | None = None,
) -> Diagnostics:
    """Summarise the log weights of fresh draws and say in words whether to trust the fit.

    Flagged: not converged, or a weight that is not finite, or k-hat > 0.7, or ESS fraction < 0.1,
    or an evidence more than 0.5·(1 + p·N/200) above the ELBO, or too much mass beyond q(ϑ).

    Args:
        log_weight: log p(ϑ, x, y) − log q(ϑ, x), unnormalised.
        path_size: p·N, the number of unknown path values.
        converged: The fit's own verdict, with its ``reason``.
        second: Weights of draws that go beyond q(ϑ).
    """
    log_evidence, (mean, se) = log_mean(nan_is_no_mass(log_weight)), bound(log_weight)
    ess, k = ess_fraction(log_weight), k_hat(log_weight)
    faults = ([] if converged else [reason]) + weight_faults(log_weight, k, ess)
    wide, notes = (), []
    if second is not None:
        wide, notes = (log_mean(second.log_weight), *unseen(second)), second_notes(second)
        faults += unseen_faults(second)
    gap = log_evidence - mean
    faults += gap_faults(gap, second, mean, gap_limit(path_size))
    found = f"k-hat {k:.2f}, effective share {ess:.2f}, ELBO {max(gap, 0.0):.2f} nats below the "
    found += "weighted evidence" + (f", {wide[1]:.1%} of the mass beyond q(ϑ)" if wide else "")
    first = "Flagged: " + "; ".join(faults) if faults else "No fault seen: " + found
    verdict = ". ".join([first, *notes]) + "."
    return Diagnostics(mean, se, log_evidence, ess, k, bool(faults), verdict, *wide)


def bound(log_weight: Float[Tensor, " mc"]) -> tuple[float, float]:
    """ELBO of q cut to where its log weights are finite, with its standard error; NaN of too few.

    With a share s of the draws there it is their mean plus log s.
    """
    finite = log_weight[log_weight.isfinite()]
    if len(finite) < 2:
        return math.nan, math.nan
    log_share = math.log(len(finite) / len(log_weight))
    return float(finite.mean()) + log_share, float(finite.std()) / math.sqrt(len(finite))


def weight_faults(log_weight: Float[Tensor, " mc"], k: float, ess: float) -> list[str]:
    """A weight that is not finite, k-hat above 0.7, a small effective share: each in words."""
    faults = lost_faults(log_weight)
    if not k <= K_HAT_LIMIT:
        faults.append(f"k-hat is {k:.2f}, above {K_HAT_LIMIT:g}: do not trust the weighted numbers")
    if not ess >= ESS_LIMIT:
        faults.append(f"the effective share of the draws is {ess:.3f}, below {ESS_LIMIT:g}")
    return faults


def lost_faults(log_weight: Float[Tensor, " mc"]) -> list[str]:
    """How many weights are not finite, in words."""
    lost = int((~log_weight.isfinite()).sum())
    return [f"weights not finite: {lost:,} of {len(log_weight):,} draws"] if lost else []


def unseen(second: SecondLook) -> tuple[float, float]:
    """Share of the weight that lies outside q(ϑ), and the effective number of draws there."""
    weight = torch.softmax(second.log_weight, 0)
    return float(weight[second.outside].sum()), _ess(second.log_weight[second.outside])


def unseen_faults(second: SecondLook) -> list[str]:
    """More than 5 % of the mass outside q(ϑ), carried by at least UNSEEN_ESS effective draws."""
    share, ess = unseen(second)
    if not (share > UNSEEN_LIMIT and ess >= UNSEEN_ESS):
        return []
    return [
        f"{share:.0%} of the posterior mass found lies where q(ϑ) has next to none: "
        "it is too narrow or misses a mode"
    ]


def gap_faults(own: float, second: SecondLook | None, elbo: float, limit: float) -> list[str]:
    """The larger of the gaps between ELBO and evidence that are beyond ``limit``, in words.

    ``own`` is that of q's own draws. That of the wider ones must also be beyond the limit by two of
    its standard errors.
    """
    faults = []
    if not own <= limit:
        faults.append((own, f"the ELBO is {own:.2f} nats below the evidence"))
    if second is not None:
        n, gap = len(second.log_weight), log_mean(second.log_weight) - elbo
        ess = max(_ess(second.log_weight), 1.0)  # at least one, unless no draw has any weight
        if not gap - 2 * math.sqrt(max(1 / ess - 1 / n, 0.0)) <= limit:
            words = f"draws from a wider q(ϑ) put the evidence {gap:.2f} nats above the ELBO"
            faults.append((gap, words))
    return [f"{max(faults)[1]}, more than {limit:.2f}"] if faults else []


def second_notes(second: SecondLook) -> list[str]:
    """What the wider draws are too few to decide."""
    (share, ess), reach = unseen(second), _ess(second.log_weight[second.wide])
    if share > UNSEEN_LIMIT and ess < UNSEEN_ESS:
        return [
            f"There may be mass beyond q(ϑ): {share:.0%} of the weight, but on draws that "
            f"count as {ess:.1f}; look again with more draws, or from another start"
        ]
    if reach < WIDE_ESS:
        return [
            f"The second look says nothing about modes that q(ϑ) misses: its wider draws count as "
            f"{reach:.1f}, fewer than {WIDE_ESS}"
        ]
    return []


def gap_limit(path_size: int) -> float:
    """Nats by which an ELBO may lie below an evidence: 0.5·(1 + p·N/200)."""
    return 0.5 * (1 + path_size / 200)


def log_mean(log_weight: Float[Tensor, " mc"]) -> float:
    """Log of the mean weight."""
    return float(torch.logsumexp(log_weight, 0)) - math.log(len(log_weight))


def nan_is_no_mass(log_weight: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Log weights with −∞ for nan: far out the drift may overflow, and p gives no mass there."""
    return log_weight.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def _ess(log_weight: Float[Tensor, " mc"]) -> float:
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


class Marginals(NamedTuple):
    """Quantiles of each component of ϑ: of q's draws, and of the same draws importance-weighted.

    Attributes:
        names: Of the d parameters; ϑ is the logarithm of a positive one.
        levels: Of the quantiles, between 0 and 1.
        raw: (d, levels), of the draws.
        weighted: (d, levels), with PSIS weights; not to be trusted where ``k_hat`` exceeds 0.7.
        k_hat: Pareto shape of the weights.
    """

    names: tuple[str, ...]
    levels: np.ndarray
    raw: np.ndarray
    weighted: np.ndarray
    k_hat: float


def marginals(
    names: tuple[str, ...], vartheta: Float[Tensor, "mc theta"], log_weight: Float[Tensor, " mc"]
) -> Marginals:
    """Raw and weighted quantiles of each component of ϑ, at ``LEVELS``."""
    levels, weights = torch.tensor(LEVELS, dtype=vartheta.dtype), psis_weights(log_weight)
    raw, weighted = (weighted_quantiles(vartheta, levels, w).T.numpy() for w in (None, weights))
    return Marginals(tuple(names), np.array(LEVELS), raw, weighted, k_hat(log_weight))


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
