"""The model linearised about a path: linear-Gaussian transitions and readings at any ϑ."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid
from lib.features import mean_sd
from lib.movable import moved
from lib.smoother import Chain, Readings, Transitions, smooth
from lib.ssm import StateSpaceModel
from lib.state_map import StateMap

STEP = 1e-4  # of central differences: exact but for rounding where the drift is linear
SMALLEST_SHARE = 1e-3  # of itself that a reading leaves of a positive state
NUM_X0 = 10_000


def range_map(model: StateSpaceModel, num_times: int, unit: float | None = None) -> StateMap:
    """h of the times that a path flow covers, the first of them x_0's if that is unknown.

    ``unit`` is that of a family without the chain.
    """
    bounds = model.initial.bounds if model.x0_random else None
    return StateMap(model.positive_states, num_times, bounds, unit)


class Linearised:
    r"""The law of :math:`u = h^{-1}(x)` given ϑ and the data, the model linearised about ``loc``.

    By Itô's formula u has drift and diffusion, with h' the slope of h,

    .. math:: a_u = \frac{a}{h'} - \frac12 \frac{h''}{h'^3} \beta_{jj}, \qquad
        \beta_u = \frac{\beta_{jk}}{h'_j h'_k},

    and its Euler step is :math:`u_i = u_{i-1} + a_u\,dt + N(0, β_u\,dt)`, a_u linear and β_u
    constant about loc. A reading is linearised at the nearest state that has it exactly: where its
    noise tends to 0, x is pinned to what was read. For a linear drift, constant β, real states and
    a known x_0 nothing of this is an approximation; a random u_0 counts as a normal, and a σ
    that is inferred as no larger than the spread of the data.

    Args:
        model: Any model; it is used in float64.
        grid: The data on the grid, likewise.
        loc: u of the times that a path flow covers.
    """

    def __init__(
        self, model: StateSpaceModel, grid: Grid, loc: Float[Tensor, "time state"]
    ) -> None:
        self.loc, device = loc.double(), loc.device
        self.model, self.dt = moved(model, torch.float64, device), grid.dt
        self.t = grid.t[:-1, None].to(self.loc)
        self.to_range = self._map(len(loc))
        self.first = self._map(1)
        x = self.to_range(self.loc)[0]
        # Which components of u_0 are known, where there is one.
        self.fixed = self.model.x0_fixed if model.x0_random else None
        if self.fixed is None:
            u0 = self.first.inverse(self.model.x0_value[None])
            self.u_before, self.u_after = torch.cat([u0, self.loc[:-1]]), self.loc
        else:
            x[0] = torch.where(self.fixed, self.model.x0_value, x[0])
            self.u_before, self.u_after = self.loc[:-1], self.loc[1:]
            self.prior = self._prior_of_start()
        self.map_before = self._map(len(self.u_before))
        self._read(grid, x)

    def _map(self, num_times: int) -> StateMap:
        return moved(range_map(self.model, num_times), torch.float64, self.loc.device)

    def _read(self, grid: Grid, x: Float[Tensor, "time state"]) -> None:
        """y = F'x + noise as H (u − loc) = y − F'x* + H (u* − loc), with u* = h⁻¹(x*)."""
        F = self.model.observation.F
        y, observed = (part[-len(x) :].to(x) for part in (grid.y, grid.observed))
        self.given = y
        near = x + torch.where(observed > 0, y - x @ F, 0.0) @ torch.linalg.pinv(F)
        positive = torch.tensor(self.model.positive_states, device=x.device)
        near = torch.where(positive, torch.maximum(near, SMALLEST_SHARE * x), near)
        free = torch.ones_like(x, dtype=torch.bool)
        if self.fixed is not None:
            free[0] = ~self.fixed
        near = torch.where(free, near, x)
        u = torch.where(free, self.to_range.inverse(near), self.loc)
        self.H = F.mT * (self.to_range(u)[1].exp() * free)[:, None]
        rest = y - near @ F + torch.einsum("tos,ts->to", self.H, (u - self.loc) * free)
        self.y = torch.where(observed > 0, rest, 0.0)
        self.seen = [row.nonzero()[:, 0].tolist() for row in observed.cpu()]
        observation = self.model.observation
        self.inferred = callable(observation.sigma) or bool(observation.theta_names)
        self.largest = mean_sd(grid)[1].to(x)

    @torch.no_grad()
    def __call__(self, vartheta: Float[Tensor, "mc theta"]) -> Chain:
        """The chain of u − loc for each ϑ."""
        theta = self.model.to_theta(vartheta.double())
        chain = smooth(self.transitions(theta), self.readings(theta))
        if self.fixed is not None:
            for part in (chain.log_diag, chain.mean, chain.log_sd):
                part[:, 0].masked_fill_(self.fixed[:, None], 0.0)
            chain.a[:, :, 0].masked_fill_(self.fixed[:, None, None], 0.0)
        return chain

    def readings(self, theta: Float[Tensor, "mc theta"]) -> Readings:
        """Of u − loc."""
        sigma = self.model.observation.scale(self.model.named(theta))
        sigma = sigma.expand(len(theta), self.y.shape[1])
        if self.inferred:
            # Noise beyond the spread of the data would leave the path to wander where none can go.
            sigma = torch.minimum(sigma, self.largest)
        return Readings(self.y, self.H, sigma.square().mT, self.seen)

    def transitions(self, theta: Float[Tensor, "mc theta"]) -> Transitions:
        """Of u − loc."""
        u, mc, (n, p) = self.u_before, len(theta), self.u_before.shape
        step = STEP * u.abs().clamp(min=1.0)
        moves = torch.diag_embed(step).movedim(-1, 0)
        points = torch.cat([u[None], u + moves, u - moves])[:, None]
        drift, beta = self._ito(points, theta[:, None])
        here, up, down = drift.expand(2 * p + 1, mc, n, p).split([1, p, p])
        F = ((up - down) / (2 * step.mT[:, None, :, None])).permute(2, 3, 0, 1)
        F = self.dt * F + torch.eye(p).to(F)[:, :, None]
        c = (u + self.dt * here[0] - self.u_after).permute(1, 2, 0)
        Q = self.dt * beta[0].expand(mc, n, p, p).permute(1, 2, 3, 0)
        if self.fixed is not None:
            mean, variance = (part[None, ..., None] for part in self.prior)
            F = torch.cat([torch.zeros_like(F[:1]), F])
            c = torch.cat([mean.expand_as(c[:1]), c])
            Q = torch.cat([variance.expand_as(Q[:1]), Q])
        return Transitions(F.contiguous(), c.contiguous(), Q.contiguous())

    def _ito(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Drift and diffusion of u at the times of steps."""
        sde, (x, log_slope) = self.model.sde, self.map_before(u)
        slope = log_slope.exp().expand_as(u)
        arguments = sde.aligned(self.t, x, theta)
        drift = sde.drift(*arguments) / slope
        beta = sde.diffusion(*arguments) / (slope[..., None] * slope[..., None, :])
        if self.to_range.affine:
            return drift, beta
        bend = (self.map_before(u + STEP)[1] - self.map_before(u - STEP)[1]) / (2 * STEP)
        return drift - 0.5 * bend * beta.diagonal(dim1=-2, dim2=-1), beta

    def _prior_of_start(self) -> tuple[Float[Tensor, " state"], Float[Tensor, "state state"]]:
        """Median of u_0 − loc and its spread squared, as of a normal."""
        x0 = self.model.sample_x0(NUM_X0, seed=0).to(self.loc)
        u = torch.where(self.fixed, self.loc[0], self.first.inverse(x0[:, None])[:, 0])
        low, median, high = u.quantile(torch.tensor([0.16, 0.5, 0.84]).to(u), dim=0)
        return median - self.loc[0], torch.diag((0.5 * (high - low)).square())
