"""Tables of draws of q, as they are and importance-weighted: E f ≈ Σ w f, with Σ w = 1 (PSIS)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Observations
from lib.probe_data import as_path
from lib.weights import K_HAT_LIMIT, arviz, k_hat, psis_weights, weighted_quantiles

THETA_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
PATH_LEVELS = (0.025, 0.5, 0.975)


class Draws(NamedTuple):
    """Draws of q, float64 on the CPU; log_weight = log_joint − log_q, unnormalised."""

    theta: Float[Tensor, "mc theta"]
    vartheta: Float[Tensor, "mc theta"]
    x: Float[Tensor, "mc time state"]
    log_q: Float[Tensor, " mc"]
    log_joint: Float[Tensor, " mc"]
    log_weight: Float[Tensor, " mc"]


def theta_table(names: Sequence[str], draws: Draws) -> pd.DataFrame:
    """Mean, sd and quantiles of each θ, a row a parameter: of the draws, then weighted.

    A mean may be infinite, where θ = exp(ϑ) overflows in some draw; there is no sd then.
    """
    columns = _summaries(draws.theta, draws.log_weight, THETA_LEVELS)
    return pd.DataFrame(columns, index=pd.Index(list(names), name="parameter"))


def path_table(names: Sequence[str], t: Float[Tensor, " time"], draws: Draws) -> pd.DataFrame:
    """Mean, sd and quantiles of x, a row for each time and state: of the draws, then weighted."""
    columns = _summaries(draws.x.flatten(1), draws.log_weight, PATH_LEVELS)
    place = {"t": np.repeat(t.numpy(), len(names)), "state": list(names) * len(t)}
    return pd.DataFrame(place | columns)


def draws_table(names: Sequence[str], draws: Draws) -> pd.DataFrame:
    """θ by name, then log q, log p(ϑ, x, y) and their difference, a row a draw.

    Raises:
        ValueError: If a parameter has the name of one of these three.
    """
    ends = ("log_q", "log_joint", "log_weight")
    _check_free(names, ends, "a table of draws", "densities")
    values = torch.cat([draws.theta, torch.stack([getattr(draws, s) for s in ends], 1)], 1)
    return pd.DataFrame(values.numpy(), columns=[*names, *ends])


def write_csv(folder: str | Path, tables: Mapping[str, pd.DataFrame]) -> list[Path]:
    """Write each table to NAME.csv, ten digits a number and nothing where there is none."""
    folder = as_path(folder, "folder")
    if folder.is_file():
        raise ValueError(f"folder must name a folder; got the file {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.csv" for name in tables]
    for path, table in zip(paths, tables.values(), strict=True):
        table.to_csv(path, index=False, float_format="%.10g", encoding="utf-8")
    return paths


def inference_data(
    theta_names: Sequence[str],
    state_names: Sequence[str],
    observations: Observations,
    draws: Draws,
) -> "arviz.InferenceData":
    """Draws as posterior and sample_stats of one chain, for they are independent; and the data.

    Raises:
        ValueError: If a name is that of a dimension of its group.
    """
    keeper = "InferenceData", "dimensions"
    _check_free((*theta_names, *state_names), ("chain", "draw", "time"), *keeper)
    _check_free(observations.names, ("observation_time",), *keeper)
    theta, x = draws.theta.numpy()[None], draws.x.numpy()[None]
    posterior = {name: theta[..., j] for j, name in enumerate(theta_names)}
    posterior |= {name: x[..., j] for j, name in enumerate(state_names)}
    stats = {"lp": draws.log_joint, "log_q": draws.log_q, "log_weight": draws.log_weight}
    # A group at a time: a state and a column of the data may have one name, and other dimensions.
    return arviz.InferenceData(
        posterior=arviz.dict_to_dataset(
            posterior,
            coords={"time": observations.grid().t.numpy()},
            dims={name: ["time"] for name in state_names},
        ),
        sample_stats=arviz.dict_to_dataset({k: v.numpy()[None] for k, v in stats.items()}),
        observed_data=arviz.dict_to_dataset(
            {name: observations.y[:, j].numpy() for j, name in enumerate(observations.names)},
            coords={"observation_time": observations.times.numpy()},
            dims={name: ["observation_time"] for name in observations.names},
            default_dims=[],
        ),
    )


def _check_free(names: Sequence[str], taken: tuple[str, ...], keeper: str, role: str) -> None:
    if both := [name for name in names if name in taken]:
        raise ValueError(
            f"{keeper} keeps the names {taken} for its {role}; got {both} among "
            f"{tuple(names)}. Take draws(), or another name in the model or the data."
        )


def _summaries(
    values: Float[Tensor, "mc columns"],
    log_weight: Float[Tensor, " mc"],
    levels: tuple[float, ...],
) -> dict[str, np.ndarray]:
    """Statistics by name, an entry a column: of the draws as they are, then weighted.

    Between the two, ``weights_trusted``: whether k-hat, the same for every entry, is at most 0.7.
    """
    equal = torch.full_like(log_weight, 1 / len(log_weight))
    raw, weighted = (_statistics(values, w, levels) for w in (equal, psis_weights(log_weight)))
    trusted = {"weights_trusted": np.full(values.shape[1], k_hat(log_weight) <= K_HAT_LIMIT)}
    return raw | trusted | {f"weighted_{name}": entries for name, entries in weighted.items()}


def _statistics(
    values: Float[Tensor, "mc columns"], weights: Float[Tensor, " mc"], levels: tuple[float, ...]
) -> dict[str, np.ndarray]:
    """Mean, sd √(Σ w (f − mean)²) and quantiles of each column."""
    names = ["mean", "sd", *(f"q{100 * level:g}" for level in levels)]
    if weights.isnan().any():
        return {name: np.full(values.shape[1], np.nan) for name in names}
    among = weights > 0  # infinity times no weight would be no number
    kept, w = values[among], weights[among][:, None]
    mean = (w * kept).sum(0)
    sd = (w * (kept - mean).square()).sum(0).sqrt()
    at = torch.tensor(levels, dtype=values.dtype)
    rows = [mean.numpy(), sd.numpy(), *weighted_quantiles(values, at, weights).numpy()]
    return dict(zip(names, rows, strict=True))
