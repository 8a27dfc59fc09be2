"""Posterior of a drifting contact rate by importance sampling over ϑ: w = p(ϑ) p̂(y|ϑ) / q(ϑ)."""

from typing import NamedTuple

import numpy as np
from guided_filter import Array, Plan, particle_filter
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

NAMES = ("log_recovery", "log_reversion", "level", "log_volatility", "log_sigma")
PRIOR_MEAN, PRIOR_SD = np.array([0.0, 0, 0, -3, 0]), np.array([1.0, 1, 1, 1, 3])
SHARES = (0.1, 0.5, 0.4)  # of the proposal: prior, posterior, posterior with the likelihood's root
WIDE_POWER = 0.5
GUESS = np.array([[-0.8, 0.3, 0.6, -2.7, 2.6]])  # where adaptation starts
GUESS_SD = ((0.1, 0.7, 0.15, 0.8, 0.5), (0.2, 1.0, 0.4, 1.2, 2.5))
ROUNDS = (2000, 4000, 6000)  # draws that adapt the proposal and are then dropped
FEW = 100  # particles of these
KERNELS, FREEDOM = 1000, 5.0
CELLS = 16_000  # ϑ × particles at a time: what the cache holds


class Epidemic(NamedTuple):
    """S, I and the log contact rate c of notebook 04: infections e^c·SI/763, recoveries γI."""

    vartheta: Array  # (batch, 5), as NAMES
    jumps: Array = np.array([[-1.0, 1.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    positive: tuple[int, ...] = (0, 1)
    observed: int = 1

    @property
    def variance(self) -> Array:
        """σ²."""
        return np.exp(2 * self.vartheta[:, 4:])

    def start(self, particles: int, rng: np.random.Generator) -> Array:
        """(762, 1, N(0, 1))."""
        contact = rng.standard_normal((len(self.vartheta), particles))
        return np.stack([np.full_like(contact, 762), np.ones_like(contact), contact])

    def flows(self, x: Array) -> tuple[Array, Array]:
        """Drift and rates of infection, recovery and of the contact rate's noise, per day."""
        recovery, reversion, level, volatility, _ = self.vartheta.T[..., None]
        susceptible, infected, contact = x
        infections = np.exp(contact) * susceptible * infected / 763
        recoveries = np.exp(recovery) * infected
        pull = np.exp(reversion) * (level - contact)
        spread = np.broadcast_to(np.exp(2 * volatility), contact.shape)
        drift = np.stack([-infections, infections - recoveries, pull])
        return drift, np.stack([infections, recoveries, spread])


def log_prior(vartheta: Array) -> Array:
    """Independent normals: the notebook's priors on the scale of ϑ."""
    return norm.logpdf(vartheta, PRIOR_MEAN, PRIOR_SD).sum(-1)


class Kernels(NamedTuple):
    """Student-t densities of one shape about ``centres``, equally weighted."""

    centres: Array  # (kernel, 5)
    tril: Array  # root of their scale matrix, (5, 5)

    def sample(self, n: int, rng: np.random.Generator) -> Array:
        """ϑ, (n, 5)."""
        centre = self.centres[rng.integers(len(self.centres), size=n)]
        stretch = np.sqrt(FREEDOM / rng.chisquare(FREEDOM, (n, 1)))
        return centre + stretch * rng.standard_normal(centre.shape) @ self.tril.T

    def log_prob(self, vartheta: Array) -> Array:
        """Log density of the mixture."""
        count, d = self.centres.shape
        away = np.linalg.solve(self.tril, (vartheta[:, None] - self.centres).reshape(-1, d).T)
        square = (away**2).sum(0).reshape(-1, count)
        kernel = gammaln((FREEDOM + d) / 2) - gammaln(FREEDOM / 2)
        kernel -= d / 2 * np.log(FREEDOM * np.pi) + np.log(np.diag(self.tril)).sum()
        tails = -(FREEDOM + d) / 2 * np.log1p(square / FREEDOM)
        return kernel + logsumexp(tails, axis=1) - np.log(count)


class Proposal(NamedTuple):
    """The prior, kernels for the posterior and kernels for a wider one, with SHARES."""

    near: Kernels
    wide: Kernels

    def sample(self, n: int, rng: np.random.Generator) -> Array:
        """ϑ, (n, 5)."""
        prior = PRIOR_MEAN + PRIOR_SD * rng.standard_normal((n, len(NAMES)))
        each = np.stack([prior, self.near.sample(n, rng), self.wide.sample(n, rng)])
        return each[rng.choice(len(each), n, p=SHARES), np.arange(n)]

    def log_prob(self, vartheta: Array) -> Array:
        """Log density of the mixture."""
        parts = [log_prior(vartheta), self.near.log_prob(vartheta), self.wide.log_prob(vartheta)]
        return logsumexp(parts, axis=0, b=np.array(SHARES)[:, None])


class Weighted(NamedTuple):
    """Draws of ϑ, each with a path at days 0..14."""

    vartheta: Array  # (draw, 5)
    path: Array  # (draw, day, state)
    log_likelihood: Array  # (draw,), estimated by particles
    log_ratio: Array  # (draw,), log prior - log proposal

    def weight(self, power: float = 1.0) -> Array:
        """Weights that add up to 1, for prior × likelihood to a power."""
        log_weight = self.log_ratio + power * self.log_likelihood
        return np.exp(log_weight - logsumexp(log_weight))

    @property
    def ess(self) -> float:
        """Effective number of draws, 1/Σw²."""
        return float(1 / (self.weight() ** 2).sum())

    @property
    def log_evidence(self) -> tuple[float, float]:
        """log p(y), and its standard error: that of the mean weight over the mean weight."""
        n = len(self.log_ratio)
        value = logsumexp(self.log_ratio + self.log_likelihood) - np.log(n)
        return float(value), float(np.sqrt((n / self.ess - 1) / n))


def weigh(
    proposal: Proposal, plan: Plan, n: int, particles: int, rng: np.random.Generator
) -> Weighted:
    """n draws from the proposal, with their likelihoods."""
    parts = []
    for vartheta in np.array_split(proposal.sample(n, rng), -(-n * particles // CELLS)):
        found = particle_filter(Epidemic(vartheta), plan, particles, rng)
        log_ratio = log_prior(vartheta) - proposal.log_prob(vartheta)
        parts.append(Weighted(vartheta, found.path, found.log_likelihood, log_ratio))
    return Weighted(*map(np.concatenate, zip(*parts, strict=True)))


def adapt(draws: Weighted, power: float, rng: np.random.Generator) -> Kernels:
    """Kernels about resampled draws, narrower than these together by Silverman's factor."""
    weight, d = draws.weight(power), len(NAMES)
    count = min(KERNELS, 1 / (weight**2).sum())
    width = (4 / ((d + 2) * count)) ** (1 / (d + 4))
    scale = np.cov(draws.vartheta.T, aweights=weight)
    chosen = rng.choice(len(weight), KERNELS, p=weight)
    return Kernels(draws.vartheta[chosen], width * np.linalg.cholesky(scale))


def reference(plan: Plan, n: int, particles: int, seed: int) -> Weighted:
    """Adapts the proposal, then draws anew from it."""
    rng = np.random.default_rng(seed)
    proposal = Proposal(*(Kernels(GUESS, np.diag(sd)) for sd in GUESS_SD))
    for size in ROUNDS:
        draws = weigh(proposal, plan, size, FEW, rng)
        proposal = Proposal(adapt(draws, 1.0, rng), adapt(draws, WIDE_POWER, rng))
    return weigh(proposal, plan, n, particles, rng)
