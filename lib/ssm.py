"""State-space model: prior, Euler-Maruyama transitions and Gaussian observations (eqs. 7, 8)."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lib.data import Grid
from lib.movable import Movable, moved
from lib.priors import InitialState, make_prior, seeded
from lib.probe import (
    check_count,
    check_declaration,
    check_names,
    check_prior,
    check_sigma,
    check_theta,
    check_x0,
    parse_matrix,
    parse_sigma,
)
from lib.probe_sde import check_sde
from lib.sde import SDE, EulerMaruyama

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
NUM_PRIOR_DRAWS = 10_000


class GaussianObservation(Movable):
    r"""Observation density (eq. 7): :math:`y_i = F'x_i + ε`, ε ~ N(0, σ²I).

    Args:
        F: Matrix (p, m); it picks or mixes the states.
        sigma: Standard deviation of the noise: a number, the name of a parameter, a tuple of m of
            these, or a function of the named parameters, ``lambda named: 0.1 * named["theta1"]``.
            ``named[name]`` has shape (..., 1) and the result must broadcast with (..., m).

    >>> observation = GaussianObservation([[0.0], [1.0]], "sigma")
    >>> observation.mean(torch.ones(5, 2)).shape
    torch.Size([5, 1])
    """

    def __init__(self, F: object, sigma: object) -> None:
        self.F: Float[Tensor, "state observed"] = parse_matrix(F)
        self.sigma = parse_sigma(sigma, self.F.shape[1])
        entries = () if callable(self.sigma) else self.sigma
        self.theta_names = tuple(dict.fromkeys(s for s in entries if isinstance(s, str)))
        numbers = [1.0 if isinstance(s, str) else s for s in entries]
        self.known: Float[Tensor, " entries"] = torch.tensor(numbers, dtype=torch.float64)

    def mean(self, x: Float[Tensor, "*batch state"]) -> Float[Tensor, "*batch observed"]:
        """F'x."""
        return x @ self.F.to(x.dtype)

    def scale(self, named: Mapping[str, Tensor]) -> Float[Tensor, "*batch _"]:
        """σ, one entry or one for each observed component."""
        if callable(self.sigma):
            return self.sigma(named)
        if not self.theta_names:
            return self.known
        columns = [
            named[s] if isinstance(s, str) else self.known[j : j + 1]
            for j, s in enumerate(self.sigma)
        ]
        return torch.cat(torch.broadcast_tensors(*columns), -1)

    def log_prob(
        self,
        y: Float[Tensor, "*#batch observed"],
        x: Float[Tensor, "*#batch state"],
        named: Mapping[str, Tensor],
    ) -> Float[Tensor, "*batch observed"]:
        """log N(y; F'x, σ²) of every component, not summed, so that missing ones can be masked."""
        sigma = self.scale(named)
        return ((y - self.mean(x)) / sigma).square() * -0.5 - (sigma.log() + HALF_LOG_2PI)

    def sample(
        self,
        x: Float[Tensor, "*#batch state"],
        named: Mapping[str, Tensor],
        noise: Float[Tensor, "*#batch observed"],
    ) -> Float[Tensor, "*batch observed"]:
        """y = F'x + σ·noise; noise is standard normal."""
        return self.mean(x) + self.scale(named) * noise


class JointTerms(NamedTuple):
    """The terms of log p(ϑ, x, y), each summed over time."""

    log_prior: Float[Tensor, " mc"]
    log_x0: Float[Tensor, " mc"]
    log_transition: Float[Tensor, " mc"]
    log_observation: Float[Tensor, " mc"]

    @property
    def total(self) -> Float[Tensor, " mc"]:
        """log p(ϑ, x, y)."""
        return self.log_prior + self.log_x0 + self.log_transition + self.log_observation


class SimulatedPaths(NamedTuple):
    """Paths of the Euler model; the values of a dead path may be NaN and must not be used."""

    x: Float[Tensor, "draws time state"]
    alive: Bool[Tensor, " draws"]  # finite, and every positive state above 0 at every time


