"""Masked autoregressive flow for the parameters, q(ϑ) (section 2.3: IAFs with MADE masks)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import soft_bound

LOG_2PI = math.log(2 * math.pi)


class MaskedLinear(nn.Linear):
    """Linear layer with a fixed 0/1 mask on its weights (MADE, Germain et al. 2015)."""

    def __init__(self, mask: Float[Tensor, "out in"]) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """(W∘mask)·x + b."""
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class IAF(nn.Module):
    r"""One inverse autoregressive step: :math:`z'_j = z_j e^{s_j} + \mu_j`, with s, μ of z_{<j}.

    Args:
        size: Length d of the vector.
        hidden: Width of each hidden layer of the MADE network.
    """

    def __init__(self, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        degrees = [torch.arange(1, size + 1)]
        # Degree 0 (a unit that sees nothing) keeps the network alive when d = 1.
        degrees += [torch.arange(width) % max(size, 1) for width in hidden]
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
        mu, s = self._mu_s(z)
        return z * s.exp() + mu, s.sum(-1)

    def inverse(
        self, out: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (z, log |det dz'/dz|) of z' = out, one component a pass: s_j, μ_j need z_{<j}."""
        z, ladj = torch.zeros_like(out), torch.zeros_like(out[:, 0])
        for j in range(out.shape[1]):
            mu, s = self._mu_s(z)
            z_j = (out[:, j] - mu[:, j]) * (-s[:, j]).exp()
            z = torch.cat([z[:, :j], z_j[:, None], z[:, j + 1 :]], 1)
            ladj = ladj + s[:, j]
        return z, ladj

    def _mu_s(self, z: Tensor) -> tuple[Tensor, Tensor]:
        mu, s = self.network(z).chunk(2, -1)
        return mu, soft_bound(s)


class MAF(nn.Module):
    r"""q(ϑ): standard normal noise through IAFs, random permutations between, then loc + scale·z.

    Args:
        size: Length d of ϑ.
        num_flows: Number of IAF steps; 0 leaves a diagonal normal.
        hidden: Width of each hidden layer of each step.
        loc: Where the flow starts, (d,).
        scale: Standard deviation at the start, (d,), positive.

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
    ) -> None:
        super().__init__()
        self.steps = nn.ModuleList(IAF(size, hidden) for _ in range(num_flows))
        for i in range(num_flows):
            self.register_buffer(f"permutation_{i}", torch.randperm(size))
        self.register_buffer("loc0", loc.clone())
        self.register_buffer("log_scale0", scale.log())
        # In units of the start's scale, so that one learning rate fits every parameter.
        self.shift = nn.Parameter(torch.zeros_like(loc))
        self.stretch = nn.Parameter(torch.zeros_like(loc))

    def loc_scale(self) -> tuple[Float[Tensor, " theta"], Float[Tensor, " theta"]]:
        """Location and log scale of the outermost affine map."""
        loc = self.loc0 + self.log_scale0.exp() * self.shift
        return loc, self.log_scale0 + self.stretch

    def forward(
        self, noise: Float[Tensor, "mc theta"]
    ) -> tuple[Float[Tensor, "mc theta"], Float[Tensor, " mc"]]:
        """Return (ϑ, log q(ϑ)): log q = Σ log N(noise) − Σ log-Jacobians."""
        log_q = -0.5 * (noise.square() + LOG_2PI).sum(-1)
        z = noise
        for i, step in enumerate(self.steps):
            z, ladj = step(z[:, getattr(self, f"permutation_{i}")])
            log_q = log_q - ladj
        loc, log_scale = self.loc_scale()
        return loc + log_scale.exp() * z, log_q - log_scale.sum()

    def log_prob(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, " mc"]:
        """Log q(ϑ) at any ϑ: the exact inverse of ``forward``, d passes for each IAF step."""
        loc, log_scale = self.loc_scale()
        z, log_q = (vartheta - loc) * (-log_scale).exp(), -log_scale.sum()
        for i, step in reversed(list(enumerate(self.steps))):
            z, ladj = step.inverse(z)
            z, log_q = z[:, getattr(self, f"permutation_{i}").argsort()], log_q - ladj
        return log_q - 0.5 * (z.square() + LOG_2PI).sum(-1)

    def standardise(self, vartheta: Float[Tensor, "mc theta"]) -> Float[Tensor, "mc theta"]:
        """(ϑ − loc)/scale, without gradient through loc and scale."""
        loc, log_scale = self.loc_scale()
        return (vartheta - loc.detach()) / log_scale.detach().exp()
