"""Last touch on q(ϑ): fitted to importance-weighted draws, so that it covers the posterior."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.maf import MAF, log_stretched, stretched
from lib.schedule import decay
from lib.step import Optimizer
from lib.weights import log_mean, nan_is_no_mass, tempered

LogDensity = Callable[[Tensor], Tensor]

SMALLEST_SHARE = 0.05  # effective, to which weights are tempered
BATCH = 1000
LEARNING_RATE = 1e-2
# Share of the reverse divergence in what the refit minimises.
REVERSE = 0.1
# A log weight below this says the same: no mass.
LOWEST = -1e5
NUM_TAILS = 2000
TAIL_POWER = 0.1


class Pool(NamedTuple):
    """Draws of ϑ from m, half q(ϑ) and half its tails, the latter last, with one path for each.

    ``log_weight`` is log p(ϑ, x, y) − log m(ϑ) q(x | ϑ); ``log_base`` is log q(ϑ) − log m(ϑ).
    """

    vartheta: Float[Tensor, "mc theta"]
    log_m: Float[Tensor, " mc"]
    log_weight: Float[Tensor, " mc"]
    log_base: Float[Tensor, " mc"]


def refit_theta(
    flow: MAF,
    log_p: LogDensity,
    draws: int,
    generator: torch.Generator,
    num_steps: int,
) -> Float[Tensor, "tails theta"] | None:
    r"""Fit q(ϑ) to draws weighted by the posterior; q(x | ϑ) stays.

    The bound is largest at :math:`q(\vartheta) \propto p(\vartheta|y)\,e^{-KL(\vartheta)}`, KL(ϑ)
    that of q(x | ϑ): too narrow, as KL(ϑ) grows towards the tails. This step minimises
    :math:`KL(p\|q) + 0.1\,KL(q\|p)` of the ϑ-marginals, the first by importance weights (the wake
    phase of Bornschein and Bengio 2015), the second by the bound's own log weights: it keeps q(ϑ)
    from where q(x | ϑ) has broken down. Repeated, with steps between, it walks into tails of which
    the first draws saw only the beginning.

    Args:
        flow: q(ϑ).
        log_p: log p(ϑ, y), or an estimate of it such as ``log_ratio``'s.
        draws: How many.
        generator: Of the draws.
        num_steps: Of Adam.

    Where the draws count as a share below ``SMALLEST_SHARE``, q(ϑ) goes a part of the way: towards
    :math:`q^{1-b} p^b` with the largest b, of the powers of 0.7, that makes them count as one.

    Returns:
        Noise of q(ϑ) whose ϑ are tails that matter, to train q(x | ϑ) there; or None, where fewer
        draws than that share have mass, or one has an infinite one, and nothing changes.
    """
    pool = draw_pool(flow, log_p, draws, generator)
    log_weight = tempered(pool.log_weight, truncated, SMALLEST_SHARE, pool.log_base)
    if log_weight is None:
        return None
    pool = pool._replace(log_weight=log_weight)
    fit_to(flow, pool, truncated(log_weight), generator, num_steps)
    return tails(flow, pool, generator)


@torch.no_grad()
def draw_pool(flow: MAF, log_p: LogDensity, n: int, generator: torch.Generator) -> Pool:
    """n weighted draws."""
    loc = flow.loc0
    noise = torch.randn(n, len(loc), generator=generator, dtype=loc.dtype, device=loc.device)
    noise = stretched(noise, n // 2)
    vartheta, log_q_theta = flow(noise)
    log_base = -log_stretched(noise)
    log_m = log_q_theta - log_base
    return Pool(vartheta, log_m, nan_is_no_mass(log_p(vartheta).to(log_m) - log_m), log_base)


def truncated(log_weight: Float[Tensor, " mc"]) -> Float[Tensor, " mc"]:
    """Weights of mean 1, none above sqrt(n) (Ionides 2008): a lucky draw moves q(ϑ) only so far."""
    n = len(log_weight)
    return (n * torch.softmax(log_weight, 0)).clamp(max=n**0.5)


def fit_to(
    flow: MAF,
    pool: Pool,
    weight: Float[Tensor, " mc"],
    generator: torch.Generator,
    num_steps: int,
) -> None:
    """Minimise over the shape of q(ϑ); loc and scale stay, because the path's networks see them."""
    weights, n = flow.shape(), len(pool.vartheta)
    if not weights:
        return
    log_p = (pool.log_weight + pool.log_m - log_mean(pool.log_weight)).clamp(min=LOWEST)
    optimizer = Optimizer(weights, [])
    for step in range(num_steps):
        i = torch.randint(n, (BATCH,), generator=generator, device=weight.device)
        log_q = flow.log_prob(pool.vartheta[i])
        forward = -(weight[i] * log_q).mean()
        reverse = ((log_q - pool.log_m[i]).exp() * (log_q - log_p[i])).mean()
        optimizer.set_rate(LEARNING_RATE * decay(step / num_steps))
        optimizer.step(torch.autograd.grad(forward + REVERSE * reverse, weights))


@torch.no_grad()
def tails(flow: MAF, pool: Pool, generator: torch.Generator) -> Float[Tensor, "tails theta"]:
    """Noise of draws from the tails, taken in proportion to a small power of their weight.

    Of the directions in which q(ϑ) can be left most lead out of the posterior too. The power is
    small because a weight is also small where q(x | ϑ) is still bad, which is where to train it.
    """
    far = slice(len(pool.vartheta) // 2, None)
    # The floor makes the weights equal where all of them are zero.
    weight = torch.softmax(TAIL_POWER * pool.log_weight[far].clamp(min=LOWEST), 0)
    chosen = torch.multinomial(weight, NUM_TAILS, replacement=True, generator=generator)
    return flow.inverse(pool.vartheta[far][chosen])[0]
