"""Guided particle filter of an SDE on an Euler grid: unbiased estimates of p(y | ϑ), and paths."""

import math
from typing import NamedTuple, Protocol

import numpy as np

Array = np.ndarray
LOG_2PI = math.log(2 * math.pi)
NUDGE = 1e-6  # of finite differences; they steer the guide only, so their error costs no exactness


class Process(Protocol):
    """What moves x, for a batch of ϑ; x is (state, batch, particle).

    One step is x' = x + a(x)·dt + Σ_k jumps_k·sqrt(rates_k(x)·dt)·ε_k, with ε_k ~ N(0, 1).

    Attributes:
        jumps: What an event of each kind does to the states, (event, state).
        positive: The states above 0; a path that leaves has weight 0.
        observed: The state that is seen with noise.
        variance: Of that noise, (batch, 1).
    """

    jumps: Array
    positive: tuple[int, ...]
    observed: int
    variance: Array

    def start(self, particles: int, rng: np.random.Generator) -> Array:
        """Draws of x_0."""

    def flows(self, x: Array) -> tuple[Array, Array]:
        """Drift a, shaped as x, and rates (event, batch, particle), per unit of time."""


class Plan(NamedTuple):
    """Observations, ``steps`` steps of ``dt`` apart, the first so long after t_0."""

    y: Array  # (observations,)
    steps: int
    dt: float


class Glance(NamedTuple):
    """What one x says of the next y, linearised: y ~ N(slope·x + offset, variance)."""

    slope: Array  # (state, batch, 1)
    offset: Array  # (batch, 1)
    variance: Array  # (batch, 1)

    def log_prob(self, y: float, x: Array) -> Array:
        """Log density of y."""
        return _log_normal(y - self.offset - (self.slope * x).sum(0), self.variance)


class Filtered(NamedTuple):
    """Estimate of log p(y | ϑ), and one path at t_0 and each y, drawn from the particles."""

    log_likelihood: Array  # (batch,)
    path: Array  # (batch, 1 + observations, state)


@np.errstate(all="ignore")  # a ϑ whose paths overflow has likelihood 0, which is no fault
def particle_filter(
    process: Process, plan: Plan, particles: int, rng: np.random.Generator
) -> Filtered:
    """Runs through the observations, with a systematic resample at each of them."""
    x = process.start(particles, rng)
    states, parents, log_likelihood = [x], [], 0.0
    for y in plan.y:
        x, log_weight = _advance(process, x, y, plan, rng)
        top = log_weight.max(-1, keepdims=True)
        weight = np.exp(log_weight - np.where(np.isneginf(top), 0.0, top))
        log_likelihood = log_likelihood + top[:, 0] + np.log(weight.mean(-1))
        weight[~weight.any(-1)] = 1.0  # none alive: the likelihood is 0, whoever goes on
        parents.append(systematic(weight, rng))
        x = np.take_along_axis(x, parents[-1][None], -1)
        states.append(x)
    return Filtered(log_likelihood, _trace(states, parents, rng))


def _advance(
    process: Process, x: Array, y: float, plan: Plan, rng: np.random.Generator
) -> tuple[Array, Array]:
    r"""Particles at the next observation y, and their log weights.

    With g_i(x_i) the density of y at a glance, a step draws from p(x'|x) g_{i+1}(x') / G_i(x),
    :math:`G_i(x) = ∫ p(x'|x) g_{i+1}(x') dx'`. As the last g is the true density of y, the weight
    is :math:`\prod_{0 ≤ i < steps} G_i(x_i) / \prod_{0 < i < steps} g_i(x_i)`.
    """
    glances = _look_ahead(process, x, plan)
    log_weight = np.zeros(x.shape[1:])
    for i, glance in enumerate(glances):
        if i > 0:
            log_weight -= glances[i - 1].log_prob(y, x)
        moved, log_mass = _step(process, x, glance, y, plan.dt, rng)
        x, alive = _kept(process, x, moved)
        log_weight += np.where(alive, log_mass, -np.inf)
    return x, np.where(np.isnan(log_weight), -np.inf, log_weight)


