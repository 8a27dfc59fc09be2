"""The densities a model is given, p(ϑ) and p(x_0), made from torch distributions."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution

from lib.bounds import Bounds, natural_bounds, support
from lib.movable import Movable, moved
from lib.probe import check_keys, check_size, check_univariate, parse_x0

VARTHETA_HINT = "ϑ is the log of a positive θ: take Normal, or a dict from name to prior of θ."
THETA_HINT = "Take LogNormal or Gamma, or drop the name from positive_theta."
X0_HINT = "Take LogNormal, or drop the name from positive_state."


class VarthetaPrior(Movable):
    """p(ϑ) as one torch distribution over ϑ itself, as in the paper: no Jacobian."""

    def __init__(self, distribution: Distribution, bounds: Bounds) -> None:
        self.distribution, self.bounds = distribution, bounds

    def log_prob(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """log p(ϑ); independent dimensions are summed."""
        return _summed(self.distribution, vartheta)

    def sample(self, num_draws: int) -> Float[Tensor, "draws theta"]:
        """Draws of ϑ, from torch's default generator."""
        return self.distribution.sample((num_draws,))


class NaturalPrior(Movable):
    r"""p(ϑ) from independent priors of θ: :math:`Σ_j [\log p_j(θ_j) + \log dθ_j/dϑ_j]`."""

    def __init__(self, parts: Sequence[Distribution], bounds: Bounds) -> None:
        self.parts, self.bounds = tuple(parts), bounds

    def log_prob(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """log p(ϑ), its one Jacobian included."""
        theta = self.bounds.to_natural(vartheta).unbind(-1)
        total = self.bounds.log_slope(vartheta).sum(-1)
        for part, value in zip(self.parts, theta, strict=True):
            total = total + part.log_prob(value)
        return total

    def sample(self, num_draws: int) -> Float[Tensor, "draws theta"]:
        """Draws of ϑ, from torch's default generator."""
        theta = torch.stack([part.sample((num_draws,)) for part in self.parts], -1)
        return self.bounds.to_unconstrained(theta)


class InitialState(Movable):
    """x_0: each component fixed, or with a density.

    Args:
        spec: Numbers (p,), a torch distribution with batch + event shape (p,), or a dict from
            state name to number or univariate distribution.
        state_names: Names of the p components.
        positive: Which of them are positive.
    """

    def __init__(
        self, spec: object, state_names: tuple[str, ...], positive: tuple[bool, ...]
    ) -> None:
        p = len(state_names)
        self.value = torch.zeros(p, dtype=torch.float64)
        self.fixed = torch.zeros(p, dtype=torch.bool)
        self.parts: list[tuple[int | slice, Distribution]] = []
        if isinstance(spec, Distribution):
            check_size("x0", spec, state_names, "state_names")
            self.parts.append((slice(None), spec))
        elif isinstance(spec, Mapping):
            check_keys("x0", spec, state_names)
            for column, name in enumerate(state_names):
                self._add(column, name, spec[name])
        else:
            self.value, self.fixed = parse_x0(spec, state_names), ~self.fixed
        self.bounds = _state_bounds(self.parts, state_names, positive)
        self.parts = [(column, moved(part)) for column, part in self.parts]

    def _add(self, column: int, name: str, entry: object) -> None:
        if isinstance(entry, Distribution):
            check_univariate(f"x0['{name}']", entry)
            self.parts.append((column, entry))
        else:
            self.value[column] = parse_x0([entry], (name,))[0]
            self.fixed[column] = True

    def log_prob(self, x0: Float[Tensor, "*batch state"]) -> Float[Tensor, "*batch"]:
        """log p(x_0), over the components that have a density; 0 if none has."""
        total = x0.new_zeros(x0.shape[:-1])
        for column, part in self.parts:
            total = total + _summed(part, x0[..., column])
        return total

    def sample(self, num_draws: int) -> Float[Tensor, "draws state"]:
        """Draws of x_0, from torch's default generator; fixed components are repeated."""
        x0 = self.value.repeat(num_draws, 1)
        for column, part in self.parts:
            x0[:, column] = part.sample((num_draws,))
        return x0


def _state_bounds(
    parts: Sequence[tuple[int | slice, Distribution]],
    state_names: tuple[str, ...],
    positive: tuple[bool, ...],
) -> Bounds:
    """Where x_0 can be: where its density has mass, or where its state can be."""
    bounds = natural_bounds(torch.tensor(positive))
    for column, part in parts:
        role = "x0" if isinstance(column, slice) else f"x0['{state_names[column]}']"
        floor = bounds.low[column]
        found = support(role, part, floor.reshape(-1), X0_HINT)
        bounds.low[column], bounds.high[column] = found.low, found.high
    return Bounds(bounds.low, bounds.high)


def make_prior(
    spec: object, theta_names: tuple[str, ...], positive: Bool[Tensor, " theta"]
) -> VarthetaPrior | NaturalPrior:
    """p(ϑ) from what the user wrote: a distribution over ϑ, or a dict of natural-scale priors."""
    line = natural_bounds(positive)
    if isinstance(spec, Distribution):
        check_size("prior", spec, theta_names, "theta_names")
        found = support("prior", spec, torch.full_like(line.low, -math.inf), VARTHETA_HINT)
        if (found.low.isfinite() | found.high.isfinite()).any():
            raise ValueError(
                f"prior of ϑ must reach over the whole line; got ({found.low.max():g}, "
                f"{found.high.min():g}) from {type(spec).__name__}. {VARTHETA_HINT}"
            )
        return VarthetaPrior(moved(spec), line)
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"prior must be a torch distribution over ϑ, or a dict from name to distribution; got "
            f"{type(spec).__name__}."
        )
    check_keys("prior", spec, theta_names)
    found = []
    for name, floor in zip(theta_names, line.low, strict=True):
        check_univariate(f"prior['{name}']", spec[name])
        found.append(support(f"prior['{name}']", spec[name], floor[None], THETA_HINT))
    bounds = Bounds(torch.cat([b.low for b in found]), torch.cat([b.high for b in found]))
    return NaturalPrior([moved(spec[name]) for name in theta_names], bounds)


@contextmanager
def seeded(purpose: str, seed: int) -> Iterator[None]:
    """Torch's CPU generator set from (purpose, seed), and put back afterwards.

    The purpose gives each kind of draw its own stream: prior draws and path noise made with the
    same seed must not be the same numbers.
    """
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the accelerators.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        yield


def _summed(distribution: Distribution, value: Tensor) -> Tensor:
    log_prob = distribution.log_prob(value)
    return log_prob.sum(-1) if distribution.batch_shape else log_prob
