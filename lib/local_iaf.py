"""Local inverse autoregressive flow over time (eqs. 4, 11-13; appendix B)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import (
    LOG_SCALE_BOUND,
    Conditioner,
    NetworkTrace,
    Pushed,
    ThetaTaps,
    TimeFlow,
    apply_taps,
    lower_product,
    pull_theta,
    soft_bound,
)

# Times in a dense block of the band: measured, 20 to 50 are about equally fast.
BLOCK = 32


class PastWindows(torch.autograd.Function):
    r"""Windows :math:`z_{i-k}, …, z_{i-1}` side by side, oldest first, zero before the start.

    Written out because the backward pass of `unfold`, or of a `cat` of slices, is slow on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, length: int) -> Float[Tensor, "mc time window"]:
        """Copy the windows of z (mc, time, state)."""
        ctx.length = length
        n, num_times, p = z.shape
        padded = nn.functional.pad(z, (0, 0, length, 0))
        strides = (padded.stride(0), p, 1)
        return padded.as_strided((n, num_times, length * p), strides).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add the windows up."""
        return add_windows(grad, ctx.length), None


def past_windows(z: Float[Tensor, "mc time state"], length: int) -> Float[Tensor, "mc time window"]:
    """The k steps before each time; see ``PastWindows``."""
    return PastWindows.apply(z, length)


def add_windows(
    windows: Float[Tensor, "mc time window"], length: int
) -> Float[Tensor, "mc time state"]:
    """Transpose of ``past_windows``: entry j of the window at i is added to time i - k + j."""
    n, num_times, width = windows.shape
    p = width // length
    padded = nn.functional.pad(windows, (0, 0, 0, length))
    # Time i meets the entry j of the window at i + k - j: p columns less for each row further down.
    strides = (padded.stride(0), width, width - p, 1)
    return padded.as_strided((n, num_times, length, p), strides, 2 * width - p).sum(2)


def solve_band_transposed(
    band: Float[Tensor, "mc time state columns"], g: Float[Tensor, "mc time state"]
) -> Float[Tensor, "mc time state"]:
    """Solve J'w = g for a lower band J; row (i, c) holds the columns of times i-k, …, i.

    Back substitution by dense blocks of consecutive times. Block b is [E_b D_b], E_b its columns of
    the k times before: w_b = D_b⁻ᵀ g_b, then g_{b-1} loses E_b'w_b.
    """
    n, num_times, p, columns = band.shape
    before = columns - p
    size = max(BLOCK, before // p)
    rest = g.flatten(1)[..., None].clone()
    solved = []
    for first in reversed(range(0, num_times, size)):
        count = min(size, num_times - first)
        rows, width = count * p, before + count * p
        block = band.new_zeros(n, rows, width)
        # Each time's rows start p columns further to the right.
        at = block.as_strided((n, count, p, columns), (rows * width, p * width + p, width, 1))
        at.copy_(band[:, first : first + count])
        own = rest[:, first * p : first * p + rows]
        solved.append(torch.linalg.solve_triangular(block[..., before:].mT, own, upper=True))
        if first:
            earlier = rest[:, first * p - before : first * p]
            earlier.baddbmm_(block[..., :before].mT, solved[-1], alpha=-1)
    return torch.cat(solved[::-1], 1).view_as(g)


class LocalIAFTrace(NamedTuple):
    """What a layer made on the way: the windows, its network's trace and the taps."""

    z: Float[Tensor, "mc time state"]
    theta: Float[Tensor, "mc theta"]
    window: Float[Tensor, "mc time window"]
    network: NetworkTrace
    taps: Float[Tensor, "mc window state"] | None
    y: Float[Tensor, "mc time state"]
    log_diag: Float[Tensor, "mc time state"]


