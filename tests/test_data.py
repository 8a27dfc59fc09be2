"""Observations and the CSV reader: what enters, what is refused, and what the sentence says."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from lib import probe_data
from lib.data import Observations, data_path, read_csv

HEADER = "t,y\n"


@pytest.fixture
def write(tmp_path):
    """Writes text (or bytes) to a file and gives its path."""

    def _write(content):
        path = tmp_path / "my.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return _write


def test_grid_is_dense_and_has_a_mask_instead_of_nan():
    observations = Observations([1.1, 1.3], [[1.0, math.nan], [3.0, 4.0]], dt=0.1, t0=1)
    grid = observations.grid()
    torch.testing.assert_close(grid.t, torch.tensor([1.0, 1.1, 1.2, 1.3], dtype=torch.float64))
    assert grid.y.tolist() == [[0, 0], [1, 0], [0, 0], [3, 4]]
    assert grid.observed.tolist() == [[0, 0], [1, 0], [0, 0], [1, 1]]
    assert grid.dt == 0.1
    assert observations.index.tolist() == [1, 3] and observations.num_steps == 3


def test_grid_has_the_type_that_is_asked_for():
    grid = Observations([1.0], [2.0], dt=0.5).grid(torch.float32)
    assert {grid.t.dtype, grid.y.dtype, grid.observed.dtype} == {torch.float32}


@pytest.mark.parametrize(
    "convert", [list, tuple, np.array, torch.tensor, lambda v: torch.tensor(v).requires_grad_()]
)
def test_lists_arrays_and_tensors_become_double_columns(convert):
    observations = Observations(convert([0.1, 0.2]), convert([1.0, 2.0]), dt=0.1)
    assert observations.times.dtype == observations.y.dtype == torch.float64
    assert observations.times.tolist() == [0.1, 0.2] and observations.y.tolist() == [[1.0], [2.0]]
    assert observations.names == ("y0",) and not observations.y.requires_grad


def test_masked_arrays_are_missing_where_masked():
    """Kills the number under the mask, which is what numpy's asarray gives."""
    y = np.ma.masked_array([1, 999], mask=[False, True])
    observations = Observations([0.1, 0.2], y, dt=0.1)
    assert observations.grid().observed[:, 0].tolist() == [0, 1, 0]
    assert observations.grid().y[:, 0].tolist() == [0, 1, 0]


def test_changing_the_input_afterwards_changes_nothing():
    y = torch.tensor([1.0, 2.0], dtype=torch.float64)
    observations = Observations([0.1, 0.2], y, dt=0.1)
    y[0] = 99.0
    assert observations.y[0, 0] == 1.0


def test_an_observation_at_t0_is_row_zero():
    grid = Observations([0.0, 0.1], [5.0, 6.0], dt=0.1).grid()
    assert grid.y[:, 0].tolist() == [5.0, 6.0]


def test_series_runs_to_the_last_row_even_if_blank():
    assert Observations([0.1, 0.5], [1.0, math.nan], dt=0.1).num_steps == 5


@pytest.mark.parametrize("time", [0.1 + 0.2, 0.3 + 0.9e-7, 0.3 - 0.9e-7])
def test_times_within_the_tolerance_are_on_the_grid(time):
    assert Observations([time], [1.0], dt=0.1).num_steps == 3


def test_single_precision_times_are_judged_by_their_own_rounding():
    times = (0.1 * torch.arange(1, 201, dtype=torch.float64)).to(torch.float32)
    assert Observations(times, torch.ones(200), dt=0.1).num_steps == 200


def test_negative_t0_and_integer_times():
    observations = Observations([-2, 0, 3], [1, 2, 3], dt=1, t0=-3)
    assert observations.index.tolist() == [1, 3, 6]


