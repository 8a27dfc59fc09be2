"""The growth study's own parts: its problems, references, what it runs, tables and slopes."""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from run import ROOT

from lib.result import FitResult
from lib.start import Start

sys.path.insert(0, str(ROOT / "benchmarks"))  # as its scripts find each other
import contenders
import densities
import growth
import growth_problems
import growth_reference
import growth_report
import pool
import problems
import side_run
from guided_filter import Filtered


def outbreak_start(model, grid, seed):
    """A path of the epidemic on any grid, in no time."""
    t = grid.t[:, None]
    susceptible = 20 + 742 / (1 + torch.exp(1.2 * (t - 5.5)))
    infected = 1 + 280 * torch.exp(-(((t - 6.5) / 2.5) ** 2))
    path = torch.cat([susceptible, infected], -1)
    vartheta = torch.tensor([-6.1, -0.8, 2.5])
    return Start(vartheta, torch.ones(3), path, 0.1 * path)


@pytest.mark.parametrize(("dt", "steps"), [(0.1, 140), (0.02, 700)])
def test_a_finer_grid_has_the_same_counts(dt, steps):
    """Kills counts that move to another day, and a step that stays."""
    model, observations = growth_problems.problem("sir", dt)
    grid = observations.grid()
    assert (observations.num_steps, grid.dt) == (steps, dt)
    days = grid.observed[:, 0].nonzero()[:, 0] * dt
    assert days.tolist() == pytest.approx(range(1, 15))
    known = problems.problem("sir").observations
    assert torch.equal(observations.y, known.y) and torch.equal(observations.times, known.times)
    assert growth_problems.problem("ou", 30.0).observations.num_steps == 30


def test_density_on_a_finer_grid_is_that_of_lib(tmp_path, monkeypatch):
    """What NUTS is handed; kills a dt, or times of the counts, of the study's grid."""
    monkeypatch.setattr(growth_problems, "find_start", outbreak_start)
    seconds = growth_problems.write(tmp_path / "data.npz", "sir", 0.05, seed=0)
    file = np.load(tmp_path / "data.npz")
    arrays = {name: file[name] for name in densities.Data._fields}
    data = densities.Data(**arrays)._replace(dt=float(file["dt"]), prior_sd=float(file["prior_sd"]))
    value = densities.log_joint(densities.PROCESSES["sir"], file["vartheta"], file["path"], data)
    model, observations = growth_problems.problem("sir", 0.05)
    path = torch.cat([model.x0_value.double()[None], torch.as_tensor(file["path"])])
    theirs = model.log_joint(
        torch.as_tensor(file["vartheta"])[None], path[None], observations.grid()
    )
    assert float(value) == pytest.approx(float(theirs.total), abs=1e-8)
    assert file["path"].shape == (280, 2) and 0 <= seconds < 10


@pytest.mark.parametrize(("script", "start"), [("peers", 5.0), ("contenders", 0.0)])
def test_seconds_count_the_start_of_a_chain(script, start, monkeypatch):
    """Kills a chain whose start costs nothing, and our own that is counted twice."""

    def call(command):
        assert (command[0] == str(side_run.PEERS)) == (script == "peers")
        assert Path(command[1]).name == f"{script}.py"
        theta = np.random.default_rng(1).standard_normal((1, 200, 3))
        run = {
            "theta": theta,
            "log_weight": np.empty(0),
            "setup": 2.0,
            "base": 3.0,
            "memory": 600.0,
        }
        np.savez(command[3], **run, ends=np.array([100, 200]), seconds=np.array([4.0, 6.0]))

    monkeypatch.setattr(side_run, "call", call)
    monkeypatch.setattr(growth_problems, "write", lambda *args: 5.0)
    spec = {"script": script, "problem": "ou", "size": 30, "seed": 0}
    result = growth_problems.measure(spec)
    assert (result["setup"], result["start"], result["memory"]) == (2 + start, start, 600)
    assert [look["seconds"] for look in result["looks"]] == [4 + start, 6 + start]
    assert [look["draws"] for look in result["looks"]] == [100, 200]


