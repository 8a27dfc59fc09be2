"""The densities a model is given, p(ϑ) and p(x_0), made from torch distributions."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint

from lib.probe import check_keys, check_size, check_support, check_univariate, parse_x0
from lib.sde import SDE

VARTHETA_HINT = "ϑ is the log of a positive θ: take Normal, or a dict from name to prior of θ."
THETA_HINT = (
    "Take Normal, or LogNormal and positive_theta; let the SDE bound a parameter by sigmoid(u)."
)
X0_HINT = "Take Normal, or LogNormal and positive_state."


class Movable:
    """Marks a class whose tensors ``moved`` looks for."""


class VarthetaPrior(Movable):
    """p(ϑ) as one torch distribution over ϑ itself, as in the paper: no Jacobian."""

    def __init__(self, distribution: Distribution) -> None:
        self.distribution = distribution

    def log_prob(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """log p(ϑ); independent dimensions are summed."""
        return _summed(self.distribution, vartheta)

    def sample(self, num_draws: int) -> Float[Tensor, "draws theta"]:
        """Draws of ϑ, from torch's default generator."""
        return self.distribution.sample((num_draws,))


class NaturalPrior(Movable):
    r"""p(ϑ) from independent priors of θ: :math:`Σ_j \log p_j(θ_j) + Σ_{j\,positive} ϑ_j`."""

    def __init__(self, parts: Sequence[Distribution], positive: Bool[Tensor, " theta"]) -> None:
        self.parts, self.positive = tuple(parts), positive
        self.jacobian = positive.to(torch.float64)

    def log_prob(self, vartheta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """log p(ϑ); |dθ/dϑ| = exp(ϑ) for a positive parameter, 1 otherwise."""
        theta = to_natural(vartheta, self.positive).unbind(-1)
        total = (vartheta * self.jacobian).sum(-1)
        for part, value in zip(self.parts, theta, strict=True):
            total = total + part.log_prob(value)
        return total

    def sample(self, num_draws: int) -> Float[Tensor, "draws theta"]:
        """Draws of ϑ, from torch's default generator."""
        theta = torch.stack([part.sample((num_draws,)) for part in self.parts], -1)
        return to_unconstrained(theta, self.positive)


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
            check_support("x0", spec, 0.0 if all(positive) else -math.inf, X0_HINT)
            self.parts.append((slice(None), spec))
        elif isinstance(spec, Mapping):
            check_keys("x0", spec, state_names)
            for column, name in enumerate(state_names):
                self._add(column, name, spec[name], 0.0 if positive[column] else -math.inf)
        else:
            self.value, self.fixed = parse_x0(spec, state_names), ~self.fixed
        self.parts = [(column, moved(part)) for column, part in self.parts]

    def _add(self, column: int, name: str, entry: object, low: float) -> None:
        if isinstance(entry, Distribution):
            check_univariate(f"x0['{name}']", entry)
            check_support(f"x0['{name}']", entry, low, X0_HINT)
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


def make_prior(
    spec: object, theta_names: tuple[str, ...], positive: Bool[Tensor, " theta"]
) -> VarthetaPrior | NaturalPrior:
    """p(ϑ) from what the user wrote: a distribution over ϑ, or a dict of natural-scale priors."""
    if isinstance(spec, Distribution):
        check_size("prior", spec, theta_names, "theta_names")
        check_support("prior", spec, -math.inf, VARTHETA_HINT)
        return VarthetaPrior(moved(spec))
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"prior must be a torch distribution over ϑ, or a dict from name to distribution; got "
            f"{type(spec).__name__}."
        )
    check_keys("prior", spec, theta_names)
    for name, is_positive in zip(theta_names, positive.tolist(), strict=True):
        role = f"prior['{name}']"
        check_univariate(role, spec[name])
        check_support(role, spec[name], 0.0 if is_positive else -math.inf, THETA_HINT)
    return NaturalPrior([moved(spec[name]) for name in theta_names], positive)


def to_natural(
    vartheta: Float[Tensor, "*batch theta"], positive: Bool[Tensor, " theta"]
) -> Float[Tensor, "*batch theta"]:
    """θ from ϑ: exp of the positive components."""
    # Filled first: exp of a large real component would be inf, and its zero gradient NaN.
    return torch.where(positive, vartheta.masked_fill(~positive, 0.0).exp(), vartheta)


def to_unconstrained(
    theta: Float[Tensor, "*batch theta"], positive: Bool[Tensor, " theta"]
) -> Float[Tensor, "*batch theta"]:
    """ϑ from θ: log of the positive components."""
    return torch.where(positive, theta.masked_fill(~positive, 1.0).log(), theta)


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


def moved(
    value: object,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    memo: dict | None = None,
) -> object:
    """Copy of a model, distribution or SDE with every floating tensor in it moved.

    Looks into lists, tuples, dicts, modules, torch distributions and transforms, SDEs (their class
    attributes too); anything else is shared. Distributions no longer validate their arguments.
    """
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        dtype = dtype if value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=dtype, copy=True)
    if type(value) in (list, tuple):
        return type(value)(moved(item, dtype, device, memo) for item in value)
    if type(value) is dict:
        return {key: moved(item, dtype, device, memo) for key, item in value.items()}
    if not isinstance(value, Movable | Distribution | Transform | Constraint | SDE | nn.Module):
        return value
    # A transform and its inverse refer to each other, hence the memo.
    if id(value) not in memo:
        memo[id(value)] = twin = object.__new__(type(value))
        for name, item in {**_class_tensors(value), **vars(value)}.items():
            twin.__dict__[name] = moved(item, dtype, device, memo)
        if isinstance(value, Distribution):
            twin.__dict__["_validate_args"] = False
    return memo[id(value)]


def _class_tensors(value: object) -> dict[str, Tensor]:
    """Tensors that a user wrote as class attributes."""
    return {
        name: item
        for kind in reversed(type(value).__mro__)
        for name, item in vars(kind).items()
        if isinstance(item, Tensor)
    }


def _summed(distribution: Distribution, value: Tensor) -> Tensor:
    log_prob = distribution.log_prob(value)
    return log_prob.sum(-1) if distribution.batch_shape else log_prob
