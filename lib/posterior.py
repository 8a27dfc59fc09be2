"""The variational posterior q(ϑ, x) = q(ϑ) q(x | ϑ) (section 3; eqs. 11-16)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.data import Grid
from lib.family import Family
from lib.features import centred_features, past_features
from lib.gauss_markov import run_chain
from lib.guided import Guide, Guided
from lib.linearised import Linearised, range_map
from lib.local_iaf import LocalIAF, LocalIAFTrace
from lib.maf import LOG_2PI, MAF, IAFTrace
from lib.network import Pushed
from lib.smoother import Chain
from lib.ssm import StateSpaceModel
from lib.start import Start

# Values of A of the chains made at a time; the smoother holds some ten such arrays.
CHAIN_VALUES = 6_400_000


class Noise(NamedTuple):
    """Standard normal noise of one Monte Carlo batch: for ϑ (mc, d), for the path (mc, T, p).

    ``chain`` is that of ``VariationalPosterior.chain`` at the ϑ of this noise; without, it is made.
    """

    theta: Float[Tensor, "mc theta"]
    path: Float[Tensor, "mc time state"]
    chain: Chain | Guide | None = None


class Sample(NamedTuple):
    """Draws of q with their log densities; x holds x_0 first."""

    vartheta: Float[Tensor, "mc theta"]
    x: Float[Tensor, "mc time state"]
    log_q_theta: Float[Tensor, " mc"]
    log_q_x: Float[Tensor, " mc"]


class TimedFlow(NamedTuple):
    """A flow over time with its features, in the direction in which it runs."""

    flow: LocalIAF
    features: Float[Tensor, "time features"]
    backwards: bool

    def turn(self, series: Float[Tensor, "state time mc"]) -> Float[Tensor, "state time mc"]:
        """The series as the flow sees it, and back."""
        return series.flip(1) if self.backwards else series

    def trace(self, z: Tensor, seen: Tensor) -> LocalIAFTrace:
        """z' and log diagonal with what the flow made on the way, all as the flow sees them."""
        return self.flow.trace(self.turn(z), self.features, seen)

    def push_score(
        self, trace: LocalIAFTrace, g: Tensor, free: Tensor | None, with_theta: bool
    ) -> Pushed:
        """The score at z' from g, that at z, both in the order of time."""
        free = None if free is None else self.turn(free)
        pushed = self.flow.push_score(trace, self.turn(g), free, with_theta)
        return pushed._replace(before=self.turn(pushed.before), after=self.turn(pushed.after))


class Trace(NamedTuple):
    """A sample with all that its score needs: where each flow went, on the graph of the sample."""

    noise: Noise
    sample: Sample
    theta_steps: list[IAFTrace]
    flows: list[LocalIAFTrace]
    chain: Chain | None
    u: Float[Tensor, "mc time state"]  # of x = h(u)


