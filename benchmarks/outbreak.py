"""The epidemic for the particle filter."""

from typing import NamedTuple

import numpy as np

JUMPS = np.array([[-1.0, 1.0], [0.0, -1.0]])  # what an infection and a removal do to (S, I)


class Outbreak(NamedTuple):
    """A ``guided_filter.Process`` of (S, I)."""

    vartheta: np.ndarray  # (batch, 3): log θ1, log θ2, log σ
    jumps: np.ndarray = JUMPS
    positive: tuple[int, ...] = (0, 1)
    observed: int = 1

    @property
    def variance(self) -> np.ndarray:
        """σ²."""
        return np.exp(2 * self.vartheta[:, 2:])

    def start(self, particles: int, rng: np.random.Generator) -> np.ndarray:
        """(762, 1), which is known."""
        x0 = np.array([762.0, 1.0])
        return np.tile(x0[:, None, None], (1, len(self.vartheta), particles))

    def flows(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drift, and the rates θ1SI and θ2I."""
        theta1, theta2 = np.exp(self.vartheta[:, :2]).T[..., None]
        rates = np.stack([theta1 * x[0] * x[1], theta2 * x[1]])
        return np.tensordot(JUMPS.T, rates, 1), rates