class LocalIAF(TimeFlow):
    r"""One local IAF: z'_i depends on z_i and on the window z_{i-k:i-1}, never on the future.

    Gate ``"sigmoid"`` (as printed): :math:`z'_i = \sigma_i z_i + \mu_i(1-\sigma_i)`.
    Gate ``"unbounded"``: :math:`z'_i = L_i z_i + \mu_i`, diag L = exp(s), s softly bounded. With
    ``coupling`` L is lower triangular, so components of the same time can correlate.
    With ``taps``, μ also gets :math:`\sum_j w_j(\vartheta) z_{i-j}`: for a linear-Gaussian model a
    good layer is a moving average whose weights depend on ϑ.

    Args:
        num_states: Components p of the state.
        num_features: Features of the data at each time.
        num_theta: Length d of ϑ.
        window: Receptive field k, in grid steps.
        hidden: Width of each hidden layer.
        gate: ``"sigmoid"`` or ``"unbounded"``.
        coupling: Lower-triangular L instead of a diagonal one (unbounded gate only).
        taps: ϑ-modulated linear taps, and a linear path from ϑ to s and μ.

    >>> layer = LocalIAF(2, 3, 1, window=4, hidden=(8,), gate="unbounded", coupling=True)
    >>> [tuple(a.shape) for a in layer(torch.zeros(5, 7, 2), torch.zeros(7, 3), torch.zeros(5, 1))]
    [(5, 7, 2), (5, 7, 2)]
    """

    def __init__(
        self,
        num_states: int,
        num_features: int,
        num_theta: int,
        *,
        window: int,
        hidden: Sequence[int],
        gate: str,
        coupling: bool = False,
        taps: bool = False,
    ) -> None:
        super().__init__()
        self.num_states, self.window, self.gate = num_states, window, gate
        self.coupling = coupling and num_states > 1
        num_window = window * num_states
        # A sigmoid gate starts at 0.88, mostly open, so that five layers pass the noise on.
        initial = [0.0] * num_states + [2.0 if gate == "sigmoid" else 0.0] * num_states
        initial += [0.0] * (num_states * (num_states - 1) // 2 if self.coupling else 0)
        self.network = Conditioner(num_window, num_features, num_theta, hidden, initial, taps)
        self.taps = ThetaTaps(num_window, num_theta, num_states) if taps else None

    def trace(
        self,
        z: Float[Tensor, "mc time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> LocalIAFTrace:
        """Run the flow and keep what it made on the way."""
        p = self.num_states
        window = past_windows(z, self.window)
        network = self.network.trace(window, features, theta)
        out = network.out
        mu, s = out[..., :p], out[..., p : 2 * p]
        taps = None if self.taps is None else self.taps.matrix(theta)
        if taps is not None:
            mu = mu + apply_taps(window, taps)
        if self.gate == "sigmoid":
            sigma = torch.sigmoid(s)
            y, log_diag = sigma * z + mu * (1 - sigma), nn.functional.logsigmoid(s)
        else:
            log_diag = soft_bound(s)
            y = log_diag.exp() * z + mu
        if self.coupling:
            y = y + lower_product(out[..., 2 * p :], z)
        return LocalIAFTrace(z, theta, window, network, taps, y, log_diag)

    def push_score(
        self,
        trace: LocalIAFTrace,
        g: Float[Tensor, "mc time state"],
        free: Float[Tensor, "1 time state"],
    ) -> Pushed:
        """The score at z' from g, that at z: back substitution along time, J being a lower band."""
        p = self.num_states
        with torch.no_grad():
            by_out, by_z = self._slopes(trace, free)
            by_first, band = self.network.pull_back(by_out, trace.network.hidden)
            g = (g - add_windows(band[p], self.window)) * free
            band = band[:p]
            if trace.taps is not None:
                band += trace.taps.permute(2, 0, 1)[:, :, None]
            # What is not free is 0 and stays so: its rows and columns are those of the identity.
            band *= past_windows(free, self.window)
            band = torch.cat([band.movedim(0, 2), by_z], -1)
            w = solve_band_transposed(band, g)
            parts = self._theta_parts(trace, w, by_out, by_first)
        return Pushed(g, w, pull_theta(trace.theta, *parts))

    @staticmethod
    def _theta_parts(
        trace: LocalIAFTrace, w: Tensor, by_out: Tensor, by_first: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where ϑ enters, and the gradient of w'z' + Σ log diag there, as sums of Jacobian rows."""
        weights = torch.cat([w.movedim(2, 0), torch.ones_like(w[None, ..., 0])])
        outputs = [trace.network.from_theta]
        gradients = [(weights[:, :, None] @ by_first).sum((0, 2))]
        if trace.network.skip is not None:
            outputs.append(trace.network.skip)
            gradients.append((weights[..., None] * by_out).sum(0))
        if trace.taps is not None:
            outputs.append(trace.taps)
            gradients.append(trace.window.mT @ w)
        return outputs, gradients

    def _slopes(
        self, trace: LocalIAFTrace, free: Tensor
    ) -> tuple[Float[Tensor, "rows mc time out"], Float[Tensor, "mc time state state"]]:
        """dz'/d(outputs of the network), then a row for d Σ log diag; dz'/dz at the same time."""
        p, z, out = self.num_states, trace.z, trace.network.out
        if self.gate == "sigmoid":
            sigma = torch.sigmoid(out[..., p : 2 * p])
            by_mu, diag, slope = 1 - sigma, sigma, 1 - sigma
            by_s = sigma * (1 - sigma) * (z - out[..., :p])
        else:
            diag = trace.log_diag.exp()
            slope = 1 - (trace.log_diag / LOG_SCALE_BOUND).square()
            by_mu, by_s = torch.ones_like(z), z * diag * slope
        by_out = out.new_zeros(p + 1, *out.shape)
        by_z = torch.where(free > 0, diag, 1.0).diag_embed()
        by_out[p, ..., p : 2 * p] = slope * free
        entry = 2 * p
        for r in range(p):
            by_out[r, ..., r], by_out[r, ..., p + r] = by_mu[..., r], by_s[..., r]
            if self.coupling:
                by_out[r, ..., entry : entry + r] = z[..., :r]
                both = free[..., :r] * free[..., r : r + 1]
                by_z[..., r, :r] = out[..., entry : entry + r] * both
                entry += r
        return by_out, by_z
