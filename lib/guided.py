"""Guided proposal: the model's own steps, steered to the readings ahead by the linearised model."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.linearised import SMALLEST_SHARE, Linearised
from lib.maf import LOG_2PI
from lib.movable import moved
from lib.smoother import FLOOR, Readings, Transitions, apply, factor, inverse, product
from lib.state_map import POSITIVE_FLOOR, StateMap

NOTHING_CUT = 10.0  # standard deviations to an end, beyond which lies nothing in float64


class Guide(NamedTuple):
    r"""How the readings after each time pull at :math:`v = h^{-1}(x) - \text{loc}` there.

    For each ϑ the linearised model's likelihood of them is
    :math:`\exp(-\frac12 v'\,\text{precision}\,v + v'\,\text{pull})` up to a constant.
    """

    precision: Float[Tensor, "state state time mc"]
    pull: Float[Tensor, "state time mc"]
    theta: Float[Tensor, "theta mc"]
    r: Float[Tensor, "obs mc"]


class Guided:
    r"""q(x | ϑ) of guided steps (Whitaker et al. 2017; van der Meulen and Schauer 2017).

    .. math:: q(x_i|x_{i-1}) \propto N(x_i;\,x_{i-1} + a\,dt,\,\beta\,dt)\;\rho_i(x_i)

    The first factor is the model's own step, a and β where the path is; ρ_i is the likelihood of
    a reading at t_i, and of those after it under the model linearised in :math:`u = h^{-1}(x)`
    about a path, taken as a normal in x about the step's mean. So q is an autoregressive flow whose
    shifts and scales the model gives, with the diffusion of the posterior however fine the grid; of
    a linear model it is the posterior. For a positive state each step's normal is cut at 0.

    Args:
        linear: The linearised model.
    """

    def __init__(self, linear: Linearised) -> None:
        self.linear, self.model, self.dt = linear, linear.model, linear.dt
        device = linear.loc.device
        self.positive = torch.tensor(self.model.positive_states, device=device)[:, None]
        self.map = moved(StateMap(self.model.positive_states, 1, None), torch.float64, device)

    @torch.no_grad()
    def __call__(self, vartheta: Float[Tensor, "mc theta"]) -> Guide:
        """The guide at each ϑ."""
        theta = self.model.to_theta(vartheta.double())
        readings = self.linear.readings(theta)
        ahead = look_ahead(self.linear.transitions(theta), readings)
        return Guide(*ahead, theta.mT.contiguous(), readings.r.contiguous())

    @torch.no_grad()
    def draw(
        self, guide: Guide, noise: Float[Tensor, "mc time state"]
    ) -> tuple[Float[Tensor, "mc time state"], Float[Tensor, " mc"]]:
        """Paths without x_0 if that is known, and their log density."""
        z = noise.double().permute(1, 2, 0)
        x, log_q, path = self.model.x0_value[:, None].expand(-1, len(noise)), 0.0, []
        for i, z_i in enumerate(z.unbind()):
            first = i == 0 and self.linear.fixed is not None
            x, log_density = self._start(z_i, guide) if first else self._step(i, x, z_i, guide)
            log_q = log_q + log_density
            path.append(x)
        return torch.stack(path).permute(2, 0, 1), log_q

    def _start(
        self, z: Tensor, guide: Guide
    ) -> tuple[Float[Tensor, "state mc"], Float[Tensor, " mc"]]:
        """x_0 as a normal in u, and its log density."""
        mean, variance = (
            part[..., None].expand(*part.shape, z.shape[1]) for part in self.linear.prior
        )
        linear, precision, pull = self.linear, guide.precision[:, :, 0], guide.pull[:, 0]
        for k in linear.seen[0]:
            reading = linear.H[0, k], linear.y[0, k], guide.r[k]
            precision, pull = read(precision, pull, *reading, variance)
        move, tril = steered(variance, precision, pull - apply(precision, mean))
        u = self.linear.loc[0, :, None] + mean + move + apply(tril, z)
        at = u.mT[:, None]
        x, log_slope = (part.expand_as(at)[:, 0].mT for part in self.linear.first(at))
        log_q = -0.5 * (z.square() + LOG_2PI) - tril.diagonal().mT.log() - log_slope
        fixed = linear.fixed[:, None]
        x = torch.where(fixed, self.model.x0_value[:, None], x)
        return x, log_q.masked_fill(fixed, 0.0).sum(0)

    def _step(
        self, i: int, x: Tensor, z: Tensor, guide: Guide
    ) -> tuple[Float[Tensor, "state mc"], Float[Tensor, " mc"]]:
        """The state at the i-th time from that before, and its log density."""
        sde, time = self.model.sde, self.linear.t[i - (self.linear.fixed is not None)]
        arguments = sde.aligned(time, x.mT, guide.theta.mT)
        mean = x + self.dt * sde.drift(*arguments).expand_as(x.mT).mT
        beta = self.dt * sde.diffusion(*arguments).expand(x.shape[1], -1, -1).permute(1, 2, 0)
        # About the mean, v is linear in x.
        near = torch.where(self.positive, torch.maximum(mean, SMALLEST_SHARE * x), mean)
        u = self.map.inverse(near.mT[:, None])
        slope = self.map(u)[1].exp().expand_as(u)[:, 0].mT
        v = u[:, 0].mT - self.linear.loc[i, :, None] + (mean - near) / slope
        precision = guide.precision[:, :, i]
        pull = (guide.pull[:, i] - apply(precision, v)) / slope
        precision = precision / (slope * slope[:, None])
        # A reading of this very time is linear in x.
        for k in self.linear.seen[i]:
            f = self.model.observation.F[:, k]
            reading = f, self.linear.given[i, k] - f @ mean, guide.r[k]
            precision, pull = read(precision, pull, *reading, beta)
        return self._cut(mean, *steered(beta, precision, pull), z)

    def _cut(
        self, mean: Tensor, move: Tensor, tril: Tensor, z: Tensor
    ) -> tuple[Float[Tensor, "state mc"], Float[Tensor, " mc"]]:
        """A draw of a normal, component after component cut at 0 if positive; its log density."""
        x, standard, log_q = [], [], torch.zeros_like(z[0])
        for j, positive in enumerate(self.model.positive_states):
            sd, centre, t = tril[j, j], mean[j] + move[j], z[j]
            for k, value in enumerate(standard):
                centre = centre + tril[j, k] * value
            if positive:
                t, log_mass = above(-centre / sd, t)
                log_q = log_q - log_mass
            log_q = log_q - 0.5 * (t.square() + LOG_2PI) - sd.log()
            value = centre + sd * t
            x.append(value.clamp(min=POSITIVE_FLOOR) if positive else value)
            standard.append(t)
        return torch.stack(x), log_q


def look_ahead(model: Transitions, data: Readings) -> tuple[Tensor, Tensor]:
    r"""Precision and pull of the readings after each time, by a run back in time.

    A reading y = h'v + noise of variance r adds hh'/r and hy/r. Over a step v' = Fv + c + N(0, Q),
    with :math:`Q = LL'` and :math:`C = I + L'AL`, (A, b) become

    .. math:: F'(A - ALC^{-1}L'A)F, \quad F'(b - ALC^{-1}L'b - (A - ALC^{-1}L'A)c).
    """
    F, c, Q = model
    A, b = torch.zeros_like(Q[0]), torch.zeros_like(c[0])
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)[..., None]
    precisions, pulls = [], []
    for i in reversed(range(len(c))):
        precisions.append(A)
        pulls.append(b)
        for k in data.seen[i]:
            A, b = read(A, b, data.H[i, k], data.y[i, k], data.r[k], Q[i])
        tril = factor(Q[i])
        AL = product(A, tril)
        gain = product(AL, inverse(eye + product(tril.transpose(0, 1), AL)))
        A = A - product(gain, AL.transpose(0, 1))
        b = b - apply(gain, apply(tril.transpose(0, 1), b)) - apply(A, c[i])
        back = F[i].transpose(0, 1)
        A, b = product(product(back, A), F[i]), apply(back, b)
    return torch.stack(precisions[::-1], 2), torch.stack(pulls[::-1], 1)


def read(
    precision: Tensor, pull: Tensor, h: Tensor, y: Tensor, r: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Precision and pull with y = h'v + noise of variance r, where v has that variance before."""
    h = h[:, None]
    # More would lose all else that is known to rounding.
    r = torch.maximum(r, FLOOR * (h * apply(variance, h)).sum(0))
    return precision + h[:, None] * h / r, pull + h * (y / r)


def steered(
    beta: Float[Tensor, "state state mc"],
    precision: Float[Tensor, "state state mc"],
    pull: Float[Tensor, "state mc"],
) -> tuple[Float[Tensor, "state mc"], Float[Tensor, "state state mc"]]:
    """Mean and Cholesky factor of N(v; 0, β)·exp(−½ v'Av + v'b), normalised."""
    tril = factor(beta)
    eye = torch.eye(len(pull), dtype=pull.dtype, device=pull.device)[..., None]
    inner = eye + product(tril.transpose(0, 1), product(precision, tril))
    V = product(product(tril, inverse(inner)), tril.transpose(0, 1))
    return apply(V, pull), factor(V)


def above(low: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A standard normal above ``low``, increasing in the noise z, and the log of its mass there."""
    mass = torch.special.ndtr(-low)
    rest = mass * torch.special.ndtr(-z)
    # Where nothing is cut, z itself: the inverse would round it.
    return torch.where(low < -NOTHING_CUT, z, -torch.special.ndtri(rest)), mass.log()
