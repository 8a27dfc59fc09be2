"""Masked autoregressive flow for the parameters, q(ϑ) (section 2.3: IAFs with MADE masks)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import LOG_SCALE_BOUND, soft_bound
from lib.quadratic_map import QuadraticMap

LOG_2PI = math.log(2 * math.pi)
# How far into its tails q(ϑ) is looked at, in units of its noise.
STRETCH = 4.0
SEEN_BOUND = 3.0  # of ϑ as the path's networks see it, in units of q(ϑ)'s scale


class MaskedLinear(nn.Linear):
    """Linear layer with a fixed 0/1 mask on its weights (MADE, Germain et al. 2015)."""

    def __init__(self, mask: Float[Tensor, "out in"]) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """(W∘mask)·x + b."""
        return nn.functional.linear(x, self.masked(), self.bias)

    def masked(self) -> Float[Tensor, "out in"]:
        """W∘mask."""
        return self.weight * self.mask


class IAFTrace(NamedTuple):
    """What one step made on the way: its input, μ, s, and each hidden layer of its network."""

    z: Float[Tensor, "mc theta"]
    mu: Float[Tensor, "mc theta"]
    s: Float[Tensor, "mc theta"]
    hidden: list[Float[Tensor, "mc hidden"]]


class IAF(nn.Module):
    r"""One inverse autoregressive step: :math:`z'_j = z_j e^{s_j} + \mu_j`, with s, μ of z_{<j}.

    Args:
        size: Length d of the vector.
        hidden: Width of each hidden layer of the MADE network.
    """

    def __init__(self, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        degrees = [torch.arange(1, size + 1)]
        # Of one parameter s and μ are constants: units that see nothing would only multiply the
        # learning rate of theirs, until training breaks.
        degrees += [torch.arange(width) % size for width in hidden if size > 1]
        layers: list[nn.Module] = []
        for below, above in zip(degrees[:-1], degrees[1:], strict=True):
            layers += [MaskedLinear((above[:, None] >= below).float()), nn.ReLU()]
        out = torch.arange(1, size + 1).repeat(2)
        last = MaskedLinear((out[:, None] > degrees[-1]).float())
        nn.init.zeros_(last.bias)
        nn.init.normal_(last.weight, std=0.01)
        self.network = nn.Sequential(*layers, last)

    def forward(
        self, z: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (z', log |det dz'/dz|)."""
        return self.apply_trace(self.trace(z))

    def trace(self, z: Float[Tensor, "mc theta"]) -> IAFTrace:
        """Run the network at z."""
        h, hidden = z, []
        for layer in self.network:
            h = layer(h)
            if isinstance(layer, nn.ReLU):
                hidden.append(h)
        mu, s = h.chunk(2, -1)
        return IAFTrace(z, mu, soft_bound(s), hidden)

    @staticmethod
    def apply_trace(trace: IAFTrace) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """(z', log |det dz'/dz|) from what the network made."""
        return trace.z * trace.s.exp() + trace.mu, trace.s.sum(-1)

    def push_score(
        self, trace: IAFTrace, g: Float[Tensor, "mc theta"]
    ) -> Float[Tensor, "mc theta"]:
        r"""Score at z' from g, that at z: :math:`J^{-\top}(g - \partial_z \log|J|)`."""
        z, _, s, hidden = trace
        by_mu, by_s = self._slopes(hidden).chunk(2, 1)
        by_s = by_s * (1 - (s / LOG_SCALE_BOUND).square())[..., None]
        diag = s.exp()
        # The network is strictly autoregressive, so J is lower triangular.
        jacobian = by_mu + (z * diag)[..., None] * by_s + diag.diag_embed()
        rest = (g - by_s.sum(1))[..., None]
        return torch.linalg.solve_triangular(jacobian.mT, rest, upper=True)[..., 0]

    def _slopes(self, hidden: list[Tensor]) -> Float[Tensor, "mc out theta"]:
        """Jacobian of the network's outputs by z, from the hidden layers."""
        *lower, last = (layer for layer in self.network if isinstance(layer, MaskedLinear))
        rows = last.masked()[None]
        for layer, h in zip(reversed(lower), reversed(hidden), strict=True):
            rows = (rows * h.sign()[:, None]) @ layer.masked()
        return rows

    def inverse(
        self, out: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (z, log |det dz'/dz|) of z' = out, one component a pass: s_j, μ_j need z_{<j}."""
        z, ladj = torch.zeros_like(out), torch.zeros_like(out[:, 0])
        for j in range(out.shape[1]):
            # s_1 and μ_1 depend on nothing: one draw has them for all.
            _, mu, s, _ = self.trace(z if j else z[:1])
            z_j = (out[:, j] - mu[:, j]) * (-s[:, j]).exp()
            z = torch.cat([z[:, :j], z_j[:, None], z[:, j + 1 :]], 1)
            ladj = ladj + s[:, j]
        return z, ladj


class MAF(nn.Module):
    r"""q(ϑ): standard normal noise through IAFs, permutations between, then loc + scale·z.

    With ``tails`` a monotone map T of each component comes before loc and scale: a step moves z_j
    by an affine map only, and a margin with a tail of its own would stay next to normal.

    Args:
        size: Length d of ϑ.
        num_flows: Number of IAF steps; 0 leaves a diagonal normal.
        hidden: Width of each hidden layer of each step.
        loc: Where the flow starts, (d,).
        scale: Standard deviation at the start, (d,), positive.
        tails: Add T, if there is any step.

    >>> q = MAF(3, 2, (8, 8), torch.zeros(3), torch.ones(3))
    >>> [tuple(a.shape) for a in q(torch.zeros(5, 3))]
    [(5, 3), (5,)]
    """

    def __init__(
        self,
        size: int,
        num_flows: int,
        hidden: Sequence[int],
        loc: Float[Tensor, " theta"],
        scale: Float[Tensor, " theta"],
        tails: bool = False,
    ) -> None:
        super().__init__()
        self.tails = QuadraticMap(size) if tails and num_flows else None
        self.steps = nn.ModuleList(IAF(size, hidden) for _ in range(num_flows))
        for i in range(num_flows):
            # Each step starts with another component: alone, the first of a step stays normal.
            order = torch.arange(size).roll(1) if i else torch.randperm(size)
            self.register_buffer(f"permutation_{i}", order)
        self.register_buffer("loc0", loc.clone())
        self.register_buffer("log_scale0", scale.log())
        # In units of the start's scale, so that one learning rate fits every parameter.
        self.shift = nn.Parameter(torch.zeros_like(loc))
        self.stretch = nn.Parameter(torch.zeros_like(loc))

    def shape(self) -> list[nn.Parameter]:
        """Weights of all but loc and scale; a plain normal has none."""
        tails = [] if self.tails is None else self.tails.parameters()
        return [*self.steps.parameters(), *tails]

    def lengthen_tails(self) -> None:
        """Those of each component, if there is a map T."""
        if self.tails is not None:
            self.tails.lengthen()

    def loc_scale(self) -> tuple[Float[Tensor, " theta"], Float[Tensor, " theta"]]:
        """Location and log scale of the outermost affine map."""
        loc = self.loc0 + self.log_scale0.exp() * self.shift
        return loc, self.log_scale0 + self.stretch

    def forward(
        self, noise: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (ϑ, log q(ϑ)): log q = Σ log N(noise) − Σ log-Jacobians."""
        return self.trace(noise)[:2]

    def trace(
        self, noise: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"], list[IAFTrace]]:
        """ϑ and log q(ϑ) as ``forward`` has them, and the trace of each step."""
        log_q = -0.5 * (noise.square() + LOG_2PI).sum(-1)
        z, traces = noise, []
        for i, step in enumerate(self.steps):
            traces.append(step.trace(z[:, getattr(self, f"permutation_{i}")]))
            z, ladj = step.apply_trace(traces[-1])
            log_q = log_q - ladj
        if self.tails is not None:
            z, log_slope = self.tails(z)
            log_q = log_q - log_slope.sum(-1)
        loc, log_scale = self.loc_scale()
        return loc + log_scale.exp() * z, log_q - log_scale.sum(), traces

    def score(
        self, noise: Float[Tensor, "mc theta"], traces: list[IAFTrace]
    ) -> Float[Tensor, "mc theta"]:
        """Gradient of log q(ϑ) by ϑ where ``trace(noise)`` went; no flow is inverted."""
        g = -noise
        for i, (step, trace) in enumerate(zip(self.steps, traces, strict=True)):
            g = step.push_score(trace, g[:, getattr(self, f"permutation_{i}")])
        if self.tails is not None:
            g = self.tails.push_score(IAF.apply_trace(traces[-1])[0], g)
        return g * (-self.loc_scale()[1]).exp()

    def log_prob(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, " mc"]:
        """Log q(ϑ) at any ϑ: the exact inverse of ``forward``, d passes for each IAF step."""
        return self.inverse(vartheta)[1]

    def inverse(
        self, vartheta: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (noise, log q(ϑ)) of ϑ."""
        loc, log_scale = self.loc_scale()
        z, log_q = (vartheta - loc) * (-log_scale).exp(), -log_scale.sum()
        if self.tails is not None:
            z, log_slope = self.tails.inverse(z)
            log_q = log_q - log_slope.sum(-1)
        for i, step in reversed(list(enumerate(self.steps))):
            z, ladj = step.inverse(z)
            z, log_q = z[:, getattr(self, f"permutation_{i}").argsort()], log_q - ladj
        return z, log_q - 0.5 * (z.square() + LOG_2PI).sum(-1)

    def standardise(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc theta"]:
        """(ϑ − loc)/scale, without gradient through loc and scale, softly bounded.

        A network that is linear far out would be wildly off there, where few draws train it.
        """
        loc, log_scale = self.loc_scale()
        return soft_bound((vartheta - loc.detach()) / log_scale.detach().exp(), SEEN_BOUND)


def stretched(noise: Float[Tensor, "mc theta"], count: int) -> Float[Tensor, "mc theta"]:
    """The last ``count`` rows ``STRETCH`` times as long in one coordinate each, in turn.

    The flow then draws ϑ from the tails of q(ϑ), one direction at a time. In all directions at once
    nearly every draw would lie where the posterior has no mass, the more so the longer ϑ is.
    """
    if not count:
        return noise
    factor, row = torch.ones_like(noise), torch.arange(count, device=noise.device)
    factor[len(noise) - count + row, row % noise.shape[1]] = STRETCH
    return noise * factor


def log_stretched(noise: Float[Tensor, "mc theta"]) -> Float[Tensor, " mc"]:
    r"""Log of m(ϑ)/q(ϑ) at the ϑ of ``noise``, m half q(ϑ), half what ``stretched`` draws.

    .. math:: \frac{m}{q} = \frac12 + \frac1{2d}\sum_j \frac{N(z_j; 0, f^2)}{N(z_j; 0, 1)}
    """
    longer = 0.5 * (1 - STRETCH**-2) * noise.square() - math.log(STRETCH)
    equal = torch.logsumexp(longer, 1) - math.log(noise.shape[1])
    return torch.logaddexp(equal, torch.zeros_like(equal)) - math.log(2.0)
