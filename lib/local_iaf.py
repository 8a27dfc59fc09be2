"""Local inverse autoregressive flow over time (eqs. 4, 11-13; appendix B)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.network import LOG_SCALE_BOUND, Conditioner, ThetaTaps, lower_product, soft_bound


def past_windows(z: Float[Tensor, "mc time state"], length: int) -> Float[Tensor, "mc time window"]:
    r"""Windows :math:`z_{i-k}, …, z_{i-1}` side by side, oldest first, zero before the start."""
    padded = nn.functional.pad(z, (0, 0, length, 0))
    # Slices, not `unfold`: the backward pass of `unfold` is many times slower on a CPU.
    return torch.cat([padded[:, j : j + z.shape[1]] for j in range(length)], -1)


def solve_band_transposed(
    band: Float[Tensor, "mc time state columns"],
    g: Float[Tensor, "mc time state"],
    free: Float[Tensor, "1 time state"],
) -> Float[Tensor, "mc time state"]:
    """Solve J'w = g for a lower band J; row (i, c) holds the columns of times i-k, …, i.

    Where ``free`` is 0, so is w. Cost: two small operations for each time and component.
    """
    n, num_times, p, columns = band.shape
    own = columns - p
    # Time first, draws last: a row's columns are then one block of memory.
    rows = band.permute(1, 2, 3, 0).contiguous()
    inverse = free[0, ..., None] / rows[:, :, own:].diagonal(dim1=1, dim2=2).mT
    rest = torch.cat([g.new_zeros(own, n), g.flatten(1).mT])
    w = torch.empty_like(rest[own:])
    # All views at once: taken one by one they cost more than the arithmetic.
    blocks = rest.unfold(0, columns, p).mT.unbind()
    values, scales = rest[own:].unbind(), inverse.flatten(0, 1).unbind()
    lines = zip(w.unbind(), values, scales, rows.flatten(0, 1).unbind(), strict=True)
    for m, (solved, value, scale, row) in reversed(list(enumerate(lines))):
        torch.mul(value, scale, out=solved)
        blocks[m // p].addcmul_(row, solved, value=-1)
    return w.mT.unflatten(-1, (num_times, p))


class LocalIAF(nn.Module):
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

    def forward(
        self,
        z: Float[Tensor, "mc time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> tuple[Float[Tensor, "mc time state"], Float[Tensor, "mc time state"]]:
        """Return (z', log diagonal of dz'/dz); its sum over time and state is the log-Jacobian."""
        p = self.num_states
        window = past_windows(z, self.window)
        out = self.network(window, features, theta)
        mu, s = out[..., :p], out[..., p : 2 * p]
        if self.taps is not None:
            mu = mu + self.taps(window, theta)
        if self.gate == "sigmoid":
            sigma = torch.sigmoid(s)
            return sigma * z + mu * (1 - sigma), nn.functional.logsigmoid(s)
        s = soft_bound(s)
        y = s.exp() * z + mu
        return y + lower_product(out[..., 2 * p :], z) if self.coupling else y, s

    def solve_transposed(
        self,
        g: Float[Tensor, "mc time state"],
        z: Float[Tensor, "mc time state"],
        free: Float[Tensor, "1 time state"],
        features: Float[Tensor, "time features"],
        theta: Float[Tensor, "mc theta"],
    ) -> Float[Tensor, "mc time state"]:
        """The w with J'w = g, J = dz'/dz: back substitution along time, J being a lower band."""
        out, h = self.network.trace(past_windows(z, self.window), features, theta)
        by_out, by_z = self._slopes(z, out)
        band = self.network.pull_back(by_out, h)
        if self.taps is not None:
            band = band + self.taps.matrix(theta).mT[:, None]
        return solve_band_transposed(torch.cat([band, by_z], -1), g, free)

    def _slopes(
        self, z: Tensor, out: Tensor
    ) -> tuple[Float[Tensor, "mc time state out"], Float[Tensor, "mc time state state"]]:
        """dz'/d(outputs of the network) and dz'/dz at the same time, lower triangular."""
        p = self.num_states
        mu, s = out[..., :p], out[..., p : 2 * p]
        if self.gate == "sigmoid":
            sigma = torch.sigmoid(s)
            by_mu, by_s, diag = 1 - sigma, sigma * (1 - sigma) * (z - mu), sigma
        else:
            s = soft_bound(s)
            diag = s.exp()
            by_mu, by_s = torch.ones_like(z), z * diag * (1 - (s / LOG_SCALE_BOUND).square())
        by_out, by_z = [by_mu.diag_embed(), by_s.diag_embed()], diag.diag_embed()
        if self.coupling:
            rows, columns = torch.tril_indices(p, p, -1)
            by_entry = z.new_zeros(*z.shape, len(rows))
            by_entry[..., rows, torch.arange(len(rows))] = z[..., columns]
            by_out.append(by_entry)
            by_z[..., rows, columns] = out[..., 2 * p :]
        return torch.cat(by_out, -1), by_z