def test_ours_draws_in_chunks_that_differ(monkeypatch):
    """Kills the same noise for each chunk, and for each run."""
    seeds, layers, draws = [], set(), FitResult.draws

    def spy(fit, n, seed):
        layers.add(len(fit.q.layers))
        seeds.append(seed)
        return draws(fit, n, seed)

    monkeypatch.setattr(FitResult, "draws", spy)
    monkeypatch.setattr(contenders, "CHUNK", 20)
    job = {"problem": "ou", "size": 6, "seed": 0, "steps": 2, "draws": 80}
    job |= {"num_flows": 1, "guided": False}
    run, _ = contenders.growing(job), contenders.growing(job | {"seed": 1})
    assert layers == {1}
    assert run.theta.shape == (1, 80, 3) and run.log_weight.shape == (80,)
    assert len(np.unique(run.theta[0, :, 0])) == 80 and len(set(seeds)) == 8
    assert run.ends.tolist() == [20, 40, 60, 80]
    assert run.setup < run.base < run.seconds[0] and (np.diff(run.seconds) > 0).all()


def test_references_that_are_known():
    """Quadrature and the kept particle run are those of the comparison."""
    exact = growth_reference.measure({"problem": "ou", "size": 30})
    assert np.array(exact["quantiles"]) == pytest.approx(problems.reference("ou", 30))
    kept = growth_reference.measure({"problem": "sir", "size": 0.1})
    assert np.array(kept["quantiles"]) == pytest.approx(problems.reference("sir"))


def test_particles_find_a_posterior_that_is_known(monkeypatch):
    """With the likelihood exp(−|ϑ − m|²/2s²): normal; kills a weight without prior or proposal.

    And shares of the proposal that are swapped, and a plan whose counts are not a day apart.
    """
    m, s = np.array([-1.0, -0.8, 2.5]), np.array([1.5, 1.0, 1.5])

    def particle_filter(outbreak, plan, particles, rng):
        assert (plan.steps, plan.dt, len(plan.y)) == (50, 0.02, 14)
        value = -0.5 * (((outbreak.vartheta - m) / s) ** 2).sum(-1)
        return Filtered(value, np.empty(0))

    monkeypatch.setattr(growth_reference, "particle_filter", particle_filter)
    kernels = [growth_reference.Kernels(m[None, :d], np.eye(d)) for d in (3, 2)]
    monkeypatch.setattr(growth_reference, "_kernels", lambda: kernels)
    spec = {"problem": "sir", "size": 0.02, "seed": 1, "draws": 40_000, "particles": 10}
    result = growth_reference.measure(spec)
    var = 1 / (1 / s**2 + 1 / 9)
    normal = torch.special.ndtri(torch.tensor(problems.LEVELS)).numpy()[:, None]
    exact = var / s**2 * m + np.sqrt(var) * normal
    error, _ = growth.yardstick.worst_error(result["quantiles"], exact, problems.NAMES["sir"])
    assert 0 < result["uncertainty"] < 0.1 and error < 5 * result["uncertainty"]


def test_sources_of_a_chain_and_of_a_reference_do_not_depend_on_the_flows(monkeypatch):
    """Kills hours of NUTS run again for each change of lib, and our fit that is not."""
    scripts = (growth.NUTS, growth.REFERENCE, growth.OURS)
    before = [growth.source(script) for script in scripts]
    monkeypatch.setattr(pool, "fingerprint", lambda root: "another lib")
    after = [growth.source(script) for script in scripts]
    assert before[:2] == after[:2] and before[2] != after[2] and len(set(before)) == 3
    monkeypatch.setattr(growth, "LIB", ())
    assert growth.source(growth.REFERENCE) != before[1]


def test_specs_are_of_the_rows_and_differ():
    wanted = growth.specs(growth.names())
    assert len({pool.key(spec, "") for spec in wanted.values()}) == len(wanted)
    runs = [spec for spec in wanted.values() if spec["script"] != growth.REFERENCE]
    assert [s["seed"] for s in runs] == sorted(s["seed"] for s in runs)
    largest = [s for s in runs if s["size"] == 20_000]
    assert {s["seed"] for s in largest} == {0} and {s["side"] for s in largest} == {"ours", "NUTS"}
    paths = {(s["problem"], s["side"], s["path"]) for s in runs if s["side"] != "ours"}
    both = {("NUTS", "innovation"), ("NUTS, centred", "centred")}
    assert paths == {(problem, *way) for problem in ("ou", "sir") for way in both}
    few = growth.specs(["sir 0.02, NUTS"])
    assert [spec["script"] for spec in few.values()] == ["peers"] * 3 + ["growth_reference"]
    assert {spec["size"] for spec in few.values()} == {0.02}
    flows = {(s["problem"], s["num_flows"], s["guided"]) for s in runs if s["side"] == "ours"}
    assert flows == {("ou", 0, False), ("sir", 0, True)}
    trial = growth.specs(["ou 200, ours", "ou 200, NUTS"], trial=7)
    assert [s.get("steps", s["draws"]) for s in list(trial.values())[:-1]] == [7, 7]


