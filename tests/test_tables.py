"""Tables of draws: statistics written out, weights that move them, what is not finite, files."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Normal

import lib
from lib import tables
from lib.weights import k_hat, psis_weights, weighted_quantile, weighted_quantiles

THETA, STATES = ("rate", "size"), ("S", "I")
SHARES = ("q2.5", "q25", "q50", "q75", "q97.5")


def draws(n: int = 400, times: int = 3, log_weight=None, theta=None) -> tables.Draws:
    """Two parameters and two states, unequal weights; no entry has the law of another."""
    vartheta = torch.randn(n, 2) * torch.tensor([0.3, 1.0]) + torch.tensor([-1.0, 2.0])
    x = torch.randn(n, times, 2) + torch.arange(2.0 * times).reshape(times, 2) * 10
    weight = 0.7 * torch.randn(n) if log_weight is None else log_weight
    theta = vartheta.exp() if theta is None else theta
    return tables.Draws(theta, vartheta, x, torch.randn(n), torch.randn(n), weight)


def test_statistics_are_those_of_each_column():
    """Kills a level, a weight or a column in another's place, and ϑ in that of θ."""
    made = draws()
    weights = psis_weights(made.log_weight)
    table = tables.theta_table(THETA, made)
    levels = torch.tensor([0.025, 0.25, 0.5, 0.75, 0.975])
    assert table.index.tolist() == list(THETA) and table.index.name == "parameter"
    statistics = ["mean", "sd", *SHARES]
    weighted = [f"weighted_{name}" for name in statistics]
    assert table.columns.tolist() == [*statistics, "weights_trusted", *weighted]
    for name, column in zip(THETA, made.theta.T, strict=True):
        for prefix, w in (("", torch.full((400,), 1 / 400)), ("weighted_", weights)):
            mean = sum(w * column)
            sd = math.sqrt(sum(w * (column - mean) ** 2))
            quantiles = weighted_quantile(column, levels, w if prefix else None)
            want = [mean, sd, *quantiles.tolist()]
            got = table.loc[name, [prefix + s for s in statistics]].tolist()
            assert got == pytest.approx([float(v) for v in want], rel=1e-12)


@pytest.mark.parametrize("what", ["plain", "ties", "few", "no weight"])
def test_quantiles_of_many_columns_are_those_of_each(what):
    """Kills weights that are not sorted with their draws, and another rule at the ends."""
    n = 3 if what == "few" else 501
    values, weights = torch.randn(n, 7), torch.rand(n)
    if what == "ties":
        values = values.round()
        values[:, 0] = 20.0
        weights = torch.ones(n)
    if what == "no weight":
        weights[weights < 0.7] = 0.0
        values[:2, 1], weights[:2] = torch.inf, 0.0
    weights /= weights.sum()
    levels = (0.0, 0.001, 0.025, 0.5, 0.6, 0.999, 1.0)
    got = weighted_quantiles(values, torch.tensor(levels), weights)
    want = []
    for column in values.T.numpy():
        order = column[weights > 0].argsort()
        w, column = weights[weights > 0].numpy()[order], column[weights > 0][order]
        want.append(np.interp(levels, w.cumsum() - w / 2, column))
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-12)


def test_a_row_of_the_path_is_its_time_and_state():
    """Kills states that run before times, and times or states exchanged."""
    made = draws(times=4)
    t = torch.tensor([0.0, 0.5, 1.0, 1.5])
    table = tables.path_table(STATES, t, made)
    assert table["t"].tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert table["state"].tolist() == ["S", "I"] * 4
    statistics = ["mean", "sd", "q2.5", "q50", "q97.5"]
    weighted = [f"weighted_{name}" for name in statistics]
    assert table.columns.tolist() == ["t", "state", *statistics, "weights_trusted", *weighted]
    weights, levels = psis_weights(made.log_weight), torch.tensor([0.025, 0.5, 0.975])
    for row, column in zip(table.to_dict("records"), made.x.flatten(1).T, strict=True):
        assert row["mean"] == pytest.approx(column.mean().item())
        assert row["sd"] == pytest.approx(column.std(correction=0).item())
        assert row["weighted_mean"] == pytest.approx((weights @ column).item())
        for prefix, w in (("", None), ("weighted_", weights)):
            got = [row[prefix + s] for s in statistics[2:]]
            assert got == pytest.approx(weighted_quantile(column, levels, w).tolist())


