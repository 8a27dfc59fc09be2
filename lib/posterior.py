"""The variational posterior q(ϑ, x) = q(ϑ) q(x | ϑ) (section 3; eqs. 11-16)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from lib.data import Grid
from lib.features import centred_features, past_features
from lib.gauss_markov import GaussMarkov
from lib.local_iaf import LocalIAF
from lib.maf import LOG_2PI, MAF
from lib.ssm import StateSpaceModel
from lib.start import Start

# Added to positive states: softplus underflows to 0 below -87 in float32, and log 0 breaks log β.
# A shift leaves the Jacobian exact; the posterior mass below it is nil.
POSITIVE_FLOOR = 1e-15

# How far out q(x | ϑ) is trained, in units of the spread of q(ϑ).
WIDENING = 2.0


@dataclass(frozen=True)
class Family:
    """Options of q; the defaults are the `study` preset, ``Family.paper()`` the other one.

    Attributes:
        receptive_field: Window k of each local IAF and of the features, in grid steps.
        num_flows: Number m of local IAFs; every second one runs backwards in time.
        hidden: Width of each hidden layer.
        layers: Hidden layers of each network.
        gate: ``"unbounded"`` z·exp(s) + μ, or ``"sigmoid"`` σz + (1 − σ)μ as printed.
        features: ``"centred"`` windows with masks and clocks, or ``"past"`` as printed.
        scaling: ``"learned"`` loc and scale per time, or ``"constant"``: one unit for all.
        unit: That unit; 1 is the paper's x = h(z).
        standardise_theta: Networks see (ϑ − loc)/scale instead of ϑ.
        taps: Linear paths whose weights depend on ϑ, in the base and in each local IAF.
        coupling: Same-time lower-triangular coupling for p > 1.
        base: Gauss-Markov base below the local IAFs.
        theta_flows: IAF steps of q(ϑ).
        theta_hidden: Width of the two hidden layers of each.
    """

    receptive_field: int = 10
    num_flows: int = 2
    hidden: int = 20
    layers: int = 2
    gate: str = "unbounded"
    features: str = "centred"
    scaling: str = "learned"
    unit: float = 1.0
    standardise_theta: bool = True
    taps: bool = True
    coupling: bool = True
    base: bool = True
    theta_flows: int = 3
    theta_hidden: int = 32

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        if self.coupling and self.gate == "sigmoid":
            raise ValueError("coupling needs gate 'unbounded'; got 'sigmoid'. Set coupling=False.")
        for name in ("receptive_field", "hidden", "layers", "theta_hidden", "unit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        for name in ("num_flows", "theta_flows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}.")

    @classmethod
    def paper(cls, unit: float = 1.0) -> "Family":
        """The family as printed, but for the slips that the README lists."""
        return cls(
            receptive_field=10,
            num_flows=5,
            hidden=20,
            layers=5,
            gate="sigmoid",
            features="past",
            scaling="constant",
            unit=unit,
            standardise_theta=False,
            taps=False,
            coupling=False,
            base=False,
        )


_CHOICES = {
    "gate": ("unbounded", "sigmoid"),
    "features": ("centred", "past"),
    "scaling": ("learned", "constant"),
}


class Noise(NamedTuple):
    """Standard normal noise of one Monte Carlo batch: for ϑ (mc, d), for the path (mc, T, p)."""

    theta: Float[Tensor, "mc theta"]
    path: Float[Tensor, "mc time state"]


class Sample(NamedTuple):
    """Draws of q with their log densities; x holds x_0 first."""

    vartheta: Float[Tensor, "mc theta"]
    x: Float[Tensor, "mc time state"]
    log_q_theta: Float[Tensor, " mc"]
    log_q_x: Float[Tensor, " mc"]


class TimedFlow(NamedTuple):
    """A flow over time with its features, in the direction in which it runs."""

    flow: nn.Module
    features: Float[Tensor, "time features"]
    backwards: bool

    def turn(self, series: Float[Tensor, "mc time state"]) -> Float[Tensor, "mc time state"]:
        """The series as the flow sees it, and back."""
        return series.flip(1) if self.backwards else series

    def __call__(self, z: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(z', log diagonal), both in the order of time."""
        out, log_diag = self.flow(self.turn(z), self.features, seen)
        return self.turn(out), self.turn(log_diag)

    def solve_transposed(self, g: Tensor, z: Tensor, seen: Tensor, free: Tensor) -> Tensor:
        """The w with J'w = g, J = dz'/dz at z, over the components that are free."""
        turned = (self.turn(a) for a in (g, z, free[None]))
        return self.turn(self.flow.solve_transposed(*turned, self.features, seen))