TRUTH = np.outer([-2.0, -1.0, 0.0, 1.0, 2.0], [1.0, 3.0, 0.2])
LOST = "ou 5000, ours, seed 0"


def result(spec, errors):
    """A run that is off by these many sds, after 20, 40, … seconds times the length over 200."""
    unit = (TRUTH[3] - TRUTH[1]) / 1.349
    looks = []
    for k, error in enumerate(errors, 1):
        found = (TRUTH + error * unit).tolist()
        look = {"draws": 100 * k, "seconds": 0.1 * k * spec["size"], "ess": 50.0, "k_hat": None}
        looks.append(look | {"quantiles": found, "unweighted": found})
    return {"setup": 5.0, "start": 1.0, "memory": 600.0, "looks": looks, "wall": 1.0}


@pytest.fixture
def journal(tmp_path):
    """OU of three lengths, the last without its reference; NUTS has its error at the second look.

    Ours has it after half that time, but never at N = 5,000, where a fit fails too. On the path
    NUTS has it at the third look, for N = 1,000 at the first.
    """
    path = tmp_path / ".growth.jsonl"
    for label, spec in growth.specs([n for n in growth.names() if n.startswith("ou")]).items():
        if spec["script"] == growth.REFERENCE:
            found = {"quantiles": TRUTH.tolist(), "by": "quadrature", "uncertainty": 0, "wall": 1.0}
            if spec["size"] == 20_000:
                continue
        elif spec["side"] == "NUTS":
            found = result(spec, [0.3, 0.08, 0.06])
        elif spec["side"] == "NUTS, centred":
            found = result(spec, [0.09 if spec["size"] == 1000 else 0.3] * 2 + [0.09])
        else:
            found = result(spec, [0.05 if spec["size"] < 5000 else 0.2])
        if label == LOST:
            found = {"error": "RuntimeError: lost", "wall": 1.0}
        pool.append(path, pool.key(spec, growth.source(spec["script"])), spec, found)
    return path


def test_tables_and_figure_from_the_journal(journal, tmp_path, capsys):
    """Times by hand; kills a run judged without its reference and a failed one that is left out."""
    options = ["--finished", "--only", "ou*", "--journal", str(journal)]
    assert growth.main([*options, "--save-to", str(tmp_path)]) == 0
    lines = pd.read_csv(tmp_path / "results/growth_summary.csv")
    assert lines["size"].tolist() == [200] * 3 + [1000] * 3 + [5000] * 3
    assert lines.seconds_to_accuracy.tolist() == [20, 40, 60, 100, 200, 100, np.inf, 1000, 1500]
    assert (lines.seconds_to_accuracy - lines.run_to_accuracy).dropna().unique().tolist() == [5]
    assert lines.to_nuts.tolist() == [0.5, 1, 1.5, 1, 2, 1, np.inf, 1, 1.5]
    lowest = [0.05, 0.06, 0.09] * 2 + [0.2, 0.06, 0.09]
    assert lines.lowest_error.tolist() == pytest.approx(lowest, abs=0.01)
    said = capsys.readouterr().out
    assert "ou 200: ours 20 s, NUTS 40 s: we win, 1 to 2.0." in said
    assert "ou 5000: ours inf s, NUTS 1000 s: we lose, far off." in said
    rows = list(csv.DictReader((tmp_path / "results/growth.csv").read_text().splitlines()))
    lost = [row for row in rows if "lost" in row["note"]]
    assert [(row["draws"], row["worst_error"]) for row in lost] == [("10000", "inf")]
    assert (tmp_path / "figures/growth.png").stat().st_size > 5000
    power = growth_report.slopes(lines).set_index("side")
    assert power.seconds_to_accuracy[["ours", "NUTS"]].tolist() == pytest.approx([1, 1])
    (claim,) = csv.DictReader((tmp_path / "results/claims_growth.csv").read_text().splitlines())
    assert claim["ours"].startswith(
        "N = 200: ours 20 s, NUTS 40 s; N = 1,000: ours 100 s, NUTS 100 s; "
    )
    assert (
        "N = 5,000: ours not reached, NUTS 1,000 s; power of the number of grid steps: ours 1.00, "
        in claim["ours"]
    )
    assert claim["ours"].endswith("; 3 seed(s), the better NUTS")
    assert claim["verdict"] == "ours first at N = 200, 1,000; NUTS first at N = 5,000"
    assert power.memory_mb.abs().max() < 1e-9 and power.run_to_accuracy["ours"] > 1.1


