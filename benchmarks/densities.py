"""log p(ϑ, x, y) of OU and of the epidemic on an Euler grid (eqs. 7, 8), for the peers.

Written anew, of arrays of any library that follows the array standard: jax.numpy and NumPy alike.
"""

import math
from typing import NamedTuple, Protocol

Array = object  # numpy.ndarray or jax.Array
LOG_2PI = math.log(2 * math.pi)
NEARLY_DEAD = 1e-9  # below it rates are held, so that a dying path has a finite gradient


class Data(NamedTuple):
    """What is known: x_0, and y at t_1..t_N, 0 where ``observed`` is 0.

    Attributes:
        y: (N,), of the last state.
        observed: (N,), 1 or 0.
        x0: (p,).
        dt: Grid step.
        prior_sd: Of the normal prior of each ϑ, about 0.
    """

    y: Array
    observed: Array
    x0: Array
    dt: float
    prior_sd: float


class Process(Protocol):
    """One Euler step. x is (N, p), or (p,) in ``move``; noise is standard normal, shaped as x."""

    positive: bool  # the target is p on {x > 0}, not renormalised

    def log_sigma(self, vartheta: Array) -> Array:
        """log σ of the observations."""

    def log_transition(self, vartheta: Array, x: Array, x_next: Array, dt: float) -> Array:
        """Σ log N(x_next | x)."""

    def move(self, vartheta: Array, x: Array, noise: Array, dt: float) -> Array:
        """x_next from x and noise."""


class OrnsteinUhlenbeck:
    """dX = θ1(θ2 − X)dt + θ3 dW with ϑ = (log θ1, θ2, log θ3), seen with σ = 1."""

    positive = False

    def log_sigma(self, vartheta: Array) -> Array:
        """0."""
        return 0 * vartheta[0]

    def log_transition(self, vartheta: Array, x: Array, x_next: Array, dt: float) -> Array:
        """Σ log N(x + θ1(θ2 − x)dt, θ3²dt)."""
        xp, log_sd = x.__array_namespace__(), vartheta[2] + 0.5 * math.log(dt)
        z = (x_next - x - xp.exp(vartheta[0]) * (vartheta[1] - x) * dt) / xp.exp(log_sd)
        return xp.sum(-0.5 * z**2 - log_sd - 0.5 * LOG_2PI)

    def move(self, vartheta: Array, x: Array, noise: Array, dt: float) -> Array:
        """x + θ1(θ2 − x)dt + θ3 √dt noise."""
        xp = x.__array_namespace__()
        drift = xp.exp(vartheta[0]) * (vartheta[1] - x)
        return x + drift * dt + xp.exp(vartheta[2]) * math.sqrt(dt) * noise


class Epidemic:
    """(S, I) with infections at rate θ1SI and removals at θ2I; ϑ = (log θ1, log θ2, log σ).

    A step has N(r·dt, r·dt) events of each kind, r their rate: S' = S − infections and
    I' = I + infections − removals, so that the density of (S', I') is that of the two numbers.
    """

    positive = True

    def log_sigma(self, vartheta: Array) -> Array:
        """The third parameter."""
        return vartheta[2]

    def expected(self, vartheta: Array, x: Array, dt: float) -> Array:
        """Mean, and variance, of the infections and of the removals of a step, (..., 2)."""
        xp = x.__array_namespace__()
        rates = xp.exp(vartheta[0]) * x[..., 0], xp.exp(vartheta[1]) + 0 * x[..., 0]
        return xp.stack(rates, axis=-1) * x[..., 1:] * dt

    def log_transition(self, vartheta: Array, x: Array, x_next: Array, dt: float) -> Array:
        """Σ log N(events; mean, mean)."""
        xp, mean = x.__array_namespace__(), self.expected(vartheta, x, dt)
        change = x_next - x
        events = xp.stack((-change[:, 0], -change[:, 0] - change[:, 1]), axis=-1)
        return xp.sum(-0.5 * (events - mean) ** 2 / mean - 0.5 * xp.log(mean) - 0.5 * LOG_2PI)

    def move(self, vartheta: Array, x: Array, noise: Array, dt: float) -> Array:
        """(S − infections, I + infections − removals)."""
        xp = x.__array_namespace__()
        mean = self.expected(vartheta, xp.where(x > NEARLY_DEAD, x, NEARLY_DEAD), dt)
        events = mean + xp.sqrt(mean) * noise
        return x + xp.stack((-events[0], events[0] - events[1]))


PROCESSES = {"ou": OrnsteinUhlenbeck(), "sir": Epidemic()}


def log_prior(vartheta: Array, data: Data) -> Array:
    """Σ log N(ϑ; 0, prior_sd²)."""
    xp = vartheta.__array_namespace__()
    square = (vartheta / data.prior_sd) ** 2
    return xp.sum(-0.5 * square - math.log(data.prior_sd) - 0.5 * LOG_2PI)


def log_observation(process: Process, vartheta: Array, x: Array, data: Data) -> Array:
    """Σ log N(y; last state, σ²) over what is observed; x is x_1..x_N, (N, p)."""
    xp, log_sigma = x.__array_namespace__(), process.log_sigma(vartheta)
    z = (data.y - x[:, -1]) / xp.exp(log_sigma)
    return xp.sum(data.observed * (-0.5 * z**2 - log_sigma - 0.5 * LOG_2PI))


def log_joint(process: Process, vartheta: Array, x: Array, data: Data) -> Array:
    """log p(ϑ, x, y) of an alive path x_1..x_N, (N, p): the centred parameterisation."""
    xp = x.__array_namespace__()
    before = xp.concat((data.x0[None], x[:-1]))
    log_transition = process.log_transition(vartheta, before, x, data.dt)
    return log_prior(vartheta, data) + log_transition + log_observation(process, vartheta, x, data)


def log_joint_of_noise(
    process: Process, vartheta: Array, x: Array, noise: Array, data: Data
) -> Array:
    """log p(ϑ, noise, y) with x the path that the noise makes: the innovation parameterisation.

    It is log p(ϑ, x, y) plus the log-Jacobian of x by noise, and −∞ for a path that dies.
    """
    xp = x.__array_namespace__()
    value = (
        log_prior(vartheta, data)
        + xp.sum(-0.5 * noise**2 - 0.5 * LOG_2PI)
        + log_observation(process, vartheta, x, data)
    )
    return xp.where(xp.all(x > 0), value, -xp.inf) if process.positive else value
