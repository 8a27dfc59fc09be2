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
    lower_product,
    soft_bound,
)

# Times in a dense block of the band: measured, 20 to 50 are about equally fast.
BLOCK = 32


class PastWindows(torch.autograd.Function):
    r"""Windows :math:`z_{i-k}, …, z_{i-1}` below each other, oldest first, zero before the start.

    Written out because the backward pass of `unfold`, or of a `cat` of slices, is slow on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, length: int) -> Float[Tensor, "window time mc"]:
        """Copy the windows of z (state, time, mc)."""
        ctx.length = length
        p, num_times, n = z.shape
        padded = nn.functional.pad(z, (0, 0, length, 0))
        strides = (n, padded.stride(0), n, 1)
        # With one state the two axes would merge without a copy, into rows that overlap.
        return padded.as_strided((length, p, num_times, n), strides).clone().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add the windows up."""
        return add_windows(grad, ctx.length), None


def past_windows(z: Float[Tensor, "state time mc"], length: int) -> Float[Tensor, "window time mc"]:
    """The k steps before each time; see ``PastWindows``."""
    return PastWindows.apply(z, length)


def add_windows(
    windows: Float[Tensor, "window time mc"], length: int
) -> Float[Tensor, "state time mc"]:
    """Transpose of ``past_windows``: entry j of the window at i is added to time i - k + j."""
    _, num_times, n = windows.shape
    windows = windows.unflatten(0, (length, -1))
    padded = nn.functional.pad(windows, (0, 0, 0, length))
    # Time i meets the entry j of the window at i + k - j: one time less for each j further down.
    strides = (padded.stride(0) - n, padded.stride(1), n, 1)
    shape = (length, windows.shape[1], num_times, n)
    return padded.as_strided(shape, strides, length * n).sum(0)


