"""Schedules of a training run, as functions of the share of it that is done, and its verdict."""

import numpy as np

WARM_UP_SHARE = 0.05
TEMPERING_SHARE = 0.5
REFIT_EVERY = 0.2
NOISE_LIMIT = 100  # times the tolerance; short fits of some nats a step stay far below it


def schedule(share: float) -> float:
    """Linear warm-up, then cosine decay to 0, as a share of the peak learning rate."""
    if share < WARM_UP_SHARE:
        return (share + 1e-3) / (WARM_UP_SHARE + 1e-3)
    return decay((share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))


def decay(share: float) -> float:
    """Cosine decay from 1 to 0."""
    return 0.5 * (1 + np.cos(np.pi * share))


def temper(initial: float, share: float) -> float:
    """α at a share of the run: linear from ``initial`` to exactly 1 at half of it."""
    return max(1.0, initial + (1.0 - initial) * share / TEMPERING_SHARE)


def refit_steps(rounds: int, num_steps: int) -> list[int]:
    """Steps after which q(ϑ) is refitted: the end of the run, and every fifth of it before."""
    shares = [1 - REFIT_EVERY * j for j in range(rounds)]
    return [round(num_steps * share) for share in shares if share > 0]


def judge(
    trace: np.ndarray, tolerance: float, before: np.ndarray | None = None
) -> tuple[bool, str]:
    """Converged: in the last fifth no step was skipped and the ELBO did not move.

    A run that went on from another must not end lower than that one did (its trace: ``before``).

    Its fitted straight line moves by at most ``tolerance`` nats, or by less than two of its
    standard errors. Standard errors alone would never pass a good fit: as the learning rate falls
    to 0 the noise falls with it, and a rise of a few hundredths of a nat is still significant. A
    standard error of more than a hundred times ``tolerance`` would pass anything, so it does not.
    """
    last = trace[-max(10, len(trace) // 5) :]
    skipped = int((~np.isfinite(last)).sum())
    if skipped:
        return False, f"not converged: {skipped} steps of the last fifth were skipped"
    if len(last) < 10:
        return False, f"not converged: {len(trace)} steps are too few to judge"
    x = np.arange(len(last)) - (len(last) - 1) / 2
    slope = (x @ last) / (x @ x)
    residual = last - last.mean() - slope * x
    error = np.sqrt(residual @ residual / (len(last) - 2) / (x @ x))
    if abs(slope) * len(last) > tolerance and abs(slope) > 2 * error:
        return False, (
            f"not converged: the ELBO still moves by {slope * len(last):+.3f} nats "
            f"over the last fifth, more than {tolerance:.2f}"
        )
    if error * len(last) > NOISE_LIMIT * tolerance:
        return False, (
            f"not converged: the ELBO is too noisy to tell, it moves by {slope * len(last):+.3g} "
            f"nats over the last fifth, give or take {error * len(last):.3g}"
        )
    known = np.empty(0) if before is None else before[np.isfinite(before)]
    lost = known[-len(last) :].mean() - last.mean() if known.size else 0.0
    if lost > tolerance:
        return False, (
            f"not converged: the ELBO is {lost:.2f} nats below that of the fit that it went on "
            "from; take more steps or a smaller learning_rate"
        )
    noise = "" if abs(slope) * len(last) <= tolerance else ", within two standard errors"
    return True, (
        f"converged: the ELBO moves by {slope * len(last):+.3f} nats over the last fifth of the "
        f"run{noise}"
    )
