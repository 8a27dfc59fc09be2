"""The referee of any model: Metropolis-Hastings on (ϑ, x) with q as proposal, w = p(ϑ, x, y)/q."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lib.diagnostics import weight_faults
from lib.probe import check_count
from lib.result import FitResult, check_kind, check_seed
from lib.weights import arviz, ess_fraction, k_hat

R_HAT_LIMIT = 1.01
ESS_LIMIT = 400
STAY_LIMIT = 0.05
FEWEST_STEPS = 4  # arviz gives no R-hat for less: it splits each chain in two


class Held(NamedTuple):
    """Which proposal each chain holds after each step, and whether it was accepted in that step."""

    index: Int[Tensor, "chains steps"]
    accepted: Bool[Tensor, "chains steps"]


class IndependenceMHResult(NamedTuple):
    """Chains of (ϑ, x), float64; a rejected step repeats the draw before it.

    Attributes:
        samples: ϑ, unconstrained.
        log_density: log p(ϑ, x, y).
        acceptance_rate: Share of the steps that accepted their proposal.
        num_nonfinite: Draws of q whose weight was NaN or +∞, starts included.
        x: Path of the same draw as ϑ, at t_0…t_N.
        ess: Bulk effective sample size of each ϑ, all chains together.
        r_hat: Rank-normalised split R-hat of each ϑ.
        verdict: Whether to trust the chains, in words.
    """

    samples: Float[Tensor, "chains steps theta"]
    log_density: Float[Tensor, "chains steps"]
    acceptance_rate: Float[Tensor, " chains"]
    num_nonfinite: int
    x: Float[Tensor, "chains steps time state"]
    ess: Float[Tensor, " theta"]
    r_hat: Float[Tensor, " theta"]
    verdict: str


def held_proposals(
    log_weight: Float[Tensor, "chains proposals"], log_u: Float[Tensor, "chains steps"]
) -> Held:
    """Run the chains: step s accepts proposal s where log u < log w_s − log w of the one held.

    A chain starts at its first proposal of finite weight, as a rule proposal 0. A weight of zero
    (log w = −∞) is rejected; so are NaN and +∞, which are faults of a density.

    Args:
        log_weight: log p − log q of independent draws of q, one more than steps.
        log_u: Logarithms of uniforms on (0, 1).

    >>> held_proposals(torch.tensor([[0.0, 1.0, 0.4]]), torch.tensor([[-0.5, -0.5]])).index
    tensor([[1, 1]])
    """
    finite = log_weight.isfinite()
    log_weight = torch.where(finite, log_weight, -math.inf)
    index = finite.int().argmax(1)
    current = log_weight.gather(1, index[:, None])[:, 0]
    indices, accepted = [], []
    pairs = zip(log_weight.T[1:], log_u.T, strict=True)
    for step, (proposed, log_u_step) in enumerate(pairs, start=1):
        # A start further on than this step is already held when its turn comes.
        accept = (log_u_step < proposed - current) & (index < step)
        index = torch.where(accept, step, index)
        current = torch.where(accept, proposed, current)
        indices.append(index)
        accepted.append(accept)
    return Held(torch.stack(indices, 1), torch.stack(accepted, 1))


def independence_mh(
    fit: FitResult, num_steps: int, chains: int = 4, seed: int = 0
) -> IndependenceMHResult:
    """Sample the exact p(ϑ, x | y) on the Euler grid, with draws of q as proposals (Tierney 1994).

    Asymptotically exact whatever q is, as long as q reaches all of p; how fast depends on q, as a
    draw of large w is held for long. What q never or hardly ever proposes, no chain and no verdict
    can see: a q too narrow in one tail may give smooth chains with that tail missing, so read
    ``fit.diagnostics()`` too. Each chain starts at a draw of q itself, its first of finite weight,
    and nothing is dropped after it.

    Memory: x takes 8·chains·num_steps·(N + 1)·p bytes, twice that while it is made; 64 MB for 4
    chains of 10,000 steps, 200 grid steps and one state.

    Args:
        fit: A fit; its q proposes, its model judges.
        num_steps: Steps of each chain, 4 or more; a step costs one draw of q.
        chains: At least 2, because R-hat compares them.
        seed: Seed of this call's own generators; the global one is left untouched.

    Raises:
        ValueError: If a count is too small, or a chain has no draw of finite weight to start at.
    """
    check_kind("fit", fit, FitResult)
    seed = check_seed(seed)
    _check_counts(num_steps, chains)
    draws = fit.draws(chains * (num_steps + 1), seed)
    log_weight = draws.log_weight.reshape(chains, num_steps + 1)
    _check_starts(log_weight)
    generator = torch.Generator().manual_seed(seed + 1)
    log_u = torch.rand(chains, num_steps, generator=generator, dtype=torch.float64).log()
    held = held_proposals(log_weight, log_u)
    row = held.index + (num_steps + 1) * torch.arange(chains)[:, None]
    samples, rate = draws.vartheta[row], held.accepted.double().mean(1)
    ess, r_hat = convergence(samples)
    words = judge(rate, ess, r_hat, held.index, log_weight.flatten())
    density, x = draws.log_joint[row], draws.x[row]
    return IndependenceMHResult(
        samples, density, rate, count_faulty(log_weight), x, ess, r_hat, words
    )


def convergence(
    samples: Float[Tensor, "chains steps theta"],
) -> tuple[Float[Tensor, " theta"], Float[Tensor, " theta"]]:
    """Bulk ESS and rank-normalised split R-hat of each ϑ; R-hat is ∞ or NaN if no chain moves."""
    columns = [column.numpy() for column in samples.unbind(-1)]
    ess = [float(arviz.ess(column, method="bulk")) for column in columns]
    # Chains that never move have no variance of their own to divide by.
    with np.errstate(divide="ignore", invalid="ignore"):
        r_hat = [float(arviz.rhat(column)) for column in columns]
    return samples.new_tensor(ess), samples.new_tensor(r_hat)


def judge(
    rate: Float[Tensor, " chains"],
    ess: Float[Tensor, " theta"],
    r_hat: Float[Tensor, " theta"],
    index: Int[Tensor, "chains steps"],
    log_weight: Float[Tensor, " proposals"],
) -> str:
    """The verdict in words, with the numbers that it rests on.

    Not to be trusted: some R-hat > 1.01, or some ESS < 400, or one draw that held a chain for more
    than 5 % of its steps; or proposals whose weights the trust report would not trust, because
    chains that hardly ever visit a tail may look smooth without it.
    """
    num_steps, smallest, largest = index.shape[1], float(ess.min()), float(r_hat.max())
    stay = max(int(chain.bincount().max()) for chain in index)
    faults = []
    if not largest <= R_HAT_LIMIT:
        faults.append(f"the largest R-hat is {largest:.5g}, above {R_HAT_LIMIT:g}")
    if not smallest >= ESS_LIMIT:
        faults.append(f"the smallest ESS is {smallest:.0f}, below {ESS_LIMIT}")
    if not stay <= STAY_LIMIT * num_steps:
        share = f"{stay / num_steps:.1%} of its steps, more than {STAY_LIMIT:.0%}"
        faults.append(f"one draw held a chain for {share}")
    usable, nonfinite = log_weight[log_weight.isfinite()], count_faulty(log_weight)
    faults += weight_faults(usable, k_hat(usable), ess_fraction(usable))
    first = "Not to be trusted: " + "; ".join(faults) if faults else "No fault seen"
    found = f"{float(rate.mean()):.1%} of the proposals accepted, smallest ESS {smallest:.0f}, "
    found += f"largest R-hat {largest:.5g}, longest stay {stay} of {num_steps} steps"
    notes = [f"{nonfinite} draws had a weight of NaN or +∞ and were rejected"] if nonfinite else []
    unseen = "What q never proposes stays unseen: read fit.diagnostics() too"
    return ". ".join([first, found, *notes, unseen]) + "."


def count_faulty(log_weight: Float[Tensor, "..."]) -> int:
    """How many weights are NaN or +∞, which no density has; −∞ is one of 0."""
    return int((log_weight.isnan() | (log_weight == math.inf)).sum())


def _check_counts(num_steps: object, chains: object) -> None:
    check_count(num_steps, FEWEST_STEPS, "num_steps", "R-hat splits chains.")
    check_count(chains, 2, "chains", "R-hat compares chains.")


def _check_starts(log_weight: Float[Tensor, "chains proposals"]) -> None:
    for chain in (~log_weight.isfinite().any(1)).nonzero()[:, 0].tolist():
        raise ValueError(
            f"every chain must start at a draw of finite weight; got none among the "
            f"{log_weight.shape[1]} of chain {chain}. Look at fit.diagnostics(), or fit again."
        )