def solve_band_transposed(
    band: Float[Tensor, "columns state time mc"], g: Float[Tensor, "state time mc"]
) -> Float[Tensor, "state time mc"]:
    """Solve J'w = g for a lower band J; row (i, c) holds the columns of times i-k, …, i.

    Back substitution by dense blocks of consecutive times. Block b is [E_b D_b], E_b its columns of
    the k times before: w_b = D_b⁻ᵀ g_b, then g_{b-1} loses E_b'w_b.
    """
    columns, p, num_times, n = band.shape
    before = columns - p
    size = max(BLOCK, before // p)
    rest = g.permute(2, 1, 0).reshape(n, -1, 1).clone()
    solved = []
    for first in reversed(range(0, num_times, size)):
        count = min(size, num_times - first)
        rows, width = count * p, before + count * p
        block = band.new_zeros(n, rows, width)
        # Each time's rows start p columns further to the right.
        at = block.as_strided((n, count, p, columns), (rows * width, p * width + p, width, 1))
        at.copy_(band[:, :, first : first + count].permute(3, 2, 1, 0))
        own = rest[:, first * p : first * p + rows]
        solved.append(torch.linalg.solve_triangular(block[..., before:].mT, own, upper=True))
        if first:
            earlier = rest[:, first * p - before : first * p]
            earlier.baddbmm_(block[..., :before].mT, solved[-1], alpha=-1)
    return torch.cat(solved[::-1], 1).view(n, num_times, p).permute(2, 1, 0)


class LocalIAFTrace(NamedTuple):
    """What a layer made on the way: the windows, its network's trace and the taps."""

    z: Float[Tensor, "state time mc"]
    window: Float[Tensor, "window time mc"]
    network: NetworkTrace
    taps: Float[Tensor, "window state mc"] | None
    y: Float[Tensor, "state time mc"]
    log_diag: Float[Tensor, "state time mc"]


class LocalIAF(nn.Module):
    r"""One local IAF: z'_i depends on z_i and on the window z_{i-k:i-1}, never on the future.

    Gate ``"sigmoid"`` (as printed): :math:`z'_i = \sigma_i z_i + \mu_i(1-\sigma_i)`.
    Gate ``"unbounded"``: :math:`z'_i = L_i z_i + \mu_i`, diag L = exp(s), s softly bounded. With
    ``coupling`` L is lower triangular, so components of the same time can correlate.
    With ``taps``, μ also gets :math:`\sum_j w_j(\vartheta) z_{i-j}`: for a linear-Gaussian model a
    good layer is a moving average whose weights depend on ϑ.

    In ``trace`` and ``push_score`` the state leads and the draws come last: a network is then a few
    products of a small matrix with a long one, with rows to run along.

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

    def forward(
        self,
        z: Float[Tensor, "mc time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> tuple[Float[Tensor, "mc time state"], Float[Tensor, "mc time state"]]:
        """Return (z', log diagonal of dz'/dz); its sum over time and state is the log-Jacobian."""
        trace = self.trace(z.permute(2, 1, 0), features, theta)
        return trace.y.permute(2, 1, 0), trace.log_diag.permute(2, 1, 0)

    def trace(
        self,
        z: Float[Tensor, "state time mc"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> LocalIAFTrace:
        """Run the flow and keep what it made on the way."""
        p = self.num_states
        window = past_windows(z, self.window)
        network = self.network.trace(window, features, theta)
        mu, s, entries = network.out.split([p, p, len(network.out) - 2 * p])
        taps = None if self.taps is None else self.taps.matrix(theta)
        if taps is not None:
            mu = mu + (window[:, None] * taps[:, :, None]).sum(0)
        if self.gate == "sigmoid":
            sigma = torch.sigmoid(s)
            y, log_diag = sigma * z + mu * (1 - sigma), nn.functional.logsigmoid(s)
        else:
            log_diag = soft_bound(s)
            y = log_diag.exp() * z + mu
        if self.coupling:
            y = y + lower_product(entries, z)
        return LocalIAFTrace(z, window, network, taps, y, log_diag)

    @torch.no_grad()
    def push_score(
        self,
        trace: LocalIAFTrace,
        g: Float[Tensor, "state time mc"],
        free: Float[Tensor, "state time 1"] | None,
        with_theta: bool,
    ) -> Pushed:
        """The score at z' from g, that at z: back substitution along time, J being a lower band."""
        p, k = self.num_states, self.window
        by_out, by_z = self._slopes(trace, free)
        by_first, by_window = self.network.pull_back(by_out, trace.network.hidden)
        g = g - add_windows(by_window[:, p], k)
        band = torch.cat([by_window[:, :p], by_z])
        if trace.taps is not None:
            band[:-p] += trace.taps[:, :, None]
        if free is not None:
            # What is not free is 0 and stays so: its rows and columns are those of the identity.
            g = g * free
            band[:-p] *= past_windows(free, k)[:, None]
        w = solve_band_transposed(band, g)
        parts = self._theta_parts(trace, w, by_out, by_first) if with_theta else ([], [])
        return Pushed(g, w, *parts)

    @staticmethod
    def _theta_parts(
        trace: LocalIAFTrace, w: Tensor, by_out: Tensor, by_first: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where ϑ enters, and the gradient of w'z' + Σ log diag there, as sums of Jacobian rows."""
        outputs, weights = [trace.network.from_theta], [_weigh(by_first, w).sum(1)]
        if trace.network.skip is not None:
            outputs.append(trace.network.skip)
            weights.append(_weigh(by_out, w))
        if trace.taps is not None:
            outputs.append(trace.taps)
            weights.append((trace.window[:, None] * w).sum(2))
        return outputs, weights

    def _slopes(
        self, trace: LocalIAFTrace, free: Tensor | None
    ) -> tuple[Float[Tensor, "out rows time mc"], Float[Tensor, "state state time mc"]]:
        """dz'/d(outputs of the network), then a row for d Σ log diag; dz'/dz at the same time.

        The latter has the columns in front, the rows after.
        """
        p, z, out = self.num_states, trace.z, trace.network.out
        if self.gate == "sigmoid":
            diag = torch.sigmoid(out[p : 2 * p])
            by_mu, slope = 1 - diag, 1 - diag
            by_s = diag * slope * (z - out[:p])
        else:
            diag = trace.log_diag.exp()
            slope = 1 - (trace.log_diag / LOG_SCALE_BOUND).square()
            by_mu, by_s = torch.ones_like(z), z * diag * slope
        if free is not None:
            diag, slope = torch.where(free > 0, diag, 1.0), slope * free
        by_out = out.new_zeros(len(out), p + 1, *z.shape[1:])
        by_z = out.new_zeros(p, p, *z.shape[1:])
        by_out[p : 2 * p, p] = slope
        entry = 2 * p
        for r in range(p):
            by_out[r, r], by_out[p + r, r], by_z[r, r] = by_mu[r], by_s[r], diag[r]
            if self.coupling:
                by_out[entry : entry + r, r] = z[:r]
                both = 1.0 if free is None else free[:r] * free[r]
                by_z[:r, r] = out[entry : entry + r] * both
                entry += r
        return by_out, by_z


def _weigh(
    rows: Float[Tensor, "columns rows time mc"], w: Float[Tensor, "state time mc"]
) -> Float[Tensor, "columns time mc"]:
    """Sum of the Jacobian's rows weighted by w, and of the last, that of Σ log diag, by 1."""
    total = rows[:, -1].clone()
    for r, weight in enumerate(w):
        total.addcmul_(rows[:, r], weight)
    return total
