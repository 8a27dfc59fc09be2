"""Stochastic optimisation of the ELBO (algorithm 1): the door of a fit, and its run."""

import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lib.config import DTYPES, FitConfig
from lib.cuda_graph import captured
from lib.data import Grid, Observations
from lib.diagnostics import gap_limit
from lib.elbo import Elbo, elbo
from lib.family import Family
from lib.linear_start import linear_start
from lib.machine import check_mode, choose_device, settled
from lib.posterior import Noise, VariationalPosterior
from lib.result import FitResult, History, check_kind, check_seed
from lib.schedule import WARM_UP_SHARE, judge, refit_steps, schedule, temper
from lib.ssm import StateSpaceModel
from lib.start import find_start
from lib.step import Step, make_optimizer, make_step
from lib.storage import check_columns, difference, identity, rebuild
from lib.supply import ThetaSupply

MAX_SKIPPED = 50
LONG_GRID = 100_000  # steps of dt
GRID_STEP_BYTES = 75_000  # of memory, measured at the default options, one state
SEED_STRIDE = 1_000_003
NOTHING_TO_TRAIN = True, "converged: q(x | ϑ) has no weights to train"


def fit(
    model: StateSpaceModel,
    observations: Observations,
    config: FitConfig | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
    resume: FitResult | None = None,
) -> FitResult:
    """Fit q(ϑ, x) to the posterior of a state-space model.

    Args:
        model: The model.
        observations: The data.
        config: Defaults to ``FitConfig()``, with the family of ``resume``.
        seed: Of the start, the weights and the noise. The global generator is left untouched.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"`` or ``"cuda"``.
        progress: Show a bar with step, ELBO and time left.
        resume: A fit of this model and data to go on from, for ``config.num_steps`` further steps
            with the schedule of a fresh run; it is left as it is. The history goes on from its
            own, and ``converged`` is judged on the further steps alone.

    Raises:
        ValueError: Data and model disagree in size, the device is not there or cannot run
            ``config.mode``, or ``resume`` is of another model, other data or another family.
    """
    device = choose_device(device)
    _check_kinds(model, observations, config, resume)
    check_mode("eager" if config is None else config.mode, device)
    seed = check_seed(seed)
    check_columns(model, observations)
    _warn_of_length(observations)
    if resume is not None:
        config = config or FitConfig(family=resume.family)
        _check_resume(resume, model, observations, config)
    config = config or FitConfig()
    bar = tqdm(total=config.num_steps, disable=not progress, desc="fit: start", unit="step")
    with settled(config.threads), bar:
        clock = time.perf_counter()
        q = _start(model, observations, config.family, seed, resume)
        dtype, first = DTYPES[config.dtype], 0 if resume is None else len(resume.history.step)
        grid = observations.grid(dtype, device)
        run = _Run(model.to(dtype, device), q.to(device, dtype), grid, config, bar, first)
        history, stopped = run.train(seed, clock)
    # A fifth of the gap that the trust report allows.
    tolerance = 0.2 * gap_limit(model.num_states * observations.num_steps)
    before = None if resume is None else resume.history.elbo
    verdict = (False, stopped) if stopped else judge(history.elbo, tolerance, before)
    if not run.trains and np.isfinite(history.elbo).all():
        verdict = NOTHING_TO_TRAIN
    history = history if resume is None else resume.history.then(history)
    q.cpu().requires_grad_(False).zero_grad()
    return FitResult(model, observations, q, config.family, history, *verdict, seed, device)


def _check_kinds(model: object, observations: object, config: object, resume: object) -> None:
    check_kind("model", model, StateSpaceModel)
    check_kind("observations", observations, Observations, "Read a file with lib.read_csv.")
    if config is not None:
        check_kind("config", config, FitConfig, "Write lib.FitConfig(num_steps=500), say.")
    if resume is not None:
        check_kind("resume", resume, FitResult, "Read one with load_fit.")


def _warn_of_length(observations: Observations) -> None:
    """A grid for which a fit takes a large machine and hours is more often a slip of the unit."""
    num_steps = observations.num_steps
    if num_steps > LONG_GRID:
        warnings.warn(
            f"the grid has {num_steps} steps of dt = {observations.dt:g} from t0 = "
            f"{observations.t0:g}: a fit takes about {num_steps * GRID_STEP_BYTES / 1e9:.0f} GB "
            "and many hours. Is dt too small, or t0 long before the first time?",
            stacklevel=3,
        )


def _check_resume(
    resume: FitResult, model: StateSpaceModel, observations: Observations, config: FitConfig
) -> None:
    """The fit to go on from is of this model, these data and this family."""
    own = identity(resume.model, resume.observations)
    if differs := difference(identity(model, observations), own):
        raise ValueError(
            f"resume must be a fit of this model and of these observations; it has another "
            f"{differs}. Without resume, a new fit starts."
        )
    if config.family != resume.family:
        have, family = asdict(resume.family), asdict(config.family)
        other = [
            f"{k} {family[k]!r}, the fit has {have[k]!r}" for k in have if have[k] != family[k]
        ]
        raise ValueError(
            f"config.family must be that of the fit to resume, or its weights have no place; got "
            f"{'; '.join(other)}. Leave config out, or give FitConfig(family=fit.family)."
        )


