"""How far q is from the posterior: importance weights w = p(ϑ, x, y) / q(ϑ, x) of its draws."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

with warnings.catch_warnings():
    # arviz 0.23 announces its own future on the first import of a day.
    warnings.simplefilter("ignore", FutureWarning)
    import arviz

K_HAT_LIMIT = 0.7
ESS_LIMIT = 0.1


class Diagnostics(NamedTuple):
    """Trust report of a fit.

    Attributes:
        elbo: Mean of log w, in nats; ``elbo_se`` its standard error.
        log_evidence: log mean w, the importance-sampling estimate of log p(y).
        ess_fraction: (Σw)² / (n Σw²), between 0 and 1.
        k_hat: Pareto shape of the largest weights (PSIS); above 0.7 weighted numbers mislead.
        flagged: Whether something is wrong; ``verdict`` says what, in words.
    """

    elbo: float
    elbo_se: float
    log_evidence: float
    ess_fraction: float
    k_hat: float
    flagged: bool
    verdict: str


def diagnose(
    log_weight: Float[Tensor, " mc"], path_size: int, converged: bool, reason: str
) -> Diagnostics:
    """Summarise the log weights of fresh draws and say in words whether to trust the fit.

    Flagged: k-hat > 0.7, or ESS fraction < 0.1, or log evidence − ELBO > 0.5·(1 + p·N/200), or not
    converged, or a weight that is not finite.

    Args:
        log_weight: log p(ϑ, x, y) − log q(ϑ, x), unnormalised.
        path_size: p·N, the number of unknown path values.
        converged: The fit's own verdict, with its ``reason``.
    """
    n = len(log_weight)
    log_evidence = float(torch.logsumexp(log_weight, 0)) - math.log(n)
    mean, se = float(log_weight.mean()), float(log_weight.std()) / math.sqrt(n)
    ess, k = ess_fraction(log_weight), k_hat(log_weight)
    faults = [] if converged else [reason]
    if not math.isfinite(mean):
        faults.append("some draws have a weight that is not finite")
    if not k <= K_HAT_LIMIT:
        faults.append(f"k-hat is {k:.2f}, above 0.7: do not trust the weighted numbers")
    if not ess >= ESS_LIMIT:
        faults.append(f"the effective share of the draws is {ess:.3f}, below 0.1")
    gap, limit = log_evidence - mean, 0.5 * (1 + path_size / 200)
    if not gap <= limit:
        faults.append(f"the ELBO is {gap:.2f} nats below the evidence, more than {limit:.2f}")
    verdict = (
        "Flagged: " + "; ".join(faults) + "."
        if faults
        else (
            f"No fault seen: k-hat {k:.2f}, effective share {ess:.2f}, "
            f"ELBO {max(gap, 0.0):.2f} nats below the weighted evidence."
        )
    )
    return Diagnostics(mean, se, log_evidence, ess, k, bool(faults), verdict)


def ess_fraction(log_weight: Float[Tensor, " mc"]) -> float:
    """Kish's effective sample size over n: (Σw)² / (n Σw²)."""
    log_ess = 2 * torch.logsumexp(log_weight, 0) - torch.logsumexp(2 * log_weight, 0)
    return math.exp(float(log_ess) - math.log(len(log_weight)))


def k_hat(log_weight: Float[Tensor, " mc"]) -> float:
    """Pareto shape of the largest weights (Vehtari et al. 2024); infinite if one is not finite."""
    values = log_weight.double().cpu().numpy()
    if not np.isfinite(values).all():
        return math.inf
    # The Pareto fit tries shapes at which exp overflows; their likelihood is then 0, as it should.
    with np.errstate(over="ignore"):
        return float(arviz.psislw(values)[1])


def normalised_weights(log_weight: Float[Tensor, " mc"]) -> Float[Tensor, " mc"]:
    """Self-normalised importance weights, summing to 1."""
    return torch.softmax(log_weight, 0)


def weighted_quantile(
    values: Float[Tensor, " mc"],
    levels: Float[Tensor, " levels"],
    weights: Float[Tensor, " mc"] | None = None,
) -> Float[Tensor, " levels"]:
    """Quantiles of weighted draws, interpolated between the mid-points of the weights' steps."""
    order = values.argsort()
    values = values[order]
    w = torch.ones_like(values) / len(values) if weights is None else weights[order]
    middle = w.cumsum(0) - 0.5 * w
    out = np.interp(levels.numpy(), middle.numpy(), values.numpy())
    return torch.as_tensor(out, dtype=values.dtype)