def test_nothing_finished_says_so(tmp_path):
    with pytest.raises(SystemExit, match="no run of this version is finished yet"):
        growth.main(["--finished", "--journal", str(tmp_path / "none")])


@pytest.mark.parametrize(
    ("ours", "nuts", "end"),
    [
        (30, 10, "we lose, 3.0 to 1"),
        (10, np.inf, "we win, NUTS far off"),
        (np.inf, np.inf, "neither is within 0.1 sd"),
        (10, None, "one side is not run yet"),
    ],
)
def test_the_verdict_is_plain(ours, nuts, end):
    """Kills a loss told as a win."""
    rows = [{"problem": "ou", "size": 200, "side": "ours", "seconds_to_accuracy": ours}]
    rows += [rows[0] | {"side": "NUTS", "seconds_to_accuracy": nuts}] if nuts else []
    if nuts:  # the better one counts, in whatever place
        worse = [rows[0] | {"side": "NUTS, centred", "seconds_to_accuracy": 2 * nuts}]
        rows = worse + rows if np.isfinite(nuts) else rows + worse
    (said,) = growth_report.verdict(pd.DataFrame(rows))
    assert said.endswith(f": {end}.")


def test_a_claim_names_what_neither_reaches_and_leaves_out_what_is_not_run():
    """Kills a tie of two that never get there told as a win, and half a row."""
    cells = [(0.1, "ours", np.inf), (0.1, "NUTS", np.inf), (0.05, "ours", 30.0)]
    lines = pd.DataFrame(cells, columns=["size", "side", "seconds_to_accuracy"])
    lines = lines.assign(
        problem="sir", seeds=1, grid_steps=14 / lines["size"], run_to_accuracy=1.0, memory_mb=1.0
    )
    (claim,) = growth_report.claims(lines).to_dict("records")
    assert (
        claim["ours"] == "dt = 0.1: ours not reached, NUTS not reached; 1 seed(s), the better NUTS"
    )
    assert claim["verdict"] == "neither at dt = 0.1"
    assert growth_report.claims(lines[lines["size"] == 0.05]).empty


def test_the_step_is_judged_by_the_finest_reference():
    """Shifts by hand; kills the scale of another grid, and the worst taken for the medians."""
    unit, names = (TRUTH[3] - TRUTH[1]) / 1.349, problems.NAMES["sir"]
    off = {0.01: np.zeros((5, 1)), 0.05: np.full((5, 1), 0.03)}
    off[0.1] = np.array([[0.4], [0.1], [0.2], [0.1], [0.0]])
    wanted = {f"sir {size:g}, reference": growth.reference("sir", size) for size in off}
    found = {
        f"sir {size:g}, reference": {"quantiles": TRUTH + d * unit, "by": "", "uncertainty": 0.01}
        for size, d in off.items()
    }
    truths = growth.references(wanted, found)
    assert len(truths) == 3 * 5 * len(names)
    (claim,) = growth_report.step_claims(truths).to_dict("records")
    assert "from dt = 0.01 by at most, dt = 0.1: medians 0.20 sd, 5% of" in claim["ours"]
    assert " 0.40 sd; dt = 0.05: medians 0.03 sd, " in claim["ours"]
    assert claim["verdict"] == "not for every quantile: medians within 0.20 sd"
    (claim,) = growth_report.step_claims(truths[truths["size"] != 0.01]).to_dict("records")
    assert "from dt = 0.05 by at most, dt = 0.1: medians 0.17 sd, 5% of" in claim["ours"]
    assert growth_report.step_claims(truths[truths["size"] != 0.1]).empty


def test_committed_tables_agree():
    """Kills a summary or claims of another run, to within what the tables are rounded by."""
    runs, kept = (pd.read_csv(ROOT / f"results/growth{end}.csv") for end in ("", "_summary"))
    again, whole = growth.summary(runs).reset_index(drop=True), ["last_ess", "memory_mb"]
    claims = pd.read_csv(ROOT / "results/claims_growth.csv")
    truths = pd.read_csv(ROOT / "results/growth_references.csv")
    made = pd.concat([growth_report.claims(kept), growth_report.step_claims(truths)])
    pd.testing.assert_frame_equal(made.reset_index(drop=True), claims)
    same = {"check_dtype": False, "rtol": 0}
    pd.testing.assert_frame_equal(again[whole], kept[whole], atol=0.51, **same)
    again, kept = again.drop(columns=whole), kept.drop(columns=whole)
    pd.testing.assert_frame_equal(again, kept, atol=0.0151, **same)
