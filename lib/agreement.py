"""Do fits of one model and data from several starts agree? A check that needs no reference."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lib.diagnostics import gap_limit, lost_faults
from lib.probe import check_count
from lib.result import FitResult, check_kind, check_seed
from lib.storage import difference, identity
from lib.weights import bound

SHIFT_LIMIT = 0.25
NOISE_LIMIT = 10  # times what ELBOs may differ by: beyond it any two would agree
QUARTILES = (0.25, 0.5, 0.75)


class Agreement(NamedTuple):
    """What fits from several starts say of each other.

    Attributes:
        elbo: ELBO of each fit, in nats.
        elbo_gap: Largest minus smallest.
        shift: (d,), largest difference of a median or quartile between two fits, for each ϑ, over
            the mean of their interquartile ranges.
        best: Index of the fit with the largest ELBO.
        flagged: Whether they disagree; ``verdict`` says how, in words.
    """

    elbo: np.ndarray
    elbo_gap: float
    shift: np.ndarray
    best: int
    flagged: bool
    verdict: str


def compare(
    names: Sequence[str],
    log_weight: Float[Tensor, "fits mc"],
    vartheta: Float[Tensor, "fits mc theta"],
    path_size: int,
) -> Agreement:
    """Compare the draws of several fits.

    Flagged: ELBOs further apart than 0.5·(1 + p·N/200) and than four standard errors, or those
    errors more than ten times as large; a quartile of some ϑ that differs by more than 0.25
    interquartile ranges; or a weight that is not finite.
    """
    elbo, se = log_weight.new_tensor([bound(row) for row in log_weight]).T
    allowed, noise = gap_limit(path_size), 4 * float(se.square().sum().sqrt())
    limit = max(allowed, noise)
    gap, best = float(elbo.max() - elbo.min()), int(elbo.nan_to_num(-math.inf).argmax())
    quartiles = torch.as_tensor(np.quantile(vartheta.numpy(), QUARTILES, axis=1))
    iqr = (quartiles[2] - quartiles[0]).mean(0)
    shift = ((quartiles.amax(1) - quartiles.amin(1)) / iqr).amax(0)
    faults = [f"fit {k}: {words}" for k, row in enumerate(log_weight) for words in lost_faults(row)]
    spread = float(shift.max())
    if noise > NOISE_LIMIT * allowed:
        faults.append(
            f"their ELBOs are too noisy to compare: four standard errors are {noise:.3g} nats, "
            f"more than {NOISE_LIMIT * allowed:.3g}"
        )
    if not gap <= limit:
        faults.append(f"their ELBOs differ by {gap:.2f} nats, more than {limit:.2f}")
    if not spread <= SHIFT_LIMIT:
        faults.append(
            f"the quartiles of {names[int(shift.argmax())]} differ by {spread:.2f} interquartile "
            f"ranges, more than {SHIFT_LIMIT}"
        )
    fine = f"ELBOs within {gap:.2f} nats, quartiles of ϑ within {spread:.2f} interquartile ranges"
    verdict = (
        f"{len(elbo)} fits {'disagree' if faults else 'agree'}: {'; '.join(faults) or fine}. "
        f"Fit {best} has the largest ELBO, {float(elbo[best]):.2f}."
    )
    return Agreement(elbo.numpy(), gap, shift.numpy(), best, bool(faults), verdict)


def compare_fits(fits: Sequence[FitResult], n: int = 10_000, seed: int = 0) -> Agreement:
    """Compare fits of the same model and data from different seeds or starts, by n draws of each.

    Raises:
        ValueError: If there are fewer than two fits, they are not of one model and data, or two
            are one and the same.
    """
    _check_fits(fits)
    check_count(n, 2)
    seed = check_seed(seed)
    first = identity(fits[0].model, fits[0].observations)
    for i, fit in enumerate(fits):
        if differs := difference(first, identity(fit.model, fit.observations)):
            raise ValueError(f"fits must be of one model and data; fit {i} has another {differs}.")
    for (i, one), (j, other) in combinations(enumerate(fits), 2):
        if _same(one, other):
            raise ValueError(
                f"fits must be of different seeds or starts; fits {i} and {j} are one and the "
                "same, and say nothing of each other. Fit again with another seed."
            )
    draws = [fit.draws(n, seed + i) for i, fit in enumerate(fits)]
    log_weight, vartheta = (
        torch.stack(part) for part in zip(*((d.log_weight, d.vartheta) for d in draws), strict=True)
    )
    size = draws[0].x[0, 1:].numel()
    return compare(fits[0].model.theta_names, log_weight, vartheta, size)


def _check_fits(fits: object) -> None:
    if not isinstance(fits, Sequence) or isinstance(fits, str):
        raise TypeError(f"fits must be a list of fits; got {type(fits).__name__}.")
    for i, fit in enumerate(fits):
        check_kind(f"fit {i}", fit, FitResult)
    if len(fits) < 2:
        raise ValueError(f"fits must be two or more of one model and data; got {len(fits)}.")


def _same(one: FitResult, other: FitResult) -> bool:
    """Whether q has the same weights, to the last bit: no two seeds lead there."""
    here, there = one.q.state_dict(), other.q.state_dict()
    return here.keys() == there.keys() and all(here[k].equal(there[k]) for k in here)