def test_times_that_single_precision_moves_are_warned_of():
    """Unix seconds, 64 or more apart in float32; days are held. Kills a warning for every fit."""
    start = 1.7e9
    seconds = Observations([start + 60.0, start + 600.0], [1.0, 2.0], dt=60.0, t0=start)
    sentence = (
        r"times near 1.7e\+09 cannot be told apart in float32, .* by up to \d\d, with dt = 60"
    )
    with pytest.warns(UserWarning, match=sentence):
        seconds.grid(torch.float32)
    assert seconds.grid().t.diff().unique().tolist() == [60.0]
    Observations([20_000.0], [1.0], dt=0.25).grid(torch.float32)
    Observations([10_000.0], [1.0], dt=0.1).grid(torch.float32)


REFUSED_TIMES = {
    "off the grid": ([0.1, 0.25], r"grid t0 \+ i\*dt \(t0 = 0, dt = 0.1\); got 0.25 in row 2. The "
                     r"nearest grid times are 0.2 and 0.3"),
    "just off the grid": ([0.1 + 2e-7], r"got 0.1000002 in row 1.*Write the times with more dig"),
    "rounded": ([0.1, 0.1995], r"got 0.1995 in row 2.*Write the times with more digits, or in a u"),
    "before t0": ([-0.1, 0.1], r"got -0.1 in row 1, which is before t0"),
    "off the grid and before t0": ([-0.05, 0.1], r"got -0.05 in row 1, which is before t0"),
    "repeated": ([0.1, 0.1], r"times must increase; got 0.1 in row 2, which repeats"),
    "repeated to rounding": ([0.3, 0.1 + 0.2], r"got 0.3 in row 2, which repeats"),
    "out of order": ([0.2, 0.1], r"got 0.1 in row 2, which comes before the row above"),
    "missing": ([0.1, math.nan], r"times must be finite; got nan in row 2"),
    "infinite": ([0.1, math.inf], r"times must be finite; got inf in row 2"),
    "in another unit": ([0.1, 1e9], r"got 1000000000 in row 2. Is dt in another unit"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_TIMES)
def test_bad_times_are_refused(name):
    times, message = REFUSED_TIMES[name]
    with pytest.raises(ValueError, match=message):
        Observations(times, [1.0] * len(times), dt=0.1)


@pytest.mark.parametrize(
    ("times", "y", "message"),
    [
        ([], [], r"at least one row; got none"),
        ([0.1, 0.2], [math.nan, math.nan], r"at least one value; got only missing ones"),
        ([0.1, 0.2], [1.0, math.inf], r"y must be finite, or NaN where missing; got inf in row 2"),
        ([0.1, 0.2], [1.0], r"same M; got \(2,\) and \(1, 1\)"),
        ([0.1], 1.0, r"times must be \(M,\).*got \(1,\) and \(\)"),
        ([0.0], [1.0], r"last time must be after t0 = 0; got 0 in row 1 only"),
        ([0.1], ["a"], r"y must be numbers, NaN where missing; got .*'a'"),
        ([0.1], [1j], r"y must be numbers, NaN where missing; got complex ones"),
        (np.array(["2020-01-01"], "M8[D]"), [1.0], r"times must be numbers.*dates; count them"),
    ],
)
def test_bad_readings_are_refused(times, y, message):
    with pytest.raises(ValueError, match=message):
        Observations(times, y, dt=0.1)


@pytest.mark.parametrize("dt", [0, -1.0, math.nan, math.inf])
def test_step_must_be_positive_and_finite(dt, write):
    with pytest.raises(ValueError, match=r"dt must be positive and finite; got .*grid step"):
        Observations([0.1], [1.0], dt=dt)
    with pytest.raises(ValueError, match=r"dt must be positive and finite; got .*grid step"):
        read_csv(write(HEADER + "0.1,1\n"), dt=dt)


def test_t0_must_be_finite():
    with pytest.raises(ValueError, match=r"t0 must be finite; got nan"):
        Observations([0.1], [1.0], dt=0.1, t0=math.nan)


def test_names_must_fit():
    with pytest.raises(
        ValueError, match=r"one entry a column of y, 1, each another; got \['a', 'b'\]"
    ):
        Observations([0.1], [1.0], dt=0.1, names=("a", "b"))


def test_names_must_differ():
    with pytest.raises(ValueError, match=r"column of y, 2, each another; got \['a', 'a'\]"):
        Observations([0.1], [[1.0, 2.0]], dt=0.1, names=("a", "a"))


def test_a_component_may_be_held_out_of_the_observations():
    """It is predicted then. Kills a refusal that is meant for columns of a file."""
    observations = Observations([0.1, 0.2], [[1.0, math.nan], [2.0, math.nan]], dt=0.1)
    assert observations.grid().observed.tolist() == [[0, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize("blank", [["b"], ["a", "b"]])
def test_a_blank_column_of_a_file_is_named(blank, write):
    """Kills a likelihood without a component that the reader believes in."""
    first = "" if "a" in blank else "1"
    path = write(f"t,a,b\n0.1,{first},\n0.2,,\n")
    with pytest.raises(ValueError, match=rf"only missing ones in \{blank}.*out of F"):
        read_csv(path, dt=0.1, observed=["a", "b"])


@pytest.mark.parametrize(
    ("check", "given", "words"),
    [
        (
            probe_data.check_step,
            ("0.1", 0.0),
            "dt must be a number; got '0.1'. It is the grid step",
        ),
        (probe_data.check_step, (torch.tensor(0.1), 0.0), r"dt must be a number; got tensor\(0.1"),
        (
            probe_data.check_step,
            (0.1, pd.Timestamp("2020-01-01")),
            "t0 must be a number; got Timestamp",
        ),
        (probe_data.as_columns, ("t", None), "observed must be a list of names; got None"),
        (probe_data.as_columns, ("t", "y"), "observed must be a list of names; got 'y'"),
        (probe_data.as_columns, ("t", [1]), r"observed must be a list of names; got \[1\]"),
        # The columns would come in any order, and F with them.
        (probe_data.as_columns, ("t", {"a", "b"}), "observed must be a list of names; got {'"),
        (probe_data.as_columns, (0, ["y"]), "time must be the name of a column; got 0"),
        (probe_data.as_names, ("ab", "names"), "names must be a list of names; got 'ab'"),
        (probe_data.existing_file, (None,), "path must be text or a Path; got NoneType"),
        (probe_data.as_path, (3, "folder"), "folder must be text or a Path; got int"),
    ],
)
def test_what_is_of_another_kind_is_refused(check, given, words):
    """Kills an error of math or pathlib that names no argument."""
    with pytest.raises(TypeError, match=words):
        # The check alone: the shape checks of the tests would refuse it before.
        check(*given)


def test_numbers_and_names_of_numpy_and_pandas_are_taken():
    probe_data.check_step(np.float32(0.5), np.int64(1))
    columns = probe_data.as_columns("t", pd.DataFrame({"a": [1], "b": [2]}).columns)
    assert columns == ["t", "a", "b"]


def test_a_path_that_is_no_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"path must name a file; got the folder {tmp_path}"):
        read_csv(tmp_path, dt=0.1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"got my.csv, looked for in {tmp_path}"):
        read_csv("my.csv", dt=0.1)


def test_csv_columns_are_picked_by_name(write):
    path = write("name,in_bed,day,convalescent\nx,3,1,0\ny,,2,\nz,26,4,9\n")
    observations = read_csv(path, dt=0.5, time="day", observed=["convalescent", "in_bed"])
    assert observations.names == ("convalescent", "in_bed")
    assert observations.times.tolist() == [1.0, 2.0, 4.0]
    torch.testing.assert_close(
        observations.y,
        torch.tensor([[0, 3], [math.nan, math.nan], [9, 26]], dtype=torch.float64),
        equal_nan=True,
    )


GOOD_FILES = {
    "byte-order mark": "\ufefft,y\n0.1,1\n0.2,2\n",
    "windows line ends": "t,y\r\n0.1,1\r\n0.2,2\r\n",
    "no line end at the end": "t,y\n0.1,1\n0.2,2",
    "quoted cells": '"t","y"\n"0.1","1"\n"0.2","2"\n',
    "spaces": " t , y \n 0.1 , 1 \n0.2,  2\n",
    "empty lines": "\nt,y\n0.1,1\n\n0.2,2\n\n\n",
    "other notation": "t,y\n1e-1,+1.0\n.2,2.\n",
    "old line ends": "t,y\r0.1,1\r0.2,2\r",
    "leading zeros": "t,y\n00.1,01\n0.2,02.0\n",
    "blank columns": "t,y,,\n0.1,1,,\n0.2,2,,\n",
    "many empty lines": "t,y\n0.1,1\n0.2,2\n" + "\n" * 99999,
    "a column that is not named": "t,y,note\n0.1,1,nan\n0.2,2,\n",
    "an unnamed column twice": "t,y,note,note\n0.1,1,a,b\n0.2,2,c,d\n",
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_harmless_variants_are_read(name, write):
    observations = read_csv(write(GOOD_FILES[name]), dt=0.1)
    assert observations.times.tolist() == [0.1, 0.2] and observations.y.tolist() == [[1.0], [2.0]]


BAD_FILES = {
    "off the grid": ("t,y\n0.1,1\n0.250,2\n", r"dt = 0.1\); got '0.250' in data row 2 \(line 3 of"
                     r" my.csv\). The nearest grid times are 0.2 and 0.3"),
    "line counts empty lines": ("t,y\n\n0.1,1\n\n0.25,2\n", r"'0.25' in data row 2 \(line 5 of"),
    "before t0": ("t,y\n-0.1,1\n", r"got '-0.1' in data row 1 \(line 2 .*before t0"),
    "repeated": ("t,y\n0.1,1\n0.10,2\n", r"increase; got '0.10' in data row 2 .*repeats .* "
                 r"Put readings of one time into columns"),
    "out of order": ("t,y\n0.2,1\n0.1,2\n", r"increase; got '0.1' in data row 2 .*before.*Sort"),
    "text": ("t,y\n0.1,1\n0.2,two\n", r"'y' must hold plain.*got 'two' in data row 2 \(line 3"),
    "nan": ("t,y\n0.1,1\n0.2,nan\n", r"got 'nan' in data row 2 .*Leave the cell blank"),
    "NA": ("t,y\n0.1,NA\n0.2,1\n", r"got 'NA' in data row 1 .*Leave the cell blank"),
    "decimal comma": ('t,y\n0.1,"1,5"\n', r"as 1234.5; got '1,5' in data row 1"),
    "decimal comma, bare": ("t,y\n0,1,1,5\n", r"2 cells.*got 4 in data row 1 .*: '0,1,1,5'"),
    "thousands": ('t,y\n0.1,"1,000"\n', r"as 1234.5; got '1,000' in data row 1 \(line 2"),
    "unit": ("t,y\n0.1,5 mg\n", r"got '5 mg' in data row 1 .*Write the number alone"),
    "typeset minus": ("t,y\n0.1,\u22125\n", r"got '\u22125' in data row 1 .*a plain minus"),
    "null": ("t,y\n0.1,null\n", r"got 'null' in data row 1 .*Leave the cell blank"),
    "date": ("t,y\n2020-01-01,1\n", r"'t' must .*got '2020-01-01' in data row 1 .*Count ti"),
    "NUL": ("t,y\n0.1,\0\n", r"'y' must hold plain numbers.*in data row 1"),
    "underscore": ("t,y\n0.1,1_000\n", r"got '1_000' in data row 1"),
    "infinite": ("t,y\n0.1,-inf\n", r"'y' must be finite; got '-inf' in data row 1"),
    "overflow": ("t,y\n0.1,1e999\n", r"'y' must be finite; got '1e999' in data row 1"),
    "time is text": ("t,y\nnoon,1\n", r"'t' must .*got 'noon' in data row 1 .*Count time"),
    "time is infinite": ("t,y\ninf,1\n", r"'t' must be finite; got 'inf' in data row 1"),
    "time is blank": ("t,y\n0.1,1\n,2\n", r"'t' must give a time.*got '' in data row 2 \(line 3"),
    "rows of commas": ("t,y\n0.1,1\n" + ",\n" * 9999, r"'t' must give .*row 2 .*Delete a row"),
    "a comma too many": ("t,y\n0.1,1,\n", r"2 cells.*got 3 in data row 1 .*: '0.1,1,'"),
    "short row": ("t,y\n0.1,1\n0.2\n", r"2 cells.*got 1 in data row 2 \(line 3 .*: '0.2'"),
    "long row": ("t,y\n0.1,1,5\n", r"2 cells.*got 3 in data row 1 \(line 2 .*: '0.1,1,5'"),
    "no rows": ("t,y\n", r"at least one row; got none in .*my.csv"),
    "no value": ("t,y\n0.1,\n0.2,\n", r"at least one value; got only missing ones"),
    "empty": ("", r"column 't' must be in the header of .*; got no header line"),
    "absent": ("t,z\n0.1,1\n", r"column 'y' must be in the header of .*; got 't', 'z'"),
    "semicolons": ("t;y\n0.1;1\n", r"column 't' .*; got 't;y'. Is it separated by something else"),
    "semicolons and a comma": ("t;y;a, b\n0.1;1;2\n", r"'t;y;a', 'b'. Is it separated by somet"),
    "comment": ("# mine\nt,y\n0.1,1\n", r"got '# mine'. Delete the lines above the header"),
    "tabs": ("t\ty\n0.1\t1\n", r"column 't' .*Is it separated by something else"),
    "no header": ("0.1,1\n0.2,2\n", r"column 't' must be in the header of .*; got '0.1', '1'"),
    "other case": ("T,Y\n0.1,1\n", r"column 't' must be in the header of .*; got 'T', 'Y'"),
    "named twice": ("t,y,y\n0.1,1,2\n", r"column 'y' must occur once in .*; got 2"),
    "only t0": ("t,y\n0,1\n", r"last time must be after t0 = 0; got '0' in data row 1"),
    "UTF-16": ("t,y\n0.1,1\n".encode("utf-16"), r"UTF-8 text; got byte 0xff in line 1. Save it as"),
    "latin-1": ("t,y,o\n0.1,1,a\n0.2,2,ü\n".encode("latin-1"), r"UTF-8 .*got byte 0xfc in line 3"),
    "open quote": ('t,y\n0.1,"1\n' + "0.2,1\n" * 25000, r"larger than field.*Is a quotation"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_with_row_and_text(name, write):
    content, message = BAD_FILES[name]
    with pytest.raises(ValueError, match=message):
        read_csv(write(content), dt=0.1)


@pytest.mark.parametrize("observed", [[], ["y", "y"], ["y", "t"]])
def test_observed_names_each_column_once(observed, write):
    with pytest.raises(
        ValueError, match=r"observed must name each column once, and not 't'; got \["
    ):
        read_csv(write(HEADER + "0.1,1\n"), dt=0.1, observed=observed)


def test_observed_is_a_list_not_one_name(write):
    with pytest.raises(TypeError, match=r"observed must be a list of names; got 'y'"):
        read_csv(write(HEADER + "0.1,1\n"), dt=0.1, observed="y")


def test_a_missing_data_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no file 'nothing.csv' in .*data"):
        data_path("nothing.csv")


def test_data_path_works_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data_path("boarding_school_1978.csv").is_absolute()
