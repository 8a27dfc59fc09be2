"""Observations y on the grid t_i = t_0 + i·dt: the only reader of users' files (eq. 7)."""

import csv
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.probe_data import (
    as_array,
    as_columns,
    as_names,
    check_readings,
    check_shapes,
    check_step,
    existing_file,
    grid_index,
)

MOVED = 0.01  # of dt: by more a number type must not move a time, which a drift may depend on


class Grid(NamedTuple):
    """What the model sees: dense times and observations, with a mask instead of NaN."""

    t: Float[Tensor, " time"]
    y: Float[Tensor, "time observed"]  # 0 where missing
    observed: Float[Tensor, "time observed"]  # 1 where present, 0 where missing
    dt: float


class Observations:
    """Noisy readings at some of the times t_0 + i·dt; NaN marks a missing reading.

    Nothing is rounded or dropped: a time must lie on the grid (within 1e-6·dt, or within the
    rounding of the number type it came in). The series runs to the last row, blank or not. A
    component may be missing throughout, to be predicted; one of a file may not.

    Args:
        times: M increasing times.
        y: Readings (M,) or (M, observed components).
        dt: Grid step, in the unit of the times.
        t0: Time of x_0.
        names: Names of the observed components; y0, y1, … if left out.

    >>> Observations([0.1, 0.3], [19.5, 19.2], dt=0.1).grid().y.shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        times: object,
        y: object,
        dt: float | int,
        t0: float | int = 0.0,
        names: Sequence[str] = (),
    ) -> None:
        check_step(dt, t0)
        raw_times, raw_y = as_array(times, "times"), as_array(y, "y")
        raw_y = raw_y[:, None] if raw_y.ndim == 1 else raw_y
        names = as_names(names, "names")
        check_shapes(raw_times, raw_y, names)
        rows = [f"{t:.12g} in row {i + 1}" for i, t in enumerate(raw_times)]
        self.index: Int[Tensor, " rows"] = torch.tensor(grid_index(raw_times, dt, t0, rows))
        check_readings(raw_y)
        self.times: Float[Tensor, " rows"] = torch.tensor(raw_times, dtype=torch.float64)
        self.y: Float[Tensor, "rows observed"] = torch.tensor(raw_y, dtype=torch.float64)
        self.dt, self.t0 = float(dt), float(t0)
        self.names = tuple(names) or tuple(f"y{j}" for j in range(raw_y.shape[1]))

    def __repr__(self) -> str:
        return (
            f"Observations({', '.join(self.names)}; {len(self.y)} rows to t = {self.times[-1]:g}, "
            f"{self.num_steps} steps of {self.dt:g} from {self.t0:g})"
        )

    @property
    def num_steps(self) -> int:
        """Number N of grid steps, up to the last row."""
        return int(self.index[-1])

    def grid(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Grid:
        """The readings on the dense grid i = 0..N; warns where the dtype moves the times."""
        present = ~self.y.isnan()
        y = torch.zeros(self.num_steps + 1, self.y.shape[1], dtype=torch.float64)
        observed = torch.zeros_like(y)
        y[self.index] = torch.where(present, self.y, 0.0)
        observed[self.index] = present.to(y.dtype)
        t = self.t0 + self.dt * torch.arange(self.num_steps + 1, dtype=torch.float64)
        _warn_of_times(t, self.dt, dtype)
        t, y, observed = (part.to(device=device, dtype=dtype) for part in (t, y, observed))
        return Grid(t, y, observed, self.dt)


def read_csv(
    path: str | Path,
    dt: float | int,
    time: str = "t",
    observed: Sequence[str] = ("y",),
    t0: float | int = 0.0,
) -> Observations:
    """Observations from the named columns of a comma-separated file; a blank cell is missing.

    Args:
        path: File with one header line; columns that are not named are ignored.
        dt: Grid step, in the unit of the time column.
        time: Name of the time column.
        observed: Names of the columns with readings.
        t0: Time of x_0.

    Raises:
        ValueError: With the row (counted from 1 below the header), the line of the file and the
            text found there, if a cell or a time is not acceptable.
    """
    check_step(dt, t0)
    time, *names = as_columns(time, observed)
    times, y, rows = [], [], []
    for place, time_text, *texts in _named_cells(existing_file(path), [time, *names]):
        times.append(_number(time_text, time, place, blank=None))
        y.append([_number(s, name, place) for s, name in zip(texts, names, strict=True)])
        rows.append(f"'{time_text}' in {place}")
    if not times:
        raise ValueError(f"a data file must have at least one row; got none in {path}.")
    grid_index(np.array(times), dt, t0, rows)
    if blank := [name for name, c in zip(names, np.array(y).T, strict=True) if np.isnan(c).all()]:
        raise ValueError(
            f"each observed column must hold at least one value; got only missing ones in {blank} "
            f"of {path}. Leave it out of observed, and its column out of F."
        )
    return Observations(times, y, dt, t0, names)


def data_path(name: str) -> Path:
    """Path of a file in the repository's data folder, from any working directory."""
    folder = Path(__file__).resolve().parents[1] / "data"
    if not (folder / name).is_file():
        found = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        raise FileNotFoundError(f"no file '{name}' in {folder}; there are: {', '.join(found)}.")
    return folder / name