class VariationalPosterior(nn.Module):
    r"""q(ϑ) a MAF; q(x | ϑ) a Gauss-Markov chain, local IAFs in alternating directions, then h.

    .. math:: \log q(x|\vartheta) = \sum\log N(z^0) - \sum_{\text{flows}}\sum\log\text{diag}\,L
        - \sum\log\text{sd} - \sum\log h'

    The chain has no weights: it is the Kalman smoother of the model linearised about a path, at the
    ϑ of each draw. The IAFs learn what is left, in units of its mean and sd at each time. With it
    no gradient goes through ϑ, and q(ϑ) is to be fitted by importance weights (`lib.refit`).
    A guided family has no IAFs, and the steps of ``lib.guided`` in place of the chain.

    Args:
        model: What is linearised; sizes, which states are positive and what is known of x_0.
        grid: The data on the grid.
        family: Options of the flows.
        start: Where q(ϑ) starts, and the path about which the model is linearised.
        seed: Of the weights and permutations; the global generator is left untouched.
    """

    def __init__(
        self, model: StateSpaceModel, grid: Grid, family: Family, start: Start, seed: int
    ) -> None:
        super().__init__()
        self.family, self.first = family, 0 if model.x0_random else 1
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's alone
            self._build(model, grid, start)
        self.to(grid.y.dtype)

    def _build(self, model: StateSpaceModel, grid: Grid, start: Start) -> None:
        family, p, d = self.family, model.num_states, model.num_theta
        hidden, place = (family.theta_hidden,) * 2, (start.vartheta, start.vartheta_sd)
        self.theta_flow = MAF(d, family.theta_flows, hidden, *place, tails=family.base)
        ahead, behind = _features(grid, family, self.first)
        self.register_buffer("features_ahead", ahead)
        self.register_buffer("features_behind", behind)
        sizes, hidden = (p, ahead.shape[-1], d), (family.hidden,) * family.layers
        options = {"gate": family.gate, "coupling": family.coupling, "taps": family.taps}
        self.layers = nn.ModuleList(
            LocalIAF(*sizes, window=family.receptive_field, hidden=hidden, **options)
            for _ in range(family.num_flows)
        )
        loc = start.path[self.first :]
        self.to_range = range_map(model, len(loc), None if family.base else family.unit)
        loc = self.to_range.inverse(loc) if family.base else torch.zeros_like(loc)
        free = torch.ones_like(loc)
        if self.first == 0:
            free[0] = (~model.x0_fixed).to(free)
        self.all_free = bool((free > 0).all())
        for name, value in {"free": free, "x0": model.x0_value, "loc0": loc}.items():
            self.register_buffer(name, value.clone())
        self._given = model, grid
        self._forget()

    def _forget(self) -> None:
        """What is made of the weights and the path when it is first needed."""
        self._linearised: Linearised | None = None
        self._guided: Guided | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Of nn.Module: another dtype or device."""
        self._forget()
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: object, **options: object) -> object:
        """Of nn.Module."""
        self._forget()
        return super().load_state_dict(*args, **options)

    def linearised(self) -> Linearised:
        """The model linearised about this posterior's path."""
        if self._linearised is None:
            self._linearised = Linearised(*self._given, self.loc0)
        return self._linearised

    def guided(self) -> Guided:
        """The model's own steps, steered by the model linearised about this posterior's path."""
        if self._guided is None:
            self._guided = Guided(self.linearised())
        return self._guided

    @property
    def chain_batch(self) -> int:
        """For how many ϑ a chain is made at a time: as many as the memory of it allows."""
        return max(1, CHAIN_VALUES // (self.loc0.numel() * self.loc0.shape[1]))

    def chain(self, vartheta: Float[Tensor, "mc theta"]) -> Chain | Guide | None:
        """The chain of q(x | ϑ) at these ϑ, or its guide; None for a family without."""
        if not self.family.base:
            return None
        if self.family.guided:
            return self.guided()(vartheta)
        return Chain(*(part.to(self.loc0.dtype) for part in self.linearised()(vartheta)))

    def draw_noise(self, n: int, generator: torch.Generator) -> Noise:
        """n standard normal draws, in the dtype and on the device of the weights."""
        theta = self.draw_theta_noise(n, generator)
        return Noise(theta, self.draw_path_noise(n, generator))

    def draw_path_noise(self, n: int, generator: torch.Generator) -> Float[Tensor, "mc time state"]:
        """That of the path alone."""
        return self._randn((n, *self.loc0.shape), generator)

    def draw_theta_noise(self, n: int, generator: torch.Generator) -> Float[Tensor, "mc theta"]:
        """That of ϑ alone."""
        return self._randn((n, len(self.theta_flow.loc0)), generator)

    def _randn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        loc = self.loc0
        return torch.randn(shape, dtype=loc.dtype, device=loc.device, generator=generator)

    def forward(self, noise: Noise, wide: int = 0) -> Sample:
        """Draws of q as a function of standard normal noise (reparameterised).

        The last ``wide`` are for the training of q(x | ϑ) alone: no gradient goes through their ϑ.
        With the chain, that holds for all.
        """
        vartheta, log_q_theta, _ = self._theta(noise.theta, wide)
        x, log_q_x = self.path(noise.path, vartheta, noise.chain)
        return Sample(vartheta, x, log_q_theta, log_q_x)

    def trace(self, noise: Noise, wide: int = 0) -> Trace:
        """The draws of ``forward`` with what their score needs."""
        vartheta, log_q_theta, steps = self._theta(noise.theta, wide)
        chain = self.chain(vartheta) if noise.chain is None else noise.chain
        flows: list[LocalIAFTrace] = []
        x, log_q_x, u = self._path(noise.path, self.seen(vartheta), chain, flows)
        return Trace(noise, Sample(vartheta, x, log_q_theta, log_q_x), steps, flows, chain, u)

    def _theta(self, noise: Tensor, wide: int) -> tuple[Tensor, Tensor, list[IAFTrace]]:
        """ϑ, the last ``wide`` without gradient; log q(ϑ); the steps of the MAF."""
        held = self.family.base
        with torch.set_grad_enabled(torch.is_grad_enabled() and not held):
            vartheta, log_q_theta, steps = self.theta_flow.trace(noise)
        if wide and not held:
            vartheta = torch.cat([vartheta[:-wide], vartheta[-wide:].detach()])
        return vartheta, log_q_theta, steps

    def path(
        self,
        noise: Float[Tensor, "mc time state"],
        vartheta: Float[Tensor, "mc theta"],
        chain: Chain | Guide | None = None,
    ) -> tuple[Float[Tensor, "mc time1 state"], Float[Tensor, " mc"]]:
        """Draws of q(x | ϑ) at any ϑ, and their log density; x holds x_0 first."""
        chain = self.chain(vartheta) if chain is None else chain
        if isinstance(chain, Guide):
            x, log_q_x = self.guided().draw(chain, noise)
            return self.with_x0(x.to(noise)), log_q_x.to(noise)
        return self._path(noise, self.seen(vartheta), chain)[:2]

    def _path(
        self,
        noise: Tensor,
        seen: Tensor,
        chain: Chain | None,
        traces: list[LocalIAFTrace] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x, log q and u; what each flow made is appended to ``traces``."""
        # The flows' order of axes: to turn a path costs little, to turn a hidden layer much.
        z = self.masked(noise.permute(2, 1, 0).contiguous())
        log_q = -0.5 * (z.square() + LOG_2PI)
        if chain is not None:
            z, log_q = self.masked(run_chain(chain, z)), log_q - chain.log_diag
        for flow in self.flows():
            trace = flow.trace(z, seen)
            # A fixed component of x_0 stays 0, or the layers' Jacobians would not be triangular.
            z, log_q = self.masked(flow.turn(trace.y)), log_q - flow.turn(trace.log_diag)
            if traces is not None:
                traces.append(trace)
        if chain is not None:
            z, log_q = chain.mean + chain.log_sd.exp() * z, log_q - chain.log_sd
        u = self.loc0 + z.permute(2, 1, 0)
        x, log_slope = self.to_range(u)
        log_q = (log_q.permute(2, 1, 0) - log_slope) * self.free
        return self.with_x0(x), log_q.sum((-2, -1)), u

    @property
    def mask(self) -> Float[Tensor, "state time 1"] | None:
        """``free`` as the flows see it; None where all is free."""
        return None if self.all_free else self.free.mT[..., None]

    def masked(self, series: Float[Tensor, "state time mc"]) -> Float[Tensor, "state time mc"]:
        """The series with zeros for what is not free."""
        mask = self.mask
        return series if mask is None else series * mask

    def seen(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc theta"]:
        """ϑ as the networks of the path see it."""
        return self.theta_flow.standardise(vartheta) if self.family.standardise_theta else vartheta

    def flows(self) -> list["TimedFlow"]:
        """The local IAFs, in alternating directions."""
        # Even layers run on the reversed series: their window is the future of z and of y.
        return [
            TimedFlow(layer, self.features_behind if i % 2 else self.features_ahead, bool(i % 2))
            for i, layer in enumerate(self.layers)
        ]

    def with_x0(self, x: Tensor) -> Tensor:
        """Put what is fixed of x_0 in front of, or into, the path."""
        if self.first == 1:
            # On the flows' order of axes, so that the values stay where they are.
            ahead = self.x0[:, None, None].expand(-1, 1, len(x))
            return torch.cat([ahead, x.permute(2, 1, 0)], 1).permute(2, 1, 0)
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
