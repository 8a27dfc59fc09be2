"""Door of the data: paths, names, times and readings, refused with a sentence if they cannot be."""

import math
import os
from collections.abc import Iterable, Set
from numbers import Real
from pathlib import Path

import numpy as np
from torch import Tensor

TIME_TOLERANCE = 1e-6  # in units of dt
ROUNDED = 0.01  # likewise: a time as near as this to the grid was meant to be on it
MAX_STEPS = 10**8  # a longer path fits into no machine: a slip in the unit of dt


def as_path(path: object, role: str = "path") -> Path:
    """The path, if it can be one."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{role} must be text or a Path; got {type(path).__name__}.")
    return Path(path)


def existing_file(path: object) -> Path:
    """The path of a file that is there."""
    path = as_path(path)
    if path.is_dir():
        raise ValueError(f"path must name a file; got the folder {path}.")
    if not path.exists():
        raise FileNotFoundError(
            f"path must name a file that is there; got {path}, looked for in {Path.cwd()}."
        )
    return path


def as_names(names: object, role: str) -> list[str]:
    """A list of names; a set is none, because it has no order."""
    listed = isinstance(names, Iterable) and not isinstance(names, str | Set)
    found = list(names) if listed else []
    if not listed or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{role} must be a list of names; got {names!r}.")
    return found


def as_columns(time: object, observed: object) -> list[str]:
    """Names of all columns to read, that of the times first."""
    names = as_names(observed, "observed")
    if not isinstance(time, str):
        raise TypeError(f"time must be the name of a column; got {time!r}.")
    if not names or len({time, *names}) <= len(names):
        raise ValueError(f"observed must name each column once, and not '{time}'; got {names}.")
    return [time, *names]


def check_step(dt: object, t0: object) -> None:
    """The grid: a positive step and a finite start."""
    for name, value, what in (("dt", dt, "the grid step"), ("t0", t0, "the time of x_0")):
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {value!r}. It is {what}.")
    if not (math.isfinite(dt) and dt > 0):
        raise ValueError(f"dt must be positive and finite; got {dt}. It is the grid step.")
    if not math.isfinite(t0):
        raise ValueError(f"t0 must be finite; got {t0}. It is the time of x_0.")


def as_array(values: object, name: str) -> np.ndarray:
    """Float array, of single precision only if it came so."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        if isinstance(values, np.ma.MaskedArray):
            values = values.astype(np.float64).filled(np.nan)
        array = np.asarray(values)
        if array.dtype.kind in "mM":
            raise TypeError("dates; count them from a day of your choice")
        if array.dtype.kind == "c":
            raise TypeError("complex ones")
        return array if array.dtype == np.float32 else array.astype(np.float64)
    except (TypeError, ValueError) as err:
        raise ValueError(f"{name} must be numbers, NaN where missing; got {err}.") from err


def check_shapes(times: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """As many rows of y as times, one at least, and a name for each column if there are names."""
    if times.ndim != 1 or y.ndim != 2 or len(times) != len(y) or y.shape[1] == 0:
        raise ValueError(
            "times must be (M,) and y (M,) or (M, observed components) with the same M; got "
            f"{times.shape} and {y.shape}."
        )
    if len(times) == 0:
        raise ValueError("observations must have at least one row; got none.")
    if names and not len(names) == len(set(names)) == y.shape[1]:
        raise ValueError(
            f"names must have one entry a column of y, {y.shape[1]}, each another; got {names}."
        )


def check_readings(y: np.ndarray) -> None:
    """Finite or NaN, and one of them a number."""
    for i, j in np.argwhere(np.isinf(y)):
        raise ValueError(f"y must be finite, or NaN where missing; got {y[i, j]} in row {i + 1}.")
    if np.isnan(y).all():
        raise ValueError("y must hold at least one value; got only missing ones.")


def grid_index(times: np.ndarray, dt: float | int, t0: float | int, rows: list[str]) -> list[int]:
    """Index i of every time t_0 + i·dt; refuses any other time, and any order but increasing."""
    rule = f"times must lie on the grid t0 + i*dt (t0 = {t0:.12g}, dt = {dt:.12g})"
    resolution = 4 * np.finfo(times.dtype).eps
    index: list[int] = []
    for t, row in zip(times.astype(np.float64), rows, strict=True):
        # A number type that cannot hold the grid time any better is not the user's slip.
        tolerance = max(TIME_TOLERANCE * dt, min(resolution * abs(t), 1e-3 * dt))
        if not math.isfinite(t):
            raise ValueError(f"times must be finite; got {row}.")
        if t < t0 - tolerance:
            raise ValueError(f"{rule} with i >= 0; got {row}, which is before t0.")
        if t > t0 + MAX_STEPS * dt:
            raise ValueError(f"{rule} with i <= {MAX_STEPS}; got {row}. Is dt in another unit?")
        i = round((t - t0) / dt)
        off = abs(t - (t0 + i * dt))
        if off > tolerance:
            below = t0 + math.floor((t - t0) / dt) * dt
            hint = f"The nearest grid times are {below:.12g} and {below + dt:.12g}."
            if off < ROUNDED * dt:
                hint += " Write the times with more digits, or in a unit that makes dt a round one."
            raise ValueError(f"{rule}; got {row}. {hint}")
        if index and i <= index[-1]:
            fault, hint = "comes before", "Sort the rows."
            if i == index[-1]:
                fault, hint = "repeats the time of", "Put readings of one time into columns."
            raise ValueError(
                f"times must increase; got {row}, which {fault} the row above it. {hint}"
            )
        index.append(i)
    if index[-1] == 0:
        raise ValueError(f"the last time must be after t0 = {t0:.12g}; got {rows[-1]} only.")
    return index
