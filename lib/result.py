"""What a fit returns: draws with their densities, diagnostics, predictions, files."""

import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Observations
from lib.diagnostics import Diagnostics, Marginals, SecondLook, diagnose, marginals
from lib.elbo import in_chunks, log_ratio
from lib.family import Family
from lib.posterior import VariationalPosterior
from lib.probe import check_count
from lib.sde import EulerMaruyama
from lib.ssm import StateSpaceModel
from lib.storage import check_columns, difference, identity, read, rebuild, write
from lib.tables import Draws, draws_table, inference_data, path_table, theta_table, write_csv
from lib.weights import arviz
from lib.widened import second_look

# Of q(ϑ) alone, without paths: they cost next to nothing.
THETA_DRAWS = 10_000
_OPTIONS = asdict(Family())


class History(NamedTuple):
    """Trace of a run, one entry a step: step from 1, ELBO with α = 1, seconds since the start."""

    step: np.ndarray
    elbo: np.ndarray
    seconds: np.ndarray

    def then(self, later: "History") -> "History":
        """This trace with that of a run that went on from it; steps and seconds count on."""
        step, elbo, seconds = later
        at = (step + self.step[-1], elbo, seconds + self.seconds[-1])
        return History(*map(np.concatenate, zip(self, at, strict=True)))


class Forecast(NamedTuple):
    """Simulated future, without paths that left the state space; ``alive`` is the share kept."""

    t: Float[Tensor, " steps"]
    x: Float[Tensor, "mc steps state"]
    y: Float[Tensor, "mc steps obs"]
    alive: float