class StateSpaceModel(Movable):
    r"""Joint density :math:`p(ϑ)\,p(x_0)\,Π_i p(x_i | x_{i-1}, θ)\,Π_i p(y_i | x_i, θ)`.

    θ is on the natural scale, ϑ unconstrained: the logarithm of the positive components, the logit
    of those whose prior has two ends (`lib.bounds`). Names that only σ uses are appended to θ as
    positive parameters. With positive states the density is that on {x > 0}, not renormalised; x
    must lie there.

    Args:
        sde: Drift, diffusion and the names of states and parameters.
        observation: Observation density.
        prior: Torch distribution over ϑ with batch + event shape (d,); or a dict from parameter
            name to univariate distribution on the natural scale, whose support then bounds θ.
        x0: Numbers (p,), a torch distribution of shape (p,), or a dict from state name to either.

    Raises:
        ValueError: If a piece does not fit, found by trying it on prior draws.
    """

    def __init__(
        self, sde: SDE, observation: GaussianObservation, prior: object, x0: object
    ) -> None:
        check_declaration(sde, observation)
        self.sde, self.observation = sde, observation
        appended = tuple(s for s in observation.theta_names if s not in sde.theta_names)
        self.theta_names = tuple(sde.theta_names) + appended
        self.state_names, self.positive_states = tuple(sde.state_names), sde.positive_states
        positive = {s: s in (*sde.positive_theta, *appended) for s in self.theta_names}
        check_names(observation.F, self.state_names, observation.theta_names, positive)
        self.prior = make_prior(prior, self.theta_names, torch.tensor(list(positive.values())))
        self.bounds = self.prior.bounds
        self.initial = InitialState(x0, self.state_names, self.positive_states)
        self._check_on_draws()

    def _check_on_draws(self) -> None:
        many = self.sample_prior(NUM_PRIOR_DRAWS, seed=0)
        check_prior(many, self.to_theta(many), self.log_prior(many), self.theta_names)
        # More draws than any size of the model, so that a mixed-up axis cannot pass.
        num_draws = 64 + 2 * (self.num_states + self.num_theta)
        vartheta, x0 = self.sample_prior(num_draws, seed=0), self.sample_x0(num_draws, seed=0)
        theta = self.to_theta(vartheta)
        check_x0(self.sde, x0)
        check_sigma(self.observation.scale, self.named(theta[:, None]), self.num_observed)
        check_sde(self.sde, theta, x0)

    def __repr__(self) -> str:
        names = ", ".join(self.state_names), ", ".join(self.theta_names)
        return f"StateSpaceModel({type(self.sde).__name__}; states {names[0]}; θ {names[1]})"

    @property
    def num_theta(self) -> int:
        """Number d of parameters."""
        return len(self.theta_names)

    @property
    def num_states(self) -> int:
        """Dimension p of the state."""
        return len(self.state_names)

    @property
    def num_observed(self) -> int:
        """Number m of observed components."""
        return self.observation.F.shape[1]

    @property
    def x0_fixed(self) -> Bool[Tensor, " state"]:
        """Which components of x_0 are known."""
        return self.initial.fixed

    @property
    def x0_value(self) -> Float[Tensor, " state"]:
        """Known components of x_0, zeros elsewhere."""
        return self.initial.value

    @property
    def x0_random(self) -> bool:
        """Whether any component of x_0 has a density."""
        return bool(self.initial.parts)

    def to_theta(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch theta"]:
        """θ from ϑ."""
        return self.bounds.to_natural(vartheta)

    def to_vartheta(self, theta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch theta"]:
        """ϑ from θ."""
        return self.bounds.to_unconstrained(theta)

    def named(self, theta: Float[Tensor, "*batch theta"]) -> dict[str, Float[Tensor, "*batch 1"]]:
        """Parameters by name, each (..., 1)."""
        return dict(zip(self.theta_names, theta.split(1, -1), strict=True))

    def log_prior(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """log p(ϑ)."""
        return self.prior.log_prob(vartheta)

    def log_x0(self, x0: Float[Tensor, "*batch state"]) -> Float[Tensor, "*batch"]:
        """log p(x_0), over the components that have a density."""
        return self.initial.log_prob(x0)

    def log_joint(
        self,
        vartheta: Float[Tensor, "mc theta"],
        x: Float[Tensor, "mc time state"],
        grid: Grid,
    ) -> JointTerms:
        """Terms of log p(ϑ, x, y); x includes x_0, and y_0 counts where it is observed."""
        if grid.y.shape[1] != self.num_observed:
            raise ValueError(
                f"observations must have one column for each column of F, {self.num_observed}; got "
                f"{grid.y.shape[1]}."
            )
        theta = self.to_theta(vartheta)[:, None]
        step = EulerMaruyama(self.sde, grid.dt)
        transition = step.log_prob(x[:, 1:], x[:, :-1], theta, grid.t[:-1, None])
        # Before the density: times 0 afterwards, a square that overflows would be NaN.
        y = torch.where(grid.observed > 0, grid.y, 0.0)
        observation = self.observation.log_prob(y, x, self.named(theta)) * grid.observed
        return JointTerms(
            log_prior=self.log_prior(vartheta),
            log_x0=self.log_x0(x[:, 0]),
            log_transition=transition.sum(-1),
            log_observation=observation.sum((-2, -1)),
        )

    def sample_prior(self, num_draws: int, seed: int) -> Float[Tensor, "draws theta"]:
        """Prior draws of ϑ, in float64 on the CPU whatever the model is in."""
        with seeded("prior", seed):
            return moved(self.prior).sample(num_draws)

    def sample_x0(self, num_draws: int, seed: int) -> Float[Tensor, "draws state"]:
        """Draws of x_0, likewise; fixed components are repeated."""
        with seeded("x0", seed):
            return moved(self.initial).sample(num_draws)

    def simulate(
        self,
        theta: Float[Tensor, "draws theta"],
        num_steps: int,
        dt: float | int,
        seed: int,
        t0: float | int = 0.0,
    ) -> SimulatedPaths:
        """One path of the Euler model for each row of θ (prior or posterior draws)."""
        check_theta(theta, self.theta_names, self.bounds)
        check_count(num_steps, name="num_steps")
        with seeded("paths", seed):
            noise = torch.randn(len(theta), num_steps, self.num_states, dtype=torch.float64)
        x0 = self.sample_x0(len(theta), seed).to(theta)
        x = EulerMaruyama(self.sde, dt).simulate(x0, theta, noise.to(theta), t0)
        return SimulatedPaths(x, (self.sde.alive(x) & x.isfinite().all(-1)).all(-1))

    def to(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> "StateSpaceModel":
        """Copy with the tensors of its distributions, F, x_0 and SDE moved."""
        return moved(self, dtype, device)
