"""How to fit: the options of training and of the variational family, with both presets."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch

from lib.family import Family

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LEAST = {
    "threads": 1,
    "num_steps": 1,
    "num_samples": 1,
    "log_every": 1,
    "wide_samples": 0,
    "refits": 0,
}
MOST_REFITS = 5  # one every fifth of the run
_CHOICES = {
    "dtype": tuple(DTYPES),
    "optimizer": ("muon", "adam"),
    "gradient": ("path", "total"),
    "mode": ("eager", "cuda_graph"),
}


@dataclass(frozen=True)
class FitConfig:
    """How to fit. The defaults are the `study` preset; ``FitConfig.paper()`` the paper's.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``, of the training alone: draws are always float64.
        threads: CPU threads.
        num_steps: Optimiser steps; the run is exactly that long, because the decay needs it.
        num_samples: Monte Carlo draws n of each step, with ``Family.base`` in pairs: two paths of
            opposite noise for each ϑ.
        wide_samples: Further draws, which train q(x | ϑ) alone at ϑ from the tails of q(ϑ).
        refits: Rounds, 5 at most, in which q(ϑ) is fitted to weighted draws, the last at the end;
            with the chain of ``Family.base`` there is one more before the first step.
        learning_rate: Peak, 1 at most, reached after a warm-up, then cosine decay.
        optimizer: ``"muon"`` for the matrices of the path's networks and Adam for the rest, or
            ``"adam"`` for all.
        gradient: ``"path"``, the path gradient once warmed up, or ``"total"``, the plain one.
        tempering: Initial α on log q(ϑ), falling linearly to 1 at half of the run; 1 is none. For
            ``Family.base`` it is without effect, as q(ϑ) is not trained by the bound.
        log_every: Steps between two looks at the ELBO.
        mode: How a step runs: ``"eager"``, or ``"cuda_graph"``, recorded once and replayed on a
            GPU; a model that looks at the values of its tensors cannot be recorded.
        family: Options of the variational family.
    """

    dtype: str = "float32"
    threads: int = 1
    num_steps: int = 1000
    num_samples: int = 40
    learning_rate: float = 1e-2
    wide_samples: int = 20
    refits: int = 2
    optimizer: str = "muon"
    gradient: str = "path"
    tempering: float = 1.0
    log_every: int = 50
    mode: str = "eager"
    family: Family = field(default_factory=Family)

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number, {least} or more; got {value!r}.")
        if self.refits > MOST_REFITS:
            raise ValueError(f"refits must be {MOST_REFITS} at most; got {self.refits}.")
        _check_kinds(self.learning_rate, self.tempering, self.family)
        # Each entry of a weight moves by about the rate: more than 1 only ruins it.
        if not 0 < self.learning_rate <= 1:
            raise ValueError(
                f"learning_rate must be positive and at most 1; got {self.learning_rate}. Try 0.01."
            )
        if not 1 <= self.tempering < math.inf:
            raise ValueError(f"tempering must be 1 (none) or more, finite; got {self.tempering}.")

    @classmethod
    def guided(cls, **changes: object) -> "FitConfig":
        """No flows on the path and nothing to train: guided steps, and q(ϑ) fitted to draws."""
        return cls(**{"family": Family(num_flows=0, guided=True)} | changes)

    @classmethod
    def paper(cls, unit: float = 1.0, **changes: object) -> "FitConfig":
        """The paper's preset; learning rate and α schedule are ours, the paper gives none."""
        ours = {"learning_rate": 5e-3, "tempering": 10.0, "num_steps": 3000, "num_samples": 50}
        printed = {"optimizer": "adam", "gradient": "total", "wide_samples": 0}
        printed["refits"] = 0
        printed["family"] = Family.paper(unit)
        return cls(**ours | printed | changes)


def _check_kinds(learning_rate: object, tempering: object, family: object) -> None:
    for name, value in (("learning_rate", learning_rate), ("tempering", tempering)):
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {value!r}.")
    if not isinstance(family, Family):
        raise TypeError(
            f"family must be a Family; got {family!r}. Write lib.Family(num_flows=2), say."
        )
