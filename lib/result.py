"""What a fit returns: draws with their densities, diagnostics, predictions, files."""

import copy
import pickle
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid, Observations
from lib.diagnostics import Diagnostics, Marginals, SecondLook, arviz, diagnose, marginals
from lib.elbo import CHUNK, log_ratio
from lib.family import Family
from lib.posterior import VariationalPosterior
from lib.sde import EulerMaruyama
from lib.ssm import StateSpaceModel
from lib.start import Start
from lib.widened import second_look

# Of q(ϑ) alone, without paths: they cost next to nothing.
THETA_DRAWS = 10_000


class History(NamedTuple):
    """Trace of a run, one entry a step: step from 1, ELBO with α = 1, seconds since the start."""

    step: np.ndarray
    elbo: np.ndarray
    seconds: np.ndarray


class Draws(NamedTuple):
    """Draws of q, float64 on the CPU; log_weight = log_joint − log_q, unnormalised."""

    theta: Float[Tensor, "mc theta"]
    vartheta: Float[Tensor, "mc theta"]
    x: Float[Tensor, "mc time state"]
    log_q: Float[Tensor, " mc"]
    log_joint: Float[Tensor, " mc"]
    log_weight: Float[Tensor, " mc"]


class Forecast(NamedTuple):
    """Simulated future, without paths that left the state space; ``alive`` is the share kept."""

    t: Float[Tensor, " steps"]
    x: Float[Tensor, "mc steps state"]
    y: Float[Tensor, "mc steps obs"]
    alive: float


