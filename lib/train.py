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
from lib.maf import stretched
from lib.muon import Muon
from lib.network import Conditioner, ThetaTaps
from lib.posterior import Noise, VariationalPosterior
from lib.refit import refit_theta
from lib.result import FitResult, History
from lib.schedule import WARM_UP_SHARE, judge, refit_steps, schedule, temper
from lib.ssm import StateSpaceModel
from lib.start import find_start

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
    tails: Tensor | None = None  # noise, once q(ϑ) is refitted

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
        refits = refit_steps(config.refits, config.num_steps)
        with tqdm(total=config.num_steps, disable=not progress, desc="fit", unit="step") as bar:
            for i in range(config.num_steps):
                share = i / config.num_steps
                if i in refits:
                    self.refit(generator)
                rate = config.learning_rate * schedule(share)
                set_rates(optimizers, rate, refitted=self.tails is not None)
                # Far from the posterior the score is large and its path is long: warm up without.
                step = path if config.gradient == "path" and share >= WARM_UP_SHARE else total
                noise = self.draw_noise(config.num_samples, generator)
                alpha = trace.new_tensor(temper(config.tempering, share))
                reported, skipped = step(noise, alpha)
                # A skipped step leaves NaN in the trace, where ``judge`` finds it.
                trace[i] = torch.where(skipped > 0, torch.nan, reported)
                streak = (streak + 1) * skipped
                done, stopped = i + 1, ""
                if done % config.log_every == 0 or done == config.num_steps:
                    bar.update(done - bar.n)
                    recent = trace[max(0, done - config.log_every) : done].mean()
                    bar.set_postfix_str(f"ELBO {float(recent):.2f}")
                    if streak >= MAX_SKIPPED:
                        stopped = self.broken_term(noise, done)
                if done in refits and done == config.num_steps and not stopped:
                    self.refit(generator)
                seconds[i] = time.perf_counter() - clock
                if stopped:
                    break
        elbos = trace[:done].cpu().numpy()
        return History(np.arange(1, done + 1), elbos, seconds[:done]), stopped

    def refit(self, generator: torch.Generator) -> None:
        """Refit q(ϑ); where that is refused, what an earlier one found stays."""
        found = refit_theta(self.model, self.q, self.grid, generator)
        self.tails = self.tails if found is None else found

    def draw_noise(self, inner: int, generator: torch.Generator) -> Noise:
        """Noise of one step: ``inner`` draws of q, and ``wide`` whose ϑ lie in its tails."""
        noise = self.q.draw_noise(inner + self.wide, generator)
        if self.tails is None:
            return noise._replace(theta=stretched(noise.theta, self.wide))
        shape, device = (self.wide,), self.tails.device
        chosen = torch.randint(len(self.tails), shape, generator=generator, device=device)
        return noise._replace(theta=torch.cat([noise.theta[:inner], self.tails[chosen]]))

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
    """Adam for every weight; or Muon for the matrices of the path's networks, Adam for the rest.

    The weights of q(ϑ) are the first group of the first optimiser.
    """
    of_theta = list(q.theta_flow.parameters())
    networks = [m for m in q.modules() if isinstance(m, Conditioner | ThetaTaps)]
    matrices = [w for m in networks for w in m.matrices()] if kind == "muon" else []
    apart = {id(w) for w in of_theta + matrices}
    others = [w for w in q.parameters() if w.requires_grad and id(w) not in apart]
    groups = [{"params": of_theta}, {"params": others}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(groups, lr=0.0, betas=BETAS, fused=True)
    ]
    if matrices:
        optimizers.append(Muon(matrices))
    return optimizers


def set_rates(optimizers: list[torch.optim.Optimizer], rate: float, refitted: bool) -> None:
    """One learning rate for all; once q(ϑ) is refitted its own is 0, or the bound narrows it."""
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] = rate
    if refitted:
        optimizers[0].param_groups[0]["lr"] = 0.0


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
