"""What the path flow's networks see of the data at each grid time."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid


def past_features(grid: Grid, k: int) -> Float[Tensor, "time features"]:
    """The paper's features: y_{i-k}, …, y_{i-1}, zero where there is no observation."""
    return windows(grid.y * grid.observed, k, -k, -1)


def centred_features(grid: Grid, k: int) -> Float[Tensor, "time features"]:
    """Windows i-k…i+k of (standardised y, observed?, inside the grid?), and four clocks.

    The clocks are the time on [-1, 1], the grid steps since the last and to the next observation
    (log1p, over k) and the standardised y interpolated between observations.
    """
    observed = grid.observed
    mean, sd = mean_sd(grid)
    y = (grid.y - mean) / sd * observed
    series = torch.cat([y, observed, torch.ones_like(grid.t)[:, None]], -1)
    clocks = [torch.linspace(-1, 1, len(grid.t), dtype=y.dtype, device=y.device)[:, None]]
    for seen in (observed, observed.flip(0)):
        since = steps_since(seen)
        clocks.append(torch.log1p(since if seen is observed else since.flip(0)) / k)
    return torch.cat([windows(series, k, -k, k), *clocks, interpolate(y, observed)], -1)


def mean_sd(grid: Grid) -> tuple[Float[Tensor, " obs"], Float[Tensor, " obs"]]:
    """Mean and sd of each component over its observations; sd 1 where it does not vary."""
    count = grid.observed.sum(0).clamp(min=1.0)
    mean = (grid.y * grid.observed).sum(0) / count
    sd = (((grid.y - mean) * grid.observed).square().sum(0) / count).sqrt()
    return mean, torch.where(sd > 0, sd, torch.ones_like(sd))


def windows(
    series: Float[Tensor, "time channels"], k: int, first: int, last: int
) -> Float[Tensor, "time features"]:
    """Values at i+first … i+last side by side, zero off the series; |first|, |last| ≤ k."""
    padded = torch.nn.functional.pad(series, (0, 0, k, k))
    n = len(series)
    return torch.cat([padded[k + j : k + j + n] for j in range(first, last + 1)], -1)


def steps_since(observed: Float[Tensor, "time obs"]) -> Float[Tensor, "time obs"]:
    """Grid steps since each component was last observed; before that, since the start."""
    index = torch.arange(len(observed), device=observed.device)[:, None]
    last = torch.where(observed > 0, index, torch.zeros_like(index)).cummax(0).values
    return (index - last).to(observed.dtype)


def interpolate(
    y: Float[Tensor, "time obs"], observed: Float[Tensor, "time obs"]
) -> Float[Tensor, "time obs"]:
    """Each component joined by straight lines between its observations, constant outside them."""
    index = np.arange(len(y))
    columns = []
    for value, seen in zip(y.T.cpu().numpy(), observed.T.cpu().numpy() > 0, strict=True):
        columns.append(np.interp(index, index[seen], value[seen]) if seen.any() else 0.0 * index)
    return torch.as_tensor(np.stack(columns, -1), dtype=y.dtype, device=y.device)