@dataclass
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

    @cached_property
    def _exact_q(self) -> VariationalPosterior:
        """q in float64: its log density is then exact for what it draws."""
        return copy.deepcopy(self.q).double()

    @torch.no_grad()
    def draws(self, n: int, seed: int = 0) -> Draws:
        """n independent draws of (θ, x) from q, with log q and log p(ϑ, x, y), made in chunks."""
        _check_count(n)
        generator, grid = torch.Generator().manual_seed(seed), self.observations.grid()
        parts = []
        for first in range(0, n, CHUNK):
            sample = self._exact_q(self._exact_q.draw_noise(min(CHUNK, n - first), generator))
            joint = self.model.log_joint(sample.vartheta, sample.x, grid).total
            log_q = sample.log_q_theta + sample.log_q_x
            parts.append((sample.vartheta, sample.x, log_q, joint))
        vartheta, x, log_q, joint = (torch.cat(column) for column in zip(*parts, strict=True))
        return Draws(self.model.to_theta(vartheta), vartheta, x, log_q, joint, joint - log_q)

    def diagnostics(self, n: int = 10_000, seed: int = 0) -> Diagnostics:
        """Trust report from n fresh draws, and from n/3 wider ones that may leave q(ϑ)."""
        draws = self.draws(n, seed)
        size = draws.x.shape[-1] * (draws.x.shape[-2] - 1)
        second = self._second_look(draws, -(-n // 3), seed)
        return diagnose(draws.log_weight, size, self.converged, self.reason, second)

    @torch.no_grad()
    def _second_look(self, draws: Draws, num_wide: int, seed: int) -> SecondLook:
        """Weights of the draws and of num_wide others, whose ϑ go beyond q(ϑ)."""
        q, grid = self._exact_q, self.observations.grid()
        generator, flow = torch.Generator().manual_seed(seed + 1), q.theta_flow
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
        draws = self.draws(n, seed)
        return marginals(self.model.theta_names, draws.vartheta, draws.log_weight)

    @torch.no_grad()
    def predict(self, n: int, seed: int = 0) -> Float[Tensor, "mc time obs"]:
        """Replicated observations y at every grid time t_0…t_N, one set for each draw of q."""
        draws = self.draws(n, seed)
        return self._observe(draws.x, draws.theta, torch.Generator().manual_seed(seed + 1))

    @torch.no_grad()
    def forecast(self, steps: int, n: int, seed: int = 0) -> Forecast:
        """Euler-Maruyama paths of the next ``steps`` grid steps after the data's end."""
        _check_count(steps)
        draws, obs = self.draws(n, seed), self.observations
        generator = torch.Generator().manual_seed(seed + 1)
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

    def to_arviz(self, n: int = 2000, seed: int = 0) -> "arviz.InferenceData":
        """Draws as InferenceData: posterior, sample_stats (log q, log joint) and observed_data."""
        draws, obs = self.draws(n, seed), self.observations
        posterior = {
            name: draws.theta[None, :, j].numpy() for j, name in enumerate(self.model.theta_names)
        }
        posterior |= {
            name: draws.x[None, :, :, j].numpy() for j, name in enumerate(self.model.state_names)
        }
        return arviz.from_dict(
            posterior=posterior,
            sample_stats={"lp": draws.log_joint[None].numpy(), "log_q": draws.log_q[None].numpy()},
            observed_data={name: obs.y[:, j].numpy() for j, name in enumerate(obs.names)},
            coords={"time": obs.grid().t.numpy(), "observation_time": obs.times.numpy()},
            dims={name: ["time"] for name in self.model.state_names}
            | {name: ["observation_time"] for name in obs.names},
        )

    def save(self, path: str | Path) -> None:
        """Write weights, family and history; ``load_fit`` needs the same model and data."""
        torch.save(
            {
                "weights": self.q.state_dict(),
                "family": asdict(self.family),
                "history": {k: v.tolist() for k, v in self.history._asdict().items()},
                "verdict": (self.converged, self.reason, self.seed, self.device),
                "identity": identity(self.model, self.observations),
            },
            path,
        )


def load_fit(path: str | Path, model: StateSpaceModel, observations: Observations) -> FitResult:
    """Read a saved fit; refuses, with a sentence, a file made with another model or other data."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as err:
        raise ValueError(f"{path} must be a file written by FitResult.save; got another.") from err
    if not (isinstance(saved, dict) and "identity" in saved):
        raise ValueError(f"{path} must be a file written by FitResult.save; got another.")
    for key, here in identity(model, observations).items():
        if saved["identity"][key] != here:
            raise ValueError(
                f"the fit in {path} has another {key}; got {here}, "
                f"saved {saved['identity'][key]}. Load it with the model and data it was made with."
            )
    family = Family(**saved["family"])
    path_like = torch.ones(observations.num_steps + 1, model.num_states, dtype=torch.float64)
    theta_like = torch.ones(model.num_theta, dtype=torch.float64)
    start = Start(theta_like, theta_like, path_like, path_like)
    q = VariationalPosterior(model, observations.grid(), family, start, seed=0)
    q.to(next(iter(saved["weights"].values())).dtype).load_state_dict(saved["weights"])
    q.requires_grad_(False)
    history = History(**{k: np.array(v) for k, v in saved["history"].items()})
    return FitResult(model, observations, q, family, history, *saved["verdict"])


def identity(model: StateSpaceModel, observations: Observations) -> dict[str, object]:
    """What a fit's file must share with the model and data that it is loaded with."""
    # Densities have no names to compare, so they are compared by their values at a fixed point.
    point = torch.linspace(-0.5, 0.5, model.num_theta, dtype=torch.float64)[None]
    x = torch.ones(1, 2, model.num_states, dtype=torch.float64)
    grid = observations.grid()
    pair = Grid(grid.t[:2], grid.y[:2], torch.ones_like(grid.y[:2]), grid.dt)
    return {
        "theta_names": list(model.theta_names),
        "state_names": list(model.state_names),
        "positive_states": list(model.positive_states),
        "x0": [model.x0_fixed.tolist(), model.x0_value.tolist()],
        "t0": observations.t0,
        "dt": observations.dt,
        "times": observations.times.tolist(),
        "y": [[None if v != v else v for v in row] for row in observations.y.tolist()],
        "density at a test point": [f"{float(t):.12g}" for t in model.log_joint(point, x, pair)],
    }


def _check_count(n: int) -> None:
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"a count must be a whole number, 1 or more; got {n!r}.")
