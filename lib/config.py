"""How to fit: the options of training and of the variational family, with both presets."""

from dataclasses import dataclass, field

import torch

from lib.family import Family

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHOICES = {
    "dtype": tuple(DTYPES),
    "optimizer": ("muon", "adam"),
    "gradient": ("path", "total"),
}


@dataclass(frozen=True)
class FitConfig:
    """How to fit. The defaults are the `study` preset; ``FitConfig.paper()`` the paper's.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``, of the training alone: draws are always float64.
        threads: CPU threads.
        num_steps: Optimiser steps; the run is exactly that long, because the decay needs it.
        num_samples: Monte Carlo draws n of each step.
        wide_samples: Further draws, which train q(x | ϑ) alone at ϑ from the tails of q(ϑ).
        refits: Rounds in which q(ϑ) is fitted to weighted draws, the last at the run's end.
        learning_rate: Peak, reached after a warm-up, then cosine decay.
        optimizer: ``"muon"`` for the matrices of the path's networks and Adam for the rest, or
            ``"adam"`` for all.
        gradient: ``"path"``, the path gradient once warmed up, or ``"total"``, the plain one.
        tempering: Initial α on log q(ϑ), falling linearly to 1 at half of the run; 1 is none.
        log_every: Steps between two looks at the ELBO.
        mode: How a step runs; ``"eager"`` is the only way so far.
        family: Options of the variational family.
    """

    dtype: str = "float32"
    threads: int = 1
    num_steps: int = 2700
    num_samples: int = 20
    learning_rate: float = 1e-2
    wide_samples: int = 9
    refits: int = 3
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
        if self.mode != "eager":
            raise ValueError(f"mode must be 'eager'; got {self.mode!r}. No other is built yet.")
        for name in ("threads", "num_steps", "num_samples", "log_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}.")
        for name in ("wide_samples", "refits"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number, 0 or more; got {value!r}.")
        if not self.tempering >= 1:
            raise ValueError(f"tempering must be 1 (none) or more; got {self.tempering}.")

    @classmethod
    def paper(cls, unit: float = 1.0, **changes: object) -> "FitConfig":
        """The paper's preset; learning rate and α schedule are ours, the paper gives none."""
        ours = {"learning_rate": 5e-3, "tempering": 10.0, "num_steps": 3000, "num_samples": 50}
        printed = {"optimizer": "adam", "gradient": "total", "wide_samples": 0}
        printed["refits"] = 0
        printed["family"] = Family.paper(unit)
        return cls(**ours | printed | changes)