def _kept(process: Process, x: Array, moved: Array) -> tuple[Array, Array]:
    """The move of those that it keeps alive; the dead stay where their rates can be computed."""
    alive = np.isfinite(moved).all(0) & (moved[list(process.positive)] > 0).all(0)
    return np.where(alive, moved, x), alive


def _step(
    process: Process, x: Array, glance: Glance, y: float, dt: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draws from p(x'|x) g(x') / G(x), and log G(x)."""
    drift, rates = process.flows(x)
    mean, scale = x + dt * drift, np.sqrt(dt * rates)
    heard = _heard(glance.slope, process.jumps) * scale
    total = (heard**2).sum(0) + glance.variance
    miss = y - glance.offset - (glance.slope * mean).sum(0)
    noise = rng.standard_normal(scale.shape)
    # Given y, noise has mean heard·miss/total and covariance I - heard·heard'/total; this root of
    # it needs no second noise.
    pull = miss / total - (heard * noise).sum(0) / (total + np.sqrt(total * glance.variance))
    moved = mean + np.tensordot(process.jumps.T, scale * (noise + heard * pull), 1)
    return moved, _log_normal(miss, total)


def _look_ahead(process: Process, x: Array, plan: Plan) -> list[Glance]:
    """Glances of x_1, ..., x_steps, linearised about the drift's path from the particles' mean."""
    path = [x.mean(-1, keepdims=True)]
    for _ in range(plan.steps):
        ahead = path[-1] + plan.dt * process.flows(path[-1])[0]
        path.append(_kept(process, path[-1], ahead)[0])
    slope, variance, end = np.zeros_like(path[0]), process.variance, path[-1][process.observed]
    slope[process.observed] = 1
    glances = [Glance(slope, np.zeros_like(end), variance)]
    for m in reversed(path[1:-1]):
        drift, rates = process.flows(m)
        variance = variance + plan.dt * (_heard(slope, process.jumps) ** 2 * rates).sum(0)
        units = NUDGE * np.eye(len(m))[..., None, None]
        tangents = [(process.flows(m + unit)[0] - drift) / NUDGE for unit in units]
        slope = slope + plan.dt * np.stack([(slope * tangent).sum(0) for tangent in tangents])
        glances.append(Glance(slope, end - (slope * m).sum(0), variance))
    return glances[::-1]


def _heard(slope: Array, jumps: Array) -> Array:
    """What an event of each kind adds to the next y, (event, batch, 1)."""
    return np.tensordot(jumps, slope, 1)


def systematic(weight: Array, rng: np.random.Generator) -> Array:
    """Indices of a systematic resample along the last axis, each ϑ by itself."""
    batch, particles = weight.shape
    row = np.arange(batch)[:, None]
    ends = np.cumsum(weight, -1)
    points = (np.arange(particles) + rng.random((batch, 1))) / particles
    # One search for all: row b's weights fill the interval from b to b + 1.
    index = np.searchsorted((ends / ends[:, -1:] + row).ravel(), (points + row).ravel())
    return (index.reshape(weight.shape) - particles * row).clip(0, particles - 1)


def _trace(states: list[Array], parents: list[Array], rng: np.random.Generator) -> Array:
    """A path for each ϑ, back from one of its last particles."""
    index = rng.integers(states[0].shape[-1], size=(states[0].shape[1], 1))
    path = [np.take_along_axis(states[-1], index[None], -1)]
    for x, parent in zip(reversed(states[:-1]), reversed(parents), strict=True):
        index = np.take_along_axis(parent, index, -1)
        path.append(np.take_along_axis(x, index[None], -1))
    return np.stack(path[::-1])[..., 0].transpose(2, 0, 1)


def _log_normal(miss: Array, variance: Array) -> Array:
    """log N(miss; 0, variance)."""
    return -0.5 * (miss**2 / variance + np.log(variance) + LOG_2PI)
