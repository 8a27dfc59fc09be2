"""How far q is from the posterior, in numbers and in words: what the weights of its draws say."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lib.weights import (
    K_HAT_LIMIT,
    bound,
    effective,
    ess_fraction,
    k_hat,
    log_mean,
    nan_is_no_mass,
    psis_weights,
    weighted_quantiles,
)

ESS_LIMIT = 0.1
LEVELS = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)
UNSEEN_LIMIT = 0.05
UNSEEN_ESS = 3.0
WIDE_ESS = 20


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
    return float(weight[second.outside].sum()), effective(second.log_weight[second.outside])


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
        ess = max(effective(second.log_weight), 1.0)  # at least one, unless no draw has any weight
        if not gap - 2 * math.sqrt(max(1 / ess - 1 / n, 0.0)) <= limit:
            words = f"draws from a wider q(ϑ) put the evidence {gap:.2f} nats above the ELBO"
            faults.append((gap, words))
    return [f"{max(faults)[1]}, more than {limit:.2f}"] if faults else []


def second_notes(second: SecondLook) -> list[str]:
    """What the wider draws are too few to decide."""
    (share, ess), reach = unseen(second), effective(second.log_weight[second.wide])
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