class VariationalPosterior(nn.Module):
    r"""q(ϑ) a MAF; q(x | ϑ) a Gauss-Markov base, local IAFs in alternating directions, then h.

    .. math:: \log q(x|\vartheta) = \sum\log N(z^0) - \sum_{\text{layers}}\sum\log\text{diag}\,L
        - \sum\log\text{scale} - \sum\log h'

    Args:
        model: Supplies sizes, which states are positive and what is known of x_0.
        grid: The data on the grid.
        family: Options of the flows.
        start: Where loc and scale start.
        seed: Of the weights and permutations; the global generator is left untouched.
    """

    def __init__(
        self, model: StateSpaceModel, grid: Grid, family: Family, start: Start, seed: int
    ) -> None:
        super().__init__()
        self.family, self.positive_states = family, model.positive_states
        self.first = 0 if model.x0_random else 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(model, grid, start)
        self.to(grid.y.dtype)

    def _build(self, model: StateSpaceModel, grid: Grid, start: Start) -> None:
        family, p, d = self.family, model.num_states, model.num_theta
        self.theta_flow = MAF(
            d, family.theta_flows, (family.theta_hidden,) * 2, start.vartheta, start.vartheta_sd
        )
        ahead, behind = _features(grid, family, self.first)
        self.register_buffer("features_ahead", ahead)
        self.register_buffer("features_behind", behind)
        sizes, hidden = (p, ahead.shape[-1], d), (family.hidden,) * family.layers
        self.base = GaussMarkov(*sizes, hidden, family.taps) if family.base else None
        options = {"gate": family.gate, "coupling": family.coupling, "taps": family.taps}
        self.layers = nn.ModuleList(
            LocalIAF(*sizes, window=family.receptive_field, hidden=hidden, **options)
            for _ in range(family.num_flows)
        )
        free = torch.ones_like(start.path[self.first :])
        if self.first == 0:
            free[0] = (~model.x0_fixed).to(free)
        loc, scale = self._loc_scale(start)
        for name, value in {"free": free, "x0": model.x0_value, "loc0": loc}.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("log_scale0", scale.log())
        self.register_buffer("positive", torch.tensor(model.positive_states))
        learn = family.scaling == "learned"
        self.shift = nn.Parameter(torch.zeros_like(loc), requires_grad=learn)
        self.stretch = nn.Parameter(torch.zeros_like(loc), requires_grad=learn)

    def _loc_scale(self, start: Start) -> tuple[Tensor, Tensor]:
        """Location and scale of u, x = h(u), that give the start's path and spread."""
        path, sd = start.path[self.first :], start.path_sd[self.first :]
        if self.family.scaling == "constant":
            return torch.zeros_like(path), torch.full_like(path, self.family.unit)
        positive = torch.tensor(self.positive_states)
        inverse_softplus = path + torch.log(-torch.expm1(-path))
        loc = torch.where(positive, inverse_softplus, path)
        slope = torch.where(positive, torch.sigmoid(loc), torch.ones_like(loc))
        return loc, sd / slope

    def draw_noise(self, n: int, generator: torch.Generator) -> Noise:
        """n standard normal draws, in the dtype and on the device of the weights."""
        like = {"dtype": self.loc0.dtype, "device": self.loc0.device, "generator": generator}
        theta = torch.randn(n, len(self.theta_flow.loc0), **like)
        return Noise(theta, torch.randn(n, *self.loc0.shape, **like))

    def forward(self, noise: Noise, wide: int = 0) -> Sample:
        """Draws of q as a function of standard normal noise (reparameterised).

        The last ``wide`` take ϑ from further out, ``WIDENING`` times as far from the centre.
        """
        vartheta, log_q_theta = self.theta_flow(noise.theta)
        if wide:
            inner, outer = vartheta[:-wide], vartheta[-wide:].detach()
            centre = vartheta.detach().mean(0)
            vartheta = torch.cat([inner, centre + WIDENING * (outer - centre)])
        x, log_q_x = self.path(noise.path, vartheta)
        return Sample(vartheta, x, log_q_theta, log_q_x)

    def path(
        self, noise: Float[Tensor, "mc time state"], vartheta: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc time1 state"], Float[Tensor, " mc"]]:
        """Draws of q(x | ϑ) at any ϑ, and their log density; x holds x_0 first."""
        seen, z = self.seen(vartheta), noise * self.free
        log_q = -0.5 * (z.square() + LOG_2PI)
        for flow in self.flows():
            z, log_diag = flow(z, seen)
            # A fixed component of x_0 stays 0, or the layers' Jacobians would not be triangular.
            z, log_q = z * self.free, log_q - log_diag
        x, log_slope = self.to_state(z)
        return self._with_x0(x), ((log_q - log_slope) * self.free).sum((-2, -1))

    def seen(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc theta"]:
        """ϑ as the networks of the path see it."""
        return self.theta_flow.standardise(vartheta) if self.family.standardise_theta else vartheta

    def flows(self) -> list["TimedFlow"]:
        """Base, then the local IAFs in alternating directions."""
        base = [] if self.base is None else [TimedFlow(self.base, self.features_ahead, False)]
        # Even layers run on the reversed series: their window is the future of z and of y.
        return base + [
            TimedFlow(layer, self.features_behind if i % 2 else self.features_ahead, bool(i % 2))
            for i, layer in enumerate(self.layers)
        ]

    def to_state(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """x = h(loc + scale z); log dx/dz by time and component."""
        log_scale = self.log_scale0 + self.stretch
        u = self.loc0 + self.log_scale0.exp() * self.shift + log_scale.exp() * z
        if not any(self.positive_states):
            return u, log_scale
        x = torch.where(self.positive, softplus(u, threshold=40.0) + POSITIVE_FLOOR, u)
        log_h = torch.where(self.positive, logsigmoid(u), torch.zeros_like(u))
        return x, log_scale + log_h

    def _with_x0(self, x: Tensor) -> Tensor:
        """Put what is fixed of x_0 in front of, or into, the path."""
        if self.first == 1:
            return torch.cat([self.x0.expand(len(x), 1, -1), x], 1)
        return torch.where(self.free > 0, x, self.x0)


def _features(grid: Grid, family: Family, first: int) -> tuple[Tensor, Tensor]:
    """Features of the times that q covers: in order, and as the reversed layers see them."""
    if family.features == "centred":
        table = centred_features(grid, family.receptive_field)[first:]
        return table, table.flip(0)
    # The reversed layers' past is the future: flip the series, not the table of its past windows.
    behind = past_features(
        grid._replace(y=grid.y.flip(0), observed=grid.observed.flip(0)), family.receptive_field
    )
    ahead = past_features(grid, family.receptive_field)
    return ahead[first:], behind[: len(behind) - first]