def _warn_of_times(t: Float[Tensor, " time"], dt: float, dtype: torch.dtype) -> None:
    """Unix seconds are 128 apart in float32: a drift that depends on time is then another."""
    moved = float((t.to(dtype).double() - t).abs().max())
    if moved > MOVED * dt:
        warnings.warn(
            f"times near {float(t[-1]):g} cannot be told apart in {str(dtype)[6:]}, which moves "
            f"them by up to {moved:.2g}, with dt = {dt:g}: a drift or diffusion that depends on t "
            "would see others. Count time from the start of the data, or fit with dtype='float64'.",
            stacklevel=4,
        )


def _named_cells(path: Path, names: list[str]) -> Iterator[list[str]]:
    """Place of every data row, then its cells in the named columns."""
    records = _records(path)
    _, header = next(records, (0, []))
    columns = [_column(name, header, path) for name in names]
    for row, (line, cells) in enumerate(records, start=1):
        place = f"data row {row} (line {line} of {path.name})"
        if len(cells) != len(header):
            raise ValueError(
                f"every row must have {len(header)} cells, as the header has; got {len(cells)} in "
                f"{place}: '{','.join(cells)}'."
            )
        yield [place, *(cells[column] for column in columns)]


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, stripped cells) of every line that is not empty."""
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as err:
        raise ValueError(
            f"{path} must be comma-separated text; got {err} in line {reader.line_num}. Is a "
            "quotation mark not closed?"
        ) from err


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        # utf-8-sig drops the byte-order mark that spreadsheets put before the first name.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        raise ValueError(
            f"{path} must be comma-separated UTF-8 text; got byte {raw[err.start]:#04x} in line "
            f"{line}. Save it as CSV (UTF-8)."
        ) from err


def _column(name: str, header: list[str], path: Path) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise ValueError(f"column '{name}' must occur once in {path}; got {header.count(name)}.")
    hint, first = "", ",".join(header)
    if first.startswith("#"):
        hint = " Delete the lines above the header."
    elif len(header) == 1 or ";" in first or "\t" in first:
        hint = " Is it separated by something else than commas?"
    found = ", ".join(f"'{column}'" for column in header) or "no header line"
    raise ValueError(f"column '{name}' must be in the header of {path}; got {found}.{hint}")


def _number(text: str, column: str, place: str, blank: float | None = math.nan) -> float:
    """The number in a cell; ``blank`` stands for an empty one, None refuses it."""
    if not text:
        if blank is None:
            raise ValueError(
                f"column '{column}' must give a time in every row; got '' in {place}. Delete a row "
                "that is blank altogether."
            )
        return blank
    try:
        value = float("nan" if "_" in text else text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        hint = "Leave the cell blank for a missing value."
        if any(letter.isdigit() for letter in text):
            hint = "Write the number alone, with a point and a plain minus, if any."
        if blank is None:
            hint = "Count time from a moment of your choice, in the unit of dt."
        raise ValueError(
            f"column '{column}' must hold plain numbers, as 1234.5; got '{text}' in {place}. {hint}"
        )
    if math.isinf(value):
        raise ValueError(f"column '{column}' must be finite; got '{text}' in {place}.")
    return value