def test_weights_turn_draws_of_q_into_draws_of_p():
    """q = N(0, 1), p = N(0.5, 0.8²), 40,000 draws, 5 SE. Kills log q in the place of the weight."""
    z = torch.randn(40_000)
    p, q = Normal(0.5, 0.8), Normal(0.0, 1.0)
    log_weight = p.log_prob(z) - q.log_prob(z)
    made = draws(40_000, 1, log_weight, torch.stack([z, z + 3], 1))
    table = tables.theta_table(THETA, made)
    se = 5 / math.sqrt(20_000)  # they count as about half
    for name, shift in (("rate", 0.0), ("size", 3.0)):
        row = table.loc[name]
        assert row["mean"] == pytest.approx(shift, abs=se)
        assert row["sd"] == pytest.approx(1.0, abs=se)
        assert row["weighted_mean"] == pytest.approx(shift + 0.5, abs=0.8 * se)
        assert row["weighted_sd"] == pytest.approx(0.8, abs=0.8 * se)
        for level, share in zip((0.025, 0.25, 0.5, 0.75, 0.975), SHARES, strict=True):
            for prefix, law in (("", q), ("weighted_", p)):
                want = law.icdf(torch.tensor(level))
                error = (
                    5 * math.sqrt(level * (1 - level) / 20_000) / law.log_prob(want).exp().item()
                )
                assert row[prefix + share] == pytest.approx(shift + want.item(), abs=error)


def test_equal_weights_change_nothing():
    """Kills weights that do not sum to 1, and another rule for weighted numbers than for raw."""
    table = tables.theta_table(THETA, draws(3000, log_weight=torch.full((3000,), -316.9)))
    for name in ("mean", "sd", *SHARES):
        np.testing.assert_allclose(table[name], table[f"weighted_{name}"], rtol=1e-12)


def test_an_infinite_theta_comes_back_from_the_file(tmp_path):
    """exp(ϑ) overflows in one draw. Kills inf that is cut, blank or turned into text."""
    made = draws()
    made.theta[5, 0] = torch.inf
    (path,) = tables.write_csv(tmp_path, {"p": tables.theta_table(THETA, made).reset_index()})
    back = pd.read_csv(path, index_col="parameter")
    assert back.loc["rate", "mean"] == math.inf == back.loc["rate", "weighted_mean"]
    assert math.isnan(back.loc["rate", "sd"]) and ",inf,," in path.read_text()
    assert np.isfinite(back.loc["rate", list(SHARES)].to_numpy()).all()
    assert np.isfinite(back.loc["size"].to_numpy(float)).all()
    # A draw without weight does not count, whatever it is.
    weightless = made._replace(log_weight=made.log_weight.clone())
    weightless.log_weight[5] = -torch.inf
    table = tables.theta_table(THETA, weightless)
    assert np.isfinite(table.loc["rate", [c for c in table if c.startswith("weighted")]]).all()
    assert table.loc["rate", "mean"] == math.inf


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_a_draw_whose_weight_is_no_number_has_none(bad):
    """Kills NaN in every weighted number for one draw at which the drift overflowed."""
    log_weight = torch.randn(400)
    log_weight[7] = bad
    made = draws(log_weight=log_weight)
    table = tables.theta_table(THETA, made)
    keep = torch.arange(400) != 7
    # Not those of the 399 alone: how long the smoothed tail is depends on the number of draws.
    weights = psis_weights(log_weight.nan_to_num(-torch.inf, neginf=-torch.inf))
    assert weights[7] == 0
    want = weights[keep] @ made.theta[keep]
    np.testing.assert_allclose(table["weighted_mean"], want, rtol=1e-12)


@pytest.mark.parametrize("bad", [-torch.inf, torch.inf, torch.nan])
def test_without_any_weight_the_weighted_cells_are_blank(bad, tmp_path):
    """Kills a warning of numpy, and quantiles made of NaN weights."""
    made = draws(log_weight=torch.full((400,), bad))
    table = tables.path_table(STATES, torch.arange(3.0), made)
    (path,) = tables.write_csv(tmp_path, {"paths": table})
    assert np.isfinite(table[["mean", "sd", "q2.5", "q50", "q97.5"]]).all(axis=None)
    weighted = [c for c in table if c.startswith("weighted_")]
    assert table[weighted].isna().all(axis=None)
    assert all(row.endswith(",,,,,") for row in path.read_text().splitlines()[1:])