@dataclass(repr=False)
class FitResult:
    """A fitted posterior q(ϑ, x), its history, and whether the run converged and why."""

    model: StateSpaceModel
    observations: Observations
    q: VariationalPosterior
    family: Family
    history: History
    converged: bool
    reason: str
    seed: int
    device: str

    def __repr__(self) -> str:
        names, steps = ", ".join(self.model.theta_names), len(self.history.step)
        return f"FitResult({names}; {steps} steps, seed {self.seed}; {self.reason})"

    @cached_property
    def _exact_q(self) -> VariationalPosterior:
        """q in float64: its log density is then exact for what it draws."""
        return copy.deepcopy(self.q).double()

    @torch.no_grad()
    def draws(self, n: int, seed: int = 0) -> Draws:
        """n independent draws of (θ, x) from q, with log q and log p(ϑ, x, y), made in chunks."""
        check_count(n)
        generator, grid = _generator(seed), self.observations.grid()
        parts, q = [], self._exact_q
        vartheta, log_q_theta = q.theta_flow(q.draw_theta_noise(n, generator))
        for part, chain in in_chunks(q, vartheta):
            x, log_q_x = q.path(q.draw_path_noise(len(part), generator), part, chain)
            parts.append((x, log_q_x, self.model.log_joint(part, x, grid).total))
        x, log_q_x, joint = (torch.cat(column) for column in zip(*parts, strict=True))
        log_q = log_q_theta + log_q_x
        return Draws(self.model.to_theta(vartheta), vartheta, x, log_q, joint, joint - log_q)

    def diagnostics(self, n: int = 10_000, seed: int = 0) -> Diagnostics:
        """Trust report from n fresh draws, and from n/3 wider ones (at least 2) beyond q(ϑ)."""
        check_count(n, 2)
        draws = self.draws(n, seed)
        size = draws.x.shape[-1] * (draws.x.shape[-2] - 1)
        try:
            second = self._second_look(draws, max(2, -(-n // 3)), seed)
        except torch.linalg.LinAlgError:  # q(ϑ) is ruined: its draws have no covariance
            second = None
        return diagnose(draws.log_weight, size, self.converged, self.reason, second)

    @torch.no_grad()
    def _second_look(self, draws: Draws, num_wide: int, seed: int) -> SecondLook:
        """Weights of the draws and of num_wide others, whose ϑ go beyond q(ϑ)."""
        q, grid = self._exact_q, self.observations.grid()
        generator, flow = _generator(seed + 1), q.theta_flow
        shape = (THETA_DRAWS + num_wide, self.model.num_theta)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return second_look(
            log_q=flow.log_prob,
            log_p=lambda vartheta: log_ratio(self.model, q, grid, vartheta, generator),
            reference=flow(noise[:THETA_DRAWS])[0],
            own=draws.vartheta,
            log_p_own=draws.log_weight + flow.log_prob(draws.vartheta),
            noise=noise[THETA_DRAWS:],
        )

    def marginals(self, n: int = 10_000, seed: int = 0) -> Marginals:
        """Quantiles of each ϑ, from n draws as they are and importance-weighted (PSIS)."""
        check_count(n, 2)
        draws = self.draws(n, seed)
        return marginals(self.model.theta_names, draws.vartheta, draws.log_weight)

    @torch.no_grad()
    def predict(self, n: int, seed: int = 0) -> Float[Tensor, "mc time obs"]:
        """Replicated observations y at every grid time t_0…t_N, one set for each draw of q."""
        draws = self.draws(n, seed)
        return self._observe(draws.x, draws.theta, _generator(seed + 1))

    @torch.no_grad()
    def forecast(self, steps: int, n: int, seed: int = 0) -> Forecast:
        """Euler-Maruyama paths of the next ``steps`` grid steps after the data's end."""
        check_count(steps, name="steps")
        draws, obs = self.draws(n, seed), self.observations
        generator = _generator(seed + 1)
        noise = torch.randn(n, steps, draws.x.shape[-1], generator=generator, dtype=draws.x.dtype)
        t0 = obs.t0 + obs.num_steps * obs.dt
        euler = EulerMaruyama(self.model.sde, obs.dt)
        x = euler.simulate(draws.x[:, -1], draws.theta, noise, t0)[:, 1:]
        alive = (self.model.sde.alive(x) & x.isfinite().all(-1)).all(-1)
        y = self._observe(x[alive], draws.theta[alive], generator)
        t = t0 + obs.dt * torch.arange(1, steps + 1, dtype=x.dtype)
        return Forecast(t, x[alive], y, float(alive.double().mean()))

    def _observe(self, x: Tensor, theta: Tensor, generator: torch.Generator) -> Tensor:
        shape = (*x.shape[:-1], self.model.num_observed)
        noise = torch.randn(shape, generator=generator, dtype=x.dtype)
        named = self.model.named(theta[:, None])
        return self.model.observation.sample(x, named, noise)

    def summary(self, n: int = 10_000, seed: int = 0) -> pd.DataFrame:
        """Mean, sd and quantiles of each θ, natural scale: of n draws, then weighted (PSIS).

        ``weights_trusted`` is False where k-hat of these draws exceeds 0.7: weighted numbers, which
        follow it, then mislead.
        """
        check_count(n, 2)
        return theta_table(self.model.theta_names, self.draws(n, seed))

    def path_summary(self, n: int = 2000, seed: int = 0) -> pd.DataFrame:
        """The same of x, with fewer quantiles, at each grid time: a row for each time and state."""
        check_count(n, 2)
        t = self.observations.grid().t
        return path_table(self.model.state_names, t, self.draws(n, seed))

    def to_csv(self, folder: str | Path, n: int = 2000, seed: int = 0) -> list[Path]:
        """Write parameters, paths, draws and diagnostics, each as NAME.csv, from n draws of a seed.

        The folder is made where it is missing. Weighted numbers are there whatever they are worth:
        ``weights_trusted`` beside them says it, ``k_hat`` and ``verdict`` in diagnostics.csv say
        why. ``seed`` is there the fit's own.
        """
        check_count(n, 2)
        model, draws, report = self.model, self.draws(n, seed), self.diagnostics(n, seed)
        own = {"converged": self.converged, "reason": self.reason, "seed": self.seed, "draws": n}
        tables = {
            "parameters": theta_table(model.theta_names, draws).reset_index(),
            "paths": path_table(model.state_names, self.observations.grid().t, draws),
            "draws": draws_table(model.theta_names, draws),
            "diagnostics": pd.DataFrame([report._asdict() | own]),
        }
        return write_csv(folder, tables)

    def to_arviz(self, n: int = 2000, seed: int = 0) -> "arviz.InferenceData":
        """n draws as InferenceData: posterior, sample_stats (log p, q and weight), observed_data.

        States have the dimension ``time``, the grid's; the data have ``observation_time``.
        """
        names = (self.model.theta_names, self.model.state_names)
        return inference_data(*names, self.observations, self.draws(n, seed))

    def save(self, path: str | Path) -> None:
        """Write weights, family and history; ``load_fit`` needs the same model and data."""
        content = {
            "weights": self.q.state_dict(),
            "family": {k: type(_OPTIONS[k])(v) for k, v in asdict(self.family).items()},
            "history": {k: v.tolist() for k, v in self.history._asdict().items()},
            "verdict": (self.converged, self.reason, int(self.seed), self.device),
            "identity": identity(self.model, self.observations),
        }
        write(path, content)


def load_fit(path: str | Path, model: StateSpaceModel, observations: Observations) -> FitResult:
    """Read a saved fit, on any machine.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no fit's, or that of another model or of other data, and which.
    """
    check_kind("model", model, StateSpaceModel)
    check_kind("observations", observations, Observations, "Read a file with lib.read_csv.")
    check_columns(model, observations)
    saved, here = read(path), identity(model, observations)
    if saved["identity"].keys() != here.keys() or saved["family"].keys() != _OPTIONS.keys():
        raise ValueError(f"{path} must be of this version of lib; got another's. Fit again.")
    if differs := difference(here, saved["identity"]):
        raise ValueError(
            f"the fit in {path} has another {differs}. Load it with the model and the data that it "
            "was made with."
        )
    family = Family(**saved["family"])
    q = rebuild(model, observations, family, saved["weights"]).requires_grad_(False)
    history = History(**{k: np.array(v) for k, v in saved["history"].items()})
    return FitResult(model, observations, q, family, history, *saved["verdict"])


def check_kind(name: str, value: object, kind: type, hint: str = "") -> None:
    """The value is of that kind, before it fails far inside."""
    if not isinstance(value, kind):
        got = type(value).__name__
        raise TypeError(f"{name} must have type {kind.__name__}; got {got}. {hint}".rstrip())


def check_seed(seed: object) -> int:
    """The seed as an int, of those that torch takes, numpy's included."""
    if not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number; got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits; got {seed}.")
    return int(seed)


def _generator(seed: object) -> torch.Generator:
    return torch.Generator().manual_seed(check_seed(seed))
