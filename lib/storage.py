"""Files of fits: the weights of q, and what tells one posterior p(ϑ, x | y) from another."""

import io
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Distribution

from lib.data import Observations
from lib.family import Family
from lib.posterior import VariationalPosterior
from lib.priors import NaturalPrior
from lib.probe_data import as_path, existing_file
from lib.ssm import StateSpaceModel
from lib.start import Start

KEYS = {"weights", "family", "history", "verdict", "identity"}
SHOWN = 100  # characters of two values that a sentence shows whole
TOLERANCE = 1e-9  # another machine rounds a density differently
# What a difference of log densities at trial values tells a user.
MEANS = {
    "prior density": "log p of trial values",
    "x0 density": "log p of trial values",
    "transition density": "log p(x | θ) of trial paths: drift and diffusion",
    "observation density": "log p(y | x, θ) of trial paths: F and sigma",
}
SIZES = torch.logspace(-3, 4, 57, dtype=torch.float64)


def write(path: str | Path, content: dict[str, object]) -> None:
    """Write the content of a fit, beside the file first, so that no half of one is ever there."""
    path = as_path(path)
    if path.is_dir():
        raise ValueError(f"path must name a file; got the folder {path}. Add a name, as in fit.pt.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"path must be in a folder that is there; got {path}. Make {path.parent} first."
        )
    whole = io.BytesIO()
    torch.save(content, whole)
    try:
        _replace(path, whole.getvalue())
    except OSError as err:  # its name is that of the file beside
        raise OSError(err.errno, err.strerror, str(path)) from err


def _replace(path: Path, whole: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(whole)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | Path) -> dict:
    """Content of a fit's file, its tensors on the CPU wherever they were made."""
    rule = f"{path} must be a file written by FitResult.save; got"
    with existing_file(path).open("rb") as file:  # one that may not be read says so
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch's reader passes over the checksums
            file.seek(0)
            saved = None if damaged else torch.load(file, map_location="cpu", weights_only=True)
        except Exception as err:  # what the bytes of another file make the reader raise is open
            raise ValueError(f"{rule} another, or a part of one.") from err
    if damaged:
        raise ValueError(
            f"{rule} a damaged one: the checksum of {damaged} in it is wrong. Copy it again, or "
            "fit again."
        )
    if not isinstance(saved, dict) or set(saved) != KEYS:
        raise ValueError(f"{rule} another.")
    return saved


def rebuild(
    model: StateSpaceModel,
    observations: Observations,
    family: Family,
    weights: Mapping[str, Tensor],
) -> VariationalPosterior:
    """A q of its own with these weights, in their dtype."""
    # Any start will do: the weights and buffers replace all that is made of it.
    path = torch.ones(observations.num_steps + 1, model.num_states, dtype=torch.float64)
    theta = torch.ones(model.num_theta, dtype=torch.float64)
    start = Start(theta, theta, path, path)
    q = VariationalPosterior(model, observations.grid(), family, start, seed=0)
    q.to(weights["loc0"].dtype).load_state_dict(weights)
    return q


def check_columns(model: StateSpaceModel, observations: Observations) -> None:
    """As many columns of data as of F."""
    found = observations.y.shape[1]
    if found != model.num_observed:
        raise ValueError(
            f"F has {model.num_observed} columns, so the data need as many observed columns; got "
            f"{found}: {', '.join(observations.names)}."
        )


@torch.no_grad()
def identity(model: StateSpaceModel, observations: Observations) -> dict[str, object]:
    """What a fit must share with the model and the data that it is used with."""
    prior = model.prior
    priors = prior.parts if isinstance(prior, NaturalPrior) else (prior.distribution,)
    transition, observation = _joint_densities(model, observations)
    return {
        "theta_names": list(model.theta_names),
        "bounds": [model.bounds.low.tolist(), model.bounds.high.tolist()],
        "state_names": list(model.state_names),
        "positive_states": list(model.positive_states),
        "x0": [model.x0_fixed.tolist(), model.x0_value.tolist()],
        "t0": observations.t0,
        "dt": observations.dt,
        "number of observed columns": observations.y.shape[1],
        "times": observations.times.tolist(),
        "y": _numbers(observations.y),
        "prior density": [_densities(part) for part in priors],
        "x0 density": [_densities(part) for _, part in model.initial.parts],
        "transition density": transition,
        "observation density": observation,
    }


def difference(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    """The first thing in which a fit's identity (there) is another, in words; or nothing."""
    for key, value in here.items():
        if not _same(value, there[key]):
            meaning = f" ({MEANS[key]})" if key in MEANS else ""
            return f"{key}{meaning}; {_told(value, there[key])}"
    return ""


# Densities have no names to compare, so they are compared by their values at fixed points: many, as
# two may agree at one; of many sizes; and in no regular proportion, as they may be symmetric.


def _densities(part: Distribution) -> list:
    """log p at points ±SIZES, the components a little apart."""
    shape = part.batch_shape + part.event_shape
    line = torch.cat([-SIZES, SIZES]).reshape(-1, *[1] * len(shape))
    return _numbers(part.log_prob(line * (1 + 0.1 * _irregular(*shape))))


def _joint_densities(model: StateSpaceModel, observations: Observations) -> tuple[list, list]:
    """log p(x | θ) and log p(y | x, θ) of four paths over all times: small, large, of both signs.

    A missing reading counts as 0, so that what the model says of it shows too.
    """
    grid = observations.grid()
    wave = _irregular(4, len(grid.t), model.num_states)
    positive = torch.tensor(model.positive_states) | (torch.arange(4) < 2)[:, None, None]
    largest = float(grid.y.abs().max().clamp(min=1.0))
    size = torch.tensor([1.0, largest, 1.0, largest], dtype=torch.float64)[:, None, None]
    x = size * torch.where(positive, 0.75 + 0.25 * wave, wave)
    vartheta = _irregular(4, model.num_theta)
    terms = model.log_joint(vartheta, x, grid._replace(observed=torch.ones_like(grid.y)))
    return _numbers(terms.log_transition), _numbers(terms.log_observation)


def _irregular(*shape: int) -> Tensor:
    """Numbers between −1 and 1, the same on every machine."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).sin().reshape(shape)


def _numbers(values: Tensor) -> list:
    """As lists, with None for NaN, which would not equal itself."""
    if values.dim() > 1:
        return [_numbers(row) for row in values]
    return [None if v != v else v for v in values.tolist()]


def _same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-3 * TOLERANCE)
    return one == other


def _told(here: object, there: object) -> str:
    """Two values in words: whole if they are short, else where they first differ."""
    place = []
    while len(f"{here}{there}") > SHOWN and isinstance(here, list) and isinstance(there, list):
        if len(here) != len(there):
            return f"got {len(here)} entries, the fit has {len(there)}"
        i = next(i for i, pair in enumerate(zip(here, there, strict=True)) if not _same(*pair))
        here, there = here[i], there[i]
        place.append(str(i + 1))
    at = f", in entry {', '.join(place)}" if place else ""
    return f"got {here}, the fit has {there}{at}"
