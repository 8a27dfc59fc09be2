"""Random-walk Metropolis-Hastings, many chains at once (the paper's reference sampler)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]
WINDOW_ENDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the warm-up; the covariance changes there


class MHState(NamedTuple):
    """Where each chain is, and log p there up to a constant."""

    position: Float[Tensor, "chains theta"]
    log_density: Float[Tensor, " chains"]


class MHInfo(NamedTuple):
    """What one step did."""

    accepted: Bool[Tensor, " chains"]
    acceptance_probability: Float[Tensor, " chains"]
    nonfinite: Bool[Tensor, " chains"]  # log p of the proposal was NaN or +inf


class MHResult(NamedTuple):
    """The chains after warm-up. num_nonfinite counts proposals at NaN or +inf, warm-up included."""

    samples: Float[Tensor, "chains steps theta"]
    log_density: Float[Tensor, "chains steps"]
    acceptance_rate: Float[Tensor, " chains"]
    num_nonfinite: int


def mh_step(
    state: MHState,
    noise: Float[Tensor, "chains theta"],
    log_u: Float[Tensor, " chains"],
    tril: Float[Tensor, "theta theta"],
    log_density: LogDensity,
) -> tuple[MHState, MHInfo]:
    """One step: propose ϑ' = ϑ + L·noise, accept where log u < log p(ϑ') − log p(ϑ).

    A proposal with log p = −inf has density 0 and is rejected. NaN and +inf are faults of the
    density: rejected too, and reported.

    Args:
        state: Current positions, with finite log densities.
        noise: Standard normal.
        log_u: Logarithms of uniforms on (0, 1).
        tril: L, with L·Lᵀ the proposal covariance; the same for all chains.
        log_density: Maps (chains, theta) to (chains,).
    """
    position = state.position + noise @ tril.mT
    value = log_density(position)
    nonfinite = value.isnan() | (value == math.inf)
    value = torch.where(nonfinite, -math.inf, value)
    log_ratio = value - state.log_density
    accepted = log_u < log_ratio
    new = MHState(
        torch.where(accepted[:, None], position, state.position),
        torch.where(accepted, value, state.log_density),
    )
    return new, MHInfo(accepted, log_ratio.clamp(max=0.0).exp(), nonfinite)


class Adaptation:
    r"""Proposal tuned during warm-up: L = scale · chol(Σ̂), one for all chains.

    The log scale follows Robbins and Monro: it rises by (mean acceptance probability − target)/√k,
    k steps after the last window ended; the target is 0.44 for one parameter and falls to 0.234
    (0.234 + 0.206/d). Σ̂ starts as the identity. At the ends of five windows (1/16, 1/8, 1/4, 1/2
    and 3/4 of the warm-up) it becomes the covariance of all chains' positions in that window,
    shrunk a little to its own diagonal, and the scale starts again at 2.38/√d.
    """

    def __init__(self, dim: int, num_warmup: int) -> None:
        self.root = torch.eye(dim, dtype=torch.float64)
        self.target = 0.234 + 0.206 / dim
        self.ends = {round(part * num_warmup) for part in WINDOW_ENDS}
        self.log_scale, self.start = math.log(2.38 / math.sqrt(dim)), 0
        self.window: list[Tensor] = []

    @property
    def tril(self) -> Float[Tensor, "theta theta"]:
        """Cholesky factor L of the proposal covariance."""
        return math.exp(self.log_scale) * self.root

    def update(self, step: int, state: MHState, info: MHInfo) -> None:
        """Learn from warm-up step 1, 2, …"""
        excess = float(info.acceptance_probability.mean()) - self.target
        self.log_scale += excess / math.sqrt(step - self.start)
        self.window.append(state.position)
        if step in self.ends:
            self._close_window(step)

    def _close_window(self, step: int) -> None:
        points = torch.cat(self.window)
        count, dim = points.shape
        if count <= dim:
            return
        self.window = []
        covariance = torch.cov(points.T).reshape(dim, dim)
        share = count / (count + 5.0 * dim)
        covariance = share * covariance + (1 - share) * covariance.diagonal().diag()
        root, fault = torch.linalg.cholesky_ex(covariance)
        # A window in which some parameter never moved says nothing about its scale.
        if fault == 0 and root.isfinite().all():
            self.root, self.start = root, step
            self.log_scale = math.log(2.38 / math.sqrt(dim))


@torch.no_grad()
def random_walk_mh(
    log_density: LogDensity,
    initial: Float[Tensor, "..."],
    num_steps: int,
    num_warmup: int,
    seed: int,
    proposal_sd: float | int | None = None,
) -> MHResult:
    """Sample p(ϑ) by random-walk Metropolis-Hastings in float64.

    The proposal is tuned in the warm-up only (:class:`Adaptation`), then fixed, so that the kept
    draws come from one Markov chain with the right stationary law. Judge them by acceptance rate,
    split R-hat and ESS (arviz). The global random generator is left untouched.

    Args:
        log_density: log p up to a constant, (chains, theta) → (chains,).
        initial: Starting points, (chains, theta); spread them more widely than the posterior.
        num_steps: Steps kept, after warm-up.
        num_warmup: Steps for tuning and forgetting the start; a few hundred at least.
        seed: Seed of this call's own generator.
        proposal_sd: Fixes an isotropic proposal with this s.d. and switches the tuning off.

    Raises:
        ValueError: If sizes or counts are wrong, or a chain starts where log p is not finite.

    >>> normal = lambda theta: -0.5 * theta.square().sum(-1)
    >>> random_walk_mh(normal, torch.zeros(4, 1), 100, 100, seed=0).samples.shape
    torch.Size([4, 100, 1])
    """
    _check_arguments(initial, num_steps, num_warmup, proposal_sd)
    initial = initial.double()
    state = MHState(initial, _initial_density(log_density, initial))
    generator = torch.Generator().manual_seed(seed)
    adaptation = Adaptation(initial.shape[1], num_warmup) if proposal_sd is None else None
    tril = torch.eye(initial.shape[1], dtype=torch.float64) * (proposal_sd or 1.0)
    states, accepted, num_nonfinite = [], [], torch.zeros((), dtype=torch.int64)
    for step in range(1, num_warmup + num_steps + 1):
        noise = torch.randn(initial.shape, generator=generator, dtype=torch.float64)
        log_u = torch.rand(len(initial), generator=generator, dtype=torch.float64).log()
        tril = tril if adaptation is None else adaptation.tril
        state, info = mh_step(state, noise, log_u, tril, log_density)
        num_nonfinite += info.nonfinite.sum()
        if step > num_warmup:
            states.append(state)
            accepted.append(info.accepted)
        elif adaptation is not None:
            adaptation.update(step, state, info)
    samples, values = (torch.stack(part, dim=1) for part in zip(*states, strict=True))
    rate = torch.stack(accepted, dim=1).double().mean(1)
    return MHResult(samples, values, rate, int(num_nonfinite))


def _check_arguments(
    initial: Tensor, num_steps: int, num_warmup: int, proposal_sd: float | int | None
) -> None:
    if initial.ndim != 2 or 0 in initial.shape:
        raise ValueError(f"initial must be (chains, theta); got shape {tuple(initial.shape)}.")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1; got {num_steps}.")
    if num_warmup < 0:
        raise ValueError(f"num_warmup must not be negative; got {num_warmup}.")
    if proposal_sd is not None and not 0 < proposal_sd < math.inf:
        raise ValueError(
            f"proposal_sd must be positive and finite; got {proposal_sd}. None tunes the proposal."
        )


def _initial_density(log_density: LogDensity, initial: Tensor) -> Float[Tensor, " chains"]:
    value = log_density(initial)
    if value.shape != initial.shape[:1]:
        raise ValueError(
            f"log_density must map (chains, theta) to (chains,) = ({len(initial)},); got shape "
            f"{tuple(value.shape)}."
        )
    for chain in (~value.isfinite()).nonzero()[:, 0].tolist():
        raise ValueError(
            f"every chain must start where log_density is finite; got {value[chain]:g} for chain "
            f"{chain} at {initial[chain].tolist()}. Draw its start nearer to the data."
        )
    return value.double()
