"""The last map of q(x | ϑ): x = h(u), from the whole line to where the state can be."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from lib.bounds import Bounds, natural_bounds

# Added to positive states: softplus underflows to 0 below -87 in float32, and log 0 breaks log β.
# A shift leaves the Jacobian exact; the posterior mass below it is nil.
POSITIVE_FLOOR = 1e-15
FAR = -30.0  # log softplus(u) is u to 13 digits below
SMALLEST_SOFT = 1e-14  # less than softplus(FAR)
SMALLEST = 1e-3  # above a lower end of x_0, where a fit starts


class StateMap(nn.Module):
    r"""h by time and component, for a positive state :math:`\frac14\text{softplus}(u)^2`, or u.

    Far from 0 that is u²/4: counts, whose diffusion is proportional to x, have a constant one in u
    (Lamperti's transform). Near 0 it is a log. With a unit, h is the paper's: unit·softplus(u), or
    unit·u.

    Where the density of x_0 has its mass elsewhere, as a uniform one does, h of the first time goes
    there: softplus above a lower end, a sigmoid between two.

    Args:
        positive: Which states are positive.
        num_times: Times of the path.
        start: Bounds of x_0 if the path includes it.
        unit: In which the states are measured, a constant; None for the square.
    """

    def __init__(
        self,
        positive: tuple[bool, ...],
        num_times: int,
        start: Bounds | None,
        unit: float | None = None,
    ) -> None:
        super().__init__()
        self.square, self.unit = unit is None, 1.0 if unit is None else unit
        soft = torch.tensor(positive)
        own = natural_bounds(soft)
        start = own if start is None else start
        self.narrow = not (torch.equal(start.low, own.low) and torch.equal(start.high, own.high))
        if self.narrow:
            first = (torch.arange(num_times) == 0)[:, None]
            soft, between = torch.where(first, start.one_end, soft), first & start.two_ends
            self.register_buffer("end", torch.where(first & start.one_end, start.start, 0.0))
            low = torch.where(between, start.low, -torch.inf)
            self.bounds = Bounds(low, torch.where(between, start.high, torch.inf))
        self.any_soft = soft.any().item()
        self.register_buffer("soft", soft)

    @property
    def affine(self) -> bool:
        """Whether h is a straight line at every time."""
        return not (self.any_soft or self.narrow)

    def forward(self, u: Float[Tensor, "*mc time state"]) -> tuple[Tensor, Tensor]:
        """x and log dx/du, which broadcasts with u."""
        x, log_slope = u, u.new_zeros(())
        if self.any_soft:
            soft, slope = softplus(u, threshold=40.0), logsigmoid(u)
            if self.square:
                # Log softplus(u) is u where softplus underflows, and its gradient would be NaN.
                log_soft = torch.where(u < FAR, u, soft.clamp(min=SMALLEST_SOFT).log())
                slope = slope + log_soft - math.log(2.0)
                soft = 0.25 * soft.square()
            x = torch.where(self.soft, soft + POSITIVE_FLOOR, u)
            log_slope = torch.where(self.soft, slope, torch.zeros_like(u))
        if self.unit != 1:
            x, log_slope = self.unit * x, log_slope + math.log(self.unit)
        if self.narrow:
            x = x + self.end
            x, log_slope = self.bounds.to_natural(x), log_slope + self.bounds.log_slope(x)
        return x, log_slope

    def inverse(self, x: Float[Tensor, "*draws time state"]) -> Float[Tensor, "*draws time state"]:
        """u from x; a first state beyond the bounds of x_0 is taken for one just inside."""
        if self.narrow:
            x = self.bounds.to_unconstrained(self.bounds.inside(x)) - self.end
            x = torch.where(self.soft, x.clamp(min=SMALLEST), x)
        x = x / self.unit
        soft = 2 * x.clamp(min=0.0).sqrt() if self.square else x
        return torch.where(self.soft, soft + torch.log(-torch.expm1(-soft)), x)
