"""Stochastic optimisation of the ELBO (algorithm 1); all that is known of devices is here."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lib.config import DTYPES, FitConfig
from lib.data import Grid, Observations
from lib.diagnostics import gap_limit
from lib.elbo import Elbo, elbo
from lib.muon import Muon
from lib.network import Conditioner, ThetaTaps
from lib.posterior import Noise, VariationalPosterior
from lib.result import FitResult, History
from lib.ssm import StateSpaceModel
from lib.start import find_start

WARM_UP_SHARE = 0.05
TEMPERING_SHARE = 0.5
BETAS = (0.9, 0.99)
CLIP_NORM = 10.0
MAX_SKIPPED = 50


def fit(
    model: StateSpaceModel,
    observations: Observations,
    config: FitConfig | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> FitResult:
    """Fit q(ϑ, x) to the posterior of a state-space model.

    Args:
        model: The model.
        observations: The data.
        config: Defaults to ``FitConfig()``.
        seed: Of the start, the weights and the noise. The global generator is left untouched.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"`` or ``"cuda"``.
        progress: Show a bar with step, ELBO and time left.

    Raises:
        ValueError: Data and model disagree in size, or the device is not there.
    """
    config = config or FitConfig()
    device = choose_device(device)
    if observations.y.shape[1] != model.num_observed:
        raise ValueError(
            f"F has {model.num_observed} columns, so the data need as many observed columns; "
            f"got {observations.y.shape[1]}."
        )
    with _threads(config.threads):
        clock = time.perf_counter()
        grid = observations.grid()
        start = find_start(model, grid, seed)
        q = VariationalPosterior(model, grid, config.family, start, seed)
        dtype = DTYPES[config.dtype]
        grid, wide = observations.grid(dtype, device), config.wide_samples
        run = _Run(model.to(dtype, device), q.to(device, dtype), grid, wide)
        history, stopped = run.train(config, seed, progress, clock)
    # A fifth of the gap that the trust report allows.
    tolerance = 0.2 * gap_limit(model.num_states * observations.num_steps)
    converged, reason = (False, stopped) if stopped else judge(history.elbo, tolerance)
    q.requires_grad_(False)
    return FitResult(
        model, observations, q.cpu(), config.family, history, converged, reason, seed, device
    )


def choose_device(device: str) -> str:
    """Resolve ``"auto"``; refuse what is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}.")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("device 'cuda' was asked for, but no CUDA GPU is available. Use 'cpu'.")
    return "cuda" if available and device != "cpu" else "cpu"


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Train with this many threads and without denormals, then put the process back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