@pytest.mark.parametrize(
    ("tilt", "trusted"), [(0.0, True), (0.1, True), (3.0, False), (math.inf, False)]
)
def test_weights_that_k_hat_forbids_are_marked_in_every_row(tilt, trusted, tmp_path):
    """The numbers stay. Kills a mark that is the other way round, or lost in the file."""
    made = draws(2000)
    made = made._replace(log_weight=tilt * made.vartheta[:, 1] ** 2)
    assert (k_hat(made.log_weight) <= 0.7) == trusted
    table = tables.path_table(STATES, torch.arange(3.0), made)
    (path,) = tables.write_csv(tmp_path, {"paths": table})
    for found in (table, pd.read_csv(path), tables.theta_table(THETA, made)):
        assert found["weights_trusted"].dtype == bool
        assert found["weights_trusted"].tolist() == [trusted] * len(found)
        assert found["weighted_mean"].notna().all() == (tilt < math.inf)


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "tables").write_text("")
    with pytest.raises(ValueError, match="folder must name a folder; got the file .*tables"):
        tables.write_csv(tmp_path / "tables", {"one": pd.DataFrame({"a": [1]})})


def test_files_have_ten_digits_and_the_folder_is_made(tmp_path):
    """Kills the index as a column, and digits that float64 does not have."""
    table = pd.DataFrame({"a": [1 / 3, math.nan], "b": [1e-20 / 3, 2.0], "c": ["x, y", "ϑ"]})
    paths = tables.write_csv(str(tmp_path / "a" / "b"), {"one": table, "two": table[["a"]]})
    assert paths == [tmp_path / "a" / "b" / name for name in ("one.csv", "two.csv")]
    want = 'a,b,c\n0.3333333333,3.333333333e-21,"x, y"\n,2,ϑ\n'
    assert paths[0].read_text(encoding="utf-8") == want


def test_draws_are_a_row_each_with_every_column():
    made = draws(4)
    table = tables.draws_table(THETA, made)
    assert table.columns.tolist() == [*THETA, "log_q", "log_joint", "log_weight"]
    want = torch.cat([made.theta, torch.stack(made[3:], 1)], 1)
    np.testing.assert_array_equal(table.to_numpy(), want)


@pytest.mark.parametrize("name", ["log_q", "log_joint", "log_weight"])
def test_a_parameter_with_the_name_of_a_density_is_refused(name):
    """Kills a table with two columns of one name."""
    with pytest.raises(ValueError, match=rf"draws keeps the names .*densities; got \['{name}'\]"):
        tables.draws_table(("rate", name), draws(4))


@pytest.mark.parametrize(
    ("theta", "states", "observed", "sentence"),
    [
        (("rate", "draw"), STATES, "y", r"'draw', 'time'\) .*; got \['draw'\] among"),
        (THETA, ("S", "time"), "y", r"got \['time'\] among .*'S', 'time'\)\. Take draws"),
        (("chain", "size"), STATES, "y", r"got \['chain'\] among"),
        (
            THETA,
            STATES,
            "observation_time",
            r"\('observation_time',\) .*got \['observation_time'\]",
        ),
    ],
)
def test_names_of_dimensions_are_refused(theta, states, observed, sentence):
    data = lib.Observations([0.1, 0.2], [1.0, 2.0], 0.1, names=[observed])
    with pytest.raises(ValueError, match=sentence):
        tables.inference_data(theta, states, data, draws())


def test_a_name_may_be_that_of_another_groups_dimension():
    """Kills a refusal of more than arviz cannot do: a column named time, a state as a column."""
    data = lib.Observations([0.1, 0.2], [[1.0, 2.0], [3.0, torch.nan]], 0.1, names=["time", "S"])
    made = draws()
    found = tables.inference_data(("rate", "lp"), STATES, data, made)
    assert found.observed_data["time"].values.tolist() == [1.0, 3.0]
    assert found.observed_data["S"].dims == ("observation_time",)
    assert found.posterior["lp"].values[0].tolist() == made.theta[:, 1].tolist()
    assert found.sample_stats["lp"].values[0].tolist() == made.log_joint.tolist()
    assert found.posterior.sizes == {"chain": 1, "draw": 400, "time": 3}
