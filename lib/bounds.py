"""Where an unknown number lives, (low, high), and the unconstrained number that stands for it."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, TransformedDistribution, VonMises
from torch.nn.functional import logsigmoid

MARGIN = 1e-3  # share of an interval that ``inside`` keeps from its ends


class Bounds(nn.Module):
    r"""Intervals (low, high), and their maps from the whole line.

    =============  ====================================  ==================================
    interval       θ                                     log dθ/dϑ
    =============  ====================================  ==================================
    (-∞, ∞)        ϑ                                     0
    (low, ∞)       low + exp ϑ                           ϑ
    (low, high)    low + (high - low) · sigmoid(ϑ)       log(high - low) + log s(ϑ) + log s(-ϑ)
    =============  ====================================  ==================================

    Args:
        low: Lower ends, -inf where there is none.
        high: Upper ends, inf where there is none.
    """

    def __init__(self, low: Float[Tensor, "*theta"], high: Float[Tensor, "*theta"]) -> None:
        super().__init__()
        one_end, two_ends = low.isfinite() & high.isinf(), low.isfinite() & high.isfinite()
        self.any_two_ends = bool(two_ends.any())
        # Numbers that may be computed with where there is no end.
        start = low.masked_fill(low.isinf(), 0.0)
        width = (high - start).masked_fill(~two_ends, 1.0)
        numbers = {"low": low, "high": high, "start": start, "width": width}
        for name, value in {**numbers, "one_end": one_end, "two_ends": two_ends}.items():
            self.register_buffer(name, value)

    def to_natural(self, vartheta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """θ from ϑ."""
        # Filled first: exp of a large real component would be inf, and its zero gradient NaN.
        positive = vartheta.masked_fill(~self.one_end, 0.0).exp() + self.start
        theta = torch.where(self.one_end, positive, vartheta)
        if not self.any_two_ends:
            return theta
        between = self.start + self.width * torch.sigmoid(vartheta)
        # Rounding must not reach an end: the density there may be 0 or infinite.
        low, high = torch.nextafter(self.low, self.high), torch.nextafter(self.high, self.low)
        return torch.where(self.two_ends, between.clamp(low, high), theta)

    def to_unconstrained(self, theta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """ϑ from θ; NaN outside the interval. Rounded to an end of two counts as just inside."""
        above = theta - self.start
        vartheta = torch.where(self.one_end, above.masked_fill(~self.one_end, 1.0).log(), theta)
        share = (above / self.width).masked_fill(~self.two_ends, 0.5)
        eps = torch.finfo(share.dtype).eps
        share = torch.where((share - 0.5).abs() <= 0.5, share.clamp(eps, 1 - eps), share)
        return torch.where(self.two_ends, torch.logit(share), vartheta)

    def log_slope(self, vartheta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """log dθ/dϑ of each component."""
        slope = vartheta * self.one_end
        if not self.any_two_ends:
            return slope
        between = self.width.log() + logsigmoid(vartheta) + logsigmoid(-vartheta)
        return torch.where(self.two_ends, between, slope)

    def contain(self, theta: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Whether each number lies within its interval, its ends left out."""
        return (theta > self.low) & (theta < self.high)

    def inside(self, theta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The number, or the nearest that lies well within an interval with two ends."""
        margin = MARGIN * self.width
        clamped = theta.clamp(self.low + margin, self.high - margin)
        return torch.where(self.two_ends, clamped, theta)

    def label(self, name: str, j: int) -> str:
        """Name of ϑ_j: log or logit of the parameter, or of what it is beyond its lower end."""
        low, high = self.low[j].item(), self.high[j].item()
        if self.one_end[j]:
            return f"log {name}" if low == 0 else f"log({name} − {low:g})"
        return f"logit {name} in ({low:g}, {high:g})" if self.two_ends[j] else name


def natural_bounds(positive: Bool[Tensor, " theta"]) -> Bounds:
    """(0, ∞) for what is positive, else the whole line."""
    low = torch.where(positive, 0.0, -torch.inf).double()
    return Bounds(low, torch.full_like(low, torch.inf))


def support(
    role: str, distribution: Distribution, floor: Float[Tensor, " theta"], hint: str
) -> Bounds:
    """Where a distribution has its mass, above ``floor``.

    Raises:
        ValueError: If that is nowhere; if the distribution is discrete, or lives on something other
            than intervals; or if it is bounded above alone.
    """
    low, high = (end.expand(floor.shape) for end in _ends(role, distribution))
    got = f"got ({low.min():g}, {high.max():g}) from {type(distribution).__name__}. {hint}"
    low = torch.maximum(low, floor)
    if (low >= high).any():
        raise ValueError(f"{role} must have mass in ({floor.max():g}, inf); {got}")
    if (low.isinf() & high.isfinite()).any():
        raise ValueError(f"{role} must not be bounded above alone; {got}")
    return Bounds(low, high)


def _ends(role: str, distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Lower and upper end; the whole line where the distribution does not say."""
    if isinstance(distribution, Independent):
        return _ends(role, distribution.base_dist)
    if isinstance(distribution, VonMises):  # torch says the whole line; its draws are angles
        return _number(-math.pi), _number(math.pi)
    if _elementwise(distribution):
        # Torch takes the image of every affine map for the whole line.
        ends = _ends(role, distribution.base_dist)
        for transform in distribution.transforms:
            ends = tuple(transform(end) for end in ends)
        return torch.minimum(*ends).double(), torch.maximum(*ends).double()
    try:
        constraint = distribution.support
    except NotImplementedError:
        return _number(-math.inf), _number(math.inf)
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    if constraint.is_discrete or constraint.event_dim:
        raise ValueError(
            f"{role} must have a density on an interval for each number; got {constraint} from "
            f"{type(distribution).__name__}."
        )
    low = getattr(constraint, "lower_bound", -math.inf)
    return _number(low), _number(getattr(constraint, "upper_bound", math.inf))


def _elementwise(distribution: Distribution) -> bool:
    """Whether it is a base sent through maps of one number that all rise or fall."""
    plain = TransformedDistribution.support
    return getattr(type(distribution), "support", None) is plain and all(
        t.bijective and t.domain.event_dim == 0 for t in distribution.transforms
    )


def _number(value: object) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()