@dataclass
class _Run:
    """One optimisation; the weights of q change in place."""

    model: StateSpaceModel
    q: VariationalPosterior
    grid: Grid
    wide: int

    def train(
        self, config: FitConfig, seed: int, progress: bool, clock: float
    ) -> tuple[History, str]:
        """Take ``num_steps`` steps; returns the history and, if it had to stop, why."""
        optimizers = make_optimizers(self.q, config.optimizer)
        total, path = (make_step(partial(self.loss, path), optimizers) for path in (False, True))
        device = self.grid.y.device
        generator = torch.Generator(device).manual_seed(seed)
        trace = torch.full((config.num_steps,), torch.nan, dtype=torch.float64, device=device)
        seconds, streak = np.zeros(config.num_steps), torch.zeros((), device=device)
        with tqdm(total=config.num_steps, disable=not progress, desc="fit", unit="step") as bar:
            for i in range(config.num_steps):
                share = i / config.num_steps
                for group in (group for each in optimizers for group in each.param_groups):
                    group["lr"] = config.learning_rate * schedule(share)
                # Far from the posterior the score is large and its path is long: warm up without.
                step = path if config.gradient == "path" and share >= WARM_UP_SHARE else total
                noise = self.q.draw_noise(config.num_samples + self.wide, generator)
                alpha = trace.new_tensor(temper(config.tempering, share))
                reported, skipped = step(noise, alpha)
                # A skipped step leaves NaN in the trace, where ``judge`` finds it.
                trace[i] = torch.where(skipped > 0, torch.nan, reported)
                streak = (streak + 1) * skipped
                seconds[i] = time.perf_counter() - clock
                done, stopped = i + 1, ""
                if done % config.log_every == 0 or done == config.num_steps:
                    bar.update(done - bar.n)
                    recent = trace[max(0, done - config.log_every) : done].mean()
                    bar.set_postfix_str(f"ELBO {float(recent):.2f}")
                    if streak >= MAX_SKIPPED:
                        stopped = self.broken_term(noise, done)
                        break
        elbos = trace[:done].cpu().numpy()
        return History(np.arange(1, done + 1), elbos, seconds[:done]), stopped

    def loss(self, path_gradient: bool, noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the tempered ELBO, to be minimised, and the ELBO with α = 1, to be reported."""
        bound = elbo(self.model, self.q, self.grid, noise, alpha, path_gradient, self.wide)
        reported = bound.value + (alpha - 1) * bound.log_q_theta.mean()
        return -bound.value - bound.conditional, reported.detach()

    @torch.no_grad()
    def broken_term(self, noise: Noise, step: int) -> str:
        """Which term of the ELBO is not finite, as a sentence."""
        bound: Elbo = elbo(self.model, self.q, self.grid, noise, wide=self.wide)
        bad = [name for name, term in bound._asdict().items() if not term.isfinite().all()]
        # Both sum up other terms, the second at ϑ further out: named only when they stand alone.
        bad = [n for n in bad if n not in ("value", "conditional")] or bad or ["the gradient alone"]
        return (
            f"stopped at step {step}: {MAX_SKIPPED} steps in a row had a non-finite gradient; "
            f"not finite: {', '.join(bad)}"
        )


def make_optimizers(q: VariationalPosterior, kind: str) -> list[torch.optim.Optimizer]:
    """Adam for every weight; or Muon for the matrices of the path's networks, Adam for the rest."""
    learned = [w for w in q.parameters() if w.requires_grad]
    networks = [m for m in q.modules() if isinstance(m, Conditioner | ThetaTaps)]
    matrices = [w for m in networks for w in m.matrices()] if kind == "muon" else []
    others = [w for w in learned if all(w is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(others, lr=0.0, betas=BETAS, fused=True)
    ]
    if matrices:
        optimizers.append(Muon(matrices))
    return optimizers


def make_step(
    loss: Callable[[Noise, Tensor], tuple[Tensor, Tensor]],
    optimizers: list[torch.optim.Optimizer],
) -> Callable[[Noise, Tensor], tuple[Tensor, Tensor]]:
    """One step as a function of (noise, α): gradient, clipping, update; no sync with the device.

    Returns the reported ELBO and 1.0 if the gradient was not finite, when nothing is updated.
    """

    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights = [w for group in groups for w in group["params"]]

    def step(noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Take the step; see above."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        value, reported = loss(noise, alpha)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        bad = (~norm.isfinite()).float()
        for optimizer in optimizers:
            # The hook that gradient scalers use: the fused update does nothing where this is 1.
            optimizer.found_inf = bad
            optimizer.step()
        return reported, bad

    return step


def schedule(share: float) -> float:
    """Linear warm-up, then cosine decay to 0, as a share of the peak learning rate."""
    if share < WARM_UP_SHARE:
        return (share + 1e-3) / (WARM_UP_SHARE + 1e-3)
    return 0.5 * (1 + np.cos(np.pi * (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)))


def temper(initial: float, share: float) -> float:
    """α at a share of the run: linear from ``initial`` to exactly 1 at half of it."""
    return max(1.0, initial + (1.0 - initial) * share / TEMPERING_SHARE)


def judge(trace: np.ndarray, tolerance: float) -> tuple[bool, str]:
    """Converged: in the last fifth no step was skipped and the ELBO did not move.

    Its fitted straight line moves by at most ``tolerance`` nats, or by less than two of its
    standard errors. Standard errors alone would never pass a good fit: as the learning rate falls
    to 0 the noise falls with it, and a rise of a few hundredths of a nat is still significant.
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
    return True, (
        f"converged: the ELBO moves by {slope * len(last):+.3f} nats over the last fifth of the run"
    )