def _start(
    model: StateSpaceModel,
    observations: Observations,
    family: Family,
    seed: int,
    resume: FitResult | None,
) -> VariationalPosterior:
    """Where q starts: near the data, or as a copy of a fit's own."""
    if resume is not None:
        return rebuild(model, observations, family, resume.q.state_dict())
    grid = observations.grid()
    start = find_start(model, grid, seed)
    if family.base:
        start = linear_start(model, grid, start, seed)
    return VariationalPosterior(model, grid, family, start, seed)


@dataclass
class _Run:
    """One optimisation; the weights of q change in place."""

    model: StateSpaceModel
    q: VariationalPosterior
    grid: Grid
    config: FitConfig
    bar: tqdm
    first: int  # steps that q has behind it

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.q, self.config.optimizer)
        self.path_gradient: bool | None = None
        self.trains = bool(self.optimizer.weights)
        # A family of which nothing is left to train takes one step, to look at its ELBO.
        self.num_steps = self.config.num_steps if self.trains else 1

    def train(self, seed: int, clock: float) -> tuple[History, str]:
        """Take ``num_steps`` steps; returns the history and, if it had to stop, why."""
        num_steps, device = self.num_steps, self.grid.y.device
        # A run that goes on with the seed it began with must not see the same noise again.
        generator = torch.Generator(device).manual_seed(seed + SEED_STRIDE * self.first)
        trace = torch.full((num_steps,), torch.nan, dtype=torch.float64, device=device)
        seconds, streak = np.zeros(num_steps), torch.zeros((), device=device)
        refits = refit_steps(self.config.refits, num_steps)
        supply = ThetaSupply(self.model, self.q, self.grid, self.config, generator)
        if self.q.family.base and not self.first:
            supply.start()
        for _ in range(0 if self.trains else self.config.refits - 1):
            self.refit(supply, last=False)
        self.bar.reset(num_steps)  # so that the time left is that of the steps
        self.bar.set_description("fit")
        for i in range(num_steps):
            if i in refits:
                self.refit(supply, last=False)
            noise = supply.noise()
            reported, skipped = self.take_step(i / num_steps, noise)
            # A skipped step leaves NaN in the trace, where ``judge`` finds it.
            trace[i] = torch.where(skipped > 0, torch.nan, reported)
            streak = (streak + 1) * skipped
            done, stopped = i + 1, ""
            if done % self.config.log_every == 0 or done == num_steps:
                self.show(done, trace)
                if streak >= MAX_SKIPPED:
                    stopped = self.broken_term(noise, done)
            if done in refits and done == num_steps and not stopped:
                self.refit(supply, last=True)
            seconds[i] = time.perf_counter() - clock
            if stopped:
                break
        return History(np.arange(1, done + 1), trace[:done].cpu().numpy(), seconds[:done]), stopped

    def take_step(self, share: float, noise: Noise) -> tuple[Tensor, Tensor]:
        """The step after a share of the run: its ELBO, and 1.0 if it had to be skipped."""
        config = self.config
        self.optimizer.set_rate(config.learning_rate * schedule(share))
        # Far from the posterior the score is large and its path is long: warm up without.
        path_gradient = self.trains and config.gradient == "path" and share >= WARM_UP_SHARE
        if self.path_gradient != path_gradient:
            self.path_gradient = path_gradient
            self.step = self.new_step()
        alpha = temper(config.tempering, share)
        # Not torch.tensor, which would wait for a GPU.
        return self.step(
            noise, torch.full((), alpha, dtype=torch.float64, device=noise.path.device)
        )

    def new_step(self) -> Step:
        """The step of this kind; that of the last one, with the memory of its graph, is let go."""
        step = make_step(partial(self.loss, self.path_gradient), self.optimizer)
        graph = self.config.mode == "cuda_graph"
        return captured(step, self.optimizer.state()) if graph else step

    def refit(self, supply: ThetaSupply, last: bool) -> None:
        """Refit q(ϑ), and say so: it takes a while."""
        self.bar.set_description("fit: refit")
        supply.refit(last)
        self.bar.set_description("fit")

    def show(self, done: int, trace: Tensor) -> None:
        """Move the bar, with the mean ELBO since it last moved."""
        self.bar.update(done - self.bar.n)
        recent = trace[max(0, done - self.config.log_every) : done].mean()
        self.bar.set_postfix_str(f"ELBO {float(recent):.2f}")

    def loss(self, path_gradient: bool, noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the tempered ELBO, to be minimised, and the ELBO with α = 1, to be reported."""
        wide = self.config.wide_samples
        bound = elbo(self.model, self.q, self.grid, noise, alpha, path_gradient, wide)
        reported = bound.value + (alpha - 1) * bound.log_q_theta.mean()
        return -bound.value - bound.conditional, reported.detach()

    @torch.no_grad()
    def broken_term(self, noise: Noise, step: int) -> str:
        """Which term of the ELBO is not finite, as a sentence."""
        bound: Elbo = elbo(self.model, self.q, self.grid, noise, wide=self.config.wide_samples)
        bad = [name for name, term in bound._asdict().items() if not term.isfinite().all()]
        # Both sum up other terms, the second at ϑ further out: named only when they stand alone.
        bad = [n for n in bad if n not in ("value", "conditional")] or bad or ["the gradient alone"]
        return (
            f"stopped at step {self.first + step}: {MAX_SKIPPED} steps in a row had a non-finite "
            f"gradient; not finite: {', '.join(bad)}"
        )
