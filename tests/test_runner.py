"""The runner and the claims table, on tiny notebooks in a folder of their own.

Each test names the fault that it would show.
"""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import claims
import ledger
import nbformat
import numpy as np
import pandas as pd
import pytest
import run
import studies
import torch
from parameters import read_cells

import lib

PARAMETERS = """quick: bool = True  # banner only
device: str = "auto"  # auto, cpu or cuda
save_to: str = ""  # a folder, or nothing
data: str = "ou.csv"
rate: float = 0.1  # per step
scales: list = [1.0, 2.0]
steps: int = 3"""
SAVE = """from pathlib import Path
if save_to:
    Path(save_to, "figures/NAME.png").write_text(f"{quick} {rate} {device}")
    Path(save_to, "results/claims_NAME.csv").write_text(
        "claim,paper,ours,verdict,notebook\\nsd|1,1,2,holds,NAME\\n")"""


def write_notebook(root, stem, *cells, parameters=PARAMETERS, values="rate: 0.5\n"):
    """A notebook with a parameters cell and the cells, and its params file."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in (parameters, *cells)]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, root / f"notebooks/{stem}.ipynb")
    (root / f"params/{stem}.yaml").write_text(values)


@pytest.fixture
def root(tmp_path):
    """A repository in a folder with a space, without notebooks."""
    root = tmp_path / "a study"
    for folder in ("notebooks", "params", "lib", "data"):
        (root / folder).mkdir(parents=True)
    (root / "lib/sde.py").write_text("one = 1\n")
    (root / "data/ou.csv").write_text("t,y\n1,2\n")
    (root / "README.md").write_text(
        f"Above\n{claims.TIMES_BEGIN}\n{claims.TIMES_END}\n{claims.BEGIN}\nold\n{claims.END}\nbelow\n"
    )
    return root


def files(root):
    """Every file below root, as paths relative to it."""
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("rat: 0.5", r"01_a\.yaml: `rat` is not a parameter of the notebook, which has data, rate"),
        ("rate: 1e-3", r"`rate` must be float like 0\.1; got '1e-3'\. YAML reads 1e-3 as text"),
        ("rate: fast", r"`rate` must be float like 0\.1; got 'fast'\.$"),
        ("scales: [1.0, 1e-3]", r"`scales` must be list .* YAML reads 1e-3 as text"),
        ("steps: 2.5", r"`steps` must be int like 3; got 2\.5"),
        ("steps: true", r"`steps` must be int like 3; got True"),
        ("device: cpu", r"`device` is set by the runner"),
        ("data: no.csv", r"data/no\.csv, named by the parameter `data` of 01_a, does not exist"),
        ("- rate", r"must hold lines `name: value`"),
        ("rate: [", r"01_a\.yaml is not YAML"),
    ],
)
def test_bad_values_are_refused_before_any_notebook_runs(root, values, sentence):
    """Kills a runner that leaves the judging to papermill, which prints a line and goes on."""
    write_notebook(root, "01_a", "x = 1", values=values)
    before = files(root)
    with pytest.raises(SystemExit, match=sentence):
        run.main(["--device", "cpu"], root)
    assert files(root) == before


def test_a_notebook_without_values_or_parameters_is_refused(root):
    write_notebook(root, "01_a", "x = 1")
    (root / "params/01_a.yaml").unlink()
    with pytest.raises(SystemExit, match=r"params/01_a\.yaml is missing"):
        run.main(["--device", "cpu"], root)
    write_notebook(root, "01_a", "x = 1", parameters="quick: bool = True\ndevice: str = 'cpu'")
    with pytest.raises(SystemExit, match="parameters cell lacks save_to"):
        run.main(["--device", "cpu"], root)
    write_notebook(root, "01_a", "x = 1", parameters="rate = 2 * 3")
    with pytest.raises(SystemExit, match=r"`name: type = literal`; got `rate = 2 \* 3`"):
        run.main(["--device", "cpu"], root)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--test", "01"], "--test and --setup take no NAME"),
        (["--quick", "--setup"], "exclude each other"),
    ],
)
def test_bad_options_end_with_one_sentence(root, argv, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(argv, root)
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_unknown_name_and_absent_gpu_are_refused(root, monkeypatch):
    write_notebook(root, "01_a", "x = 1")
    with pytest.raises(SystemExit, match="No notebook starts with '07'; there are 01_a"):
        run.main(["07"], root)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="finds no CUDA GPU"):
        run.main(["--device", "cuda"], root)


def test_full_run_publishes_then_is_up_to_date_until_something_changes(root, capsys):
    """Kills a hash that misses lib, data or the values, and one that trusts a deleted figure."""
    write_notebook(root, "01_a", SAVE.replace("NAME", "01_a"))
    assert run.main(["--device", "cpu"], root) == 0
    assert (root / "figures/01_a.png").read_text() == "False 0.5 cpu"
    readme = (root / "README.md").read_text()
    assert "| sd\\|1 | 1 | 2 | holds | [01](notebooks/01_a.ipynb) |\n" in readme
    assert "\nThe committed run took 0 minutes (01: 0." in readme
    assert readme.startswith("Above\n") and readme.endswith("\nbelow\n") and "old\n" not in readme
    (row,) = csv.DictReader((root / "results/manifest.csv").read_text().splitlines())
    assert row["figure"] == "figures/01_a.png" and row["commit"] == "unknown" and row["device"]
    made = {"01_a.ipynb", "01_a.html"}
    assert {path.name for path in (root / "results/notebooks").iterdir()} == made
    executed = json.loads((root / "results/notebooks/01_a.ipynb").read_text())
    assert str(root) not in "".join("".join(cell["source"]) for cell in executed["cells"])
    assert not (root / "results/.01_a").exists()

    capsys.readouterr()
    assert run.main(["--device", "cpu"], root) == 0
    assert capsys.readouterr().out == "01_a: up to date\n"

    digest = ledger.fingerprint(root, "01_a", "cpu")
    for name, text in [
        ("lib/sde.py", "one = 2\n"),
        ("lib/new.py", ""),
        ("data/ou.csv", "t,y\n1,3\n"),
        ("params/01_a.yaml", "rate: 0.7\n"),
    ]:
        (root / name).write_text(text)
        new = ledger.fingerprint(root, "01_a", "cpu")
        assert new != digest, name
        digest = new
    assert ledger.fingerprint(root, "01_a", "cuda") != digest
    assert not ledger.is_current(root, "01_a", digest)
    ledger.remember(root, "01_a", digest, ["figures/01_a.png"])
    assert ledger.is_current(root, "01_a", digest)
    (root / "figures/01_a.png").unlink()
    assert not ledger.is_current(root, "01_a", digest)


def test_outputs_do_not_enter_the_hash(root):
    write_notebook(root, "01_a", "x = 1")
    digest = ledger.fingerprint(root, "01_a", "cpu")
    path = root / "notebooks/01_a.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="1")]
    nbformat.write(notebook, path)
    assert ledger.fingerprint(root, "01_a", "cpu") == digest
    notebook.cells[1].source = "x = 2"
    nbformat.write(notebook, path)
    assert ledger.fingerprint(root, "01_a", "cpu") != digest


def test_failing_cell_leaves_no_figure_and_the_others_run(root, capsys):
    """Kills a runner that lets a notebook write into figures/ before it has succeeded."""
    bad = "raise ValueError('one\\nlast line')"
    write_notebook(root, "01_a", SAVE.replace("NAME", "01_a"), bad)
    write_notebook(root, "02_b", SAVE.replace("NAME", "02_b"))
    (root / "figures").mkdir()
    (root / "figures/01_a.png").write_text("of an older run")
    assert run.main(["--device", "cpu"], root) == 1
    error = capsys.readouterr().err
    assert "01_a failed in cell [4] (`raise ValueError(" in error
    assert "with ValueError: last line; the half-run" in error
    assert "notebook is results/notebooks/01_a.failed.ipynb\n" in error
    assert (root / "results/notebooks/01_a.failed.ipynb").is_file()
    assert (root / "figures/01_a.png").read_text() == "of an older run"
    assert not (root / "results/claims_01_a.csv").exists() and not (root / "results/.01_a").exists()
    assert (root / "figures/02_b.png").is_file() and list(ledger.read_state(root)) == ["02_b"]


def test_interruption_keeps_the_finished_notebook(root):
    """A stop request in the second notebook; kills a runner that writes its state at the end."""
    write_notebook(root, "01_a", SAVE.replace("NAME", "01_a"))
    stop = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    write_notebook(root, "02_b", SAVE.replace("NAME", "02_b"), stop)
    for path in Path(run.__file__).parent.glob("*.py"):
        shutil.copy(path, root / "notebooks")
    command = [sys.executable, str(root / "notebooks/run.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("the notebooks and fits that had finished are kept.\n")
    assert (root / "figures/01_a.png").is_file() and not (root / "figures/02_b.png").exists()
    assert list(ledger.read_state(root)) == ["01_a"] and not (root / "results/.02_b").exists()


def test_quick_writes_only_under_results_quick(root):
    write_notebook(root, "01_a", SAVE.replace("NAME", "01_a"))
    before = {name: (root / name).read_bytes() for name in files(root)}
    assert run.main(["--quick"], root) == 0
    assert all(name in before or name.startswith("results/quick/") for name in files(root))
    assert all((root / name).read_bytes() == content for name, content in before.items())
    assert (root / "results/quick/figures/01_a.png").read_text() == "True 0.1 auto"
    assert (root / "results/quick/results/notebooks/01_a.html").is_file()


def test_manifest_replaces_a_notebooks_rows_and_drops_what_it_no_longer_makes(root):
    for name in ("figures/old.png", "figures/new.png", "figures/other.png", "results/m.csv"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    for name, stem, commit in [("old", "01_a", "c"), ("other", "02_b", "c"), ("new", "01_a", "e")]:
        row = ledger.Origin(f"figures/{name}.png", stem, commit, "d", "1")
        ledger.update_manifest(root, stem, [row])
    assert (root / "results/manifest.csv").read_text() == (
        "figure,notebook,commit,device,seconds\n"
        "figures/new.png,01_a,e,d,1\nfigures/other.png,02_b,c,d,1\n"
    )
    assert not (root / "figures/old.png").exists() and (root / "figures/other.png").exists()


def test_commit_is_marked_when_what_a_result_depends_on_differs(root):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", root, *identity, *words], check=True, capture_output=True)

    git("init")
    assert ledger.describe_commit(root) == "unknown"
    git("add", ".")
    git("commit", "-m", "one")
    clean = ledger.describe_commit(root)
    assert len(clean) >= 7 and not clean.endswith("+")
    (root / "README.md").write_text("")
    assert ledger.describe_commit(root) == clean
    (root / "lib/sde.py").write_text("")
    assert ledger.describe_commit(root) == clean + "+"


def test_claims_block():
    table = claims.render([claims.Claim("a|b", "1", "2\n3", "holds", "01_a")])
    assert table.splitlines()[-1] == r"| a\|b | 1 | 2 3 | holds | [01](notebooks/01_a.ipynb) |"
    study = claims.render([claims.Claim("a", "1", "2", "holds", "compare")])
    assert study.endswith("[compare](benchmarks/compare.py) |")
    text = claims.replace_block(f"x\n{claims.BEGIN}\nold\n{claims.END}\ny\n", table)
    assert text == f"x\n{claims.BEGIN}\n{table}\n{claims.END}\ny\n"
    assert claims.replace_block(text, table) == text
    for bad in ("none", claims.END + claims.BEGIN, text + text):
        with pytest.raises(SystemExit, match="one block"):
            claims.replace_block(bad, table)


def test_claims_files_are_joined_in_order_and_their_columns_checked(root):
    (root / "results").mkdir()
    head = ",".join(claims.Claim._fields) + "\n"
    (root / "results/claims_02.csv").write_text(head + "c,1,1,holds,02_b\n")
    (root / "results/claims_01.csv").write_text(head + "a,1,1,holds,01_a\nb,1,1,fails,01_a\n")
    assert [row.claim for row in claims.read_rows(root)] == ["a", "b", "c"]
    (root / "results/claims_03.csv").write_text("claim,ours\na,b\n")
    with pytest.raises(SystemExit, match=r"claims_03\.csv must have the columns claim, paper"):
        claims.read_rows(root)


# --- the heavier studies --------------------------------------------------------------------------

# A study of five fits that takes the place of benchmarks/ablation.py; each fit notes that it ran.
TINY = """import os, signal, sys, time
import pandas as pd
import pool

def measure(spec):
    number, ran = spec["number"], pool.ROOT / "ran.txt"
    with ran.open("a") as file:
        file.write(f"{number} ")
    if number == 1:
        raise RuntimeError("the Cholesky factor\\n is not finite")
    if number == 2 and (pool.ROOT / "stop").exists():
        os.kill(int((pool.ROOT / "stop").read_text()), signal.SIGTERM)
        time.sleep(60)
    if number == 2 and (pool.ROOT / "die").exists():
        os._exit(9)
    return {"double": 2 * number}

def main():
    args = pool.parse("ablation", "", [*sys.argv[1:], "--workers", "1"])
    if (pool.ROOT / "stop").exists():
        (pool.ROOT / "stop").write_text(str(os.getppid()))
    found = pool.results({f"fit {i}": {"number": i} for i in range(5)}, measure, args)
    rows = [(k, v.get("double", ""), v.get("error", "")) for k, v in found.items()]
    pool.save(pd.DataFrame(rows, columns=["fit", "double", "error"]), found, args)
    (args.save_to / "figures/ablation.png").write_text("")
    return 0

if __name__ == "__main__":
    pool.guarded(main)
"""
TINY_CSV = (
    "fit,double,error\nfit 0,0,\nfit 1,,RuntimeError: the Cholesky factor is not finite\n"
    "fit 2,4,\nfit 3,6,\nfit 4,8,\n"
)


@pytest.fixture
def study(root):
    """A repository with a notebook and the tiny study."""
    write_notebook(root, "01_a", SAVE.replace("NAME", "01_a"))
    (root / "benchmarks").mkdir()
    shutil.copy(run.ROOT / "benchmarks/pool.py", root / "benchmarks")
    (root / "benchmarks/ablation.py").write_text(TINY)
    return root


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder of the studies, to import from as its scripts do."""
    monkeypatch.syspath_prepend(run.ROOT / "benchmarks")


def test_studies_are_named_whole_and_never_part_of_the_default_run(study):
    """Kills a default run of hours, a prefix that starts one, and notebooks that run beside it."""
    assert run.select(study, []) == ["01_a"]
    assert run.select(study, ["ablation"]) == ["ablation"]
    assert run.select(study, ["robustness", "01"]) == ["01_a", "robustness"]
    with pytest.raises(
        SystemExit, match="'abl'; there are 01_a. Studies, by their whole name: abl"
    ):
        run.select(study, ["abl"])
    assert set(studies.STUDIES) == {
        path.stem
        for path in (run.ROOT / "benchmarks").glob("*.py")
        if "pool.guarded(main)" in path.read_text()
    }


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["ablation", "--quick"], "--quick is of the notebooks; ablation has no quick values"),
        (["robustness", "--device", "cuda"], "robustness runs on the CPU, a fit on each core"),
        (["gpu", "step", "--device", "cuda"], "^step runs on the CPU"),
        (["gpu", "--device", "cpu"], "gpu runs on a GPU; got cpu. Name step for"),
    ],
)
def test_what_a_study_cannot_do_is_refused(study, argv, sentence):
    before = files(study)
    with pytest.raises(SystemExit, match=sentence):
        run.main([*argv, "--check"], study)
    assert files(study) == before


def test_help_tells_how_long_each_study_takes(root, monkeypatch, capsys):
    monkeypatch.setattr(run, "STUDIES", {"ablation": "2 hours", "robustness": "40 minutes"})
    with pytest.raises(SystemExit, match="0"):
        run.main(["--help"], root)
    assert "ablation: 2 hours; robustness: 40 minutes." in " ".join(capsys.readouterr().out.split())


def test_study_publishes_with_a_row_for_its_figure_and_is_then_up_to_date(study, capfd):
    """A fit that fails is a row with its reason; README, which has no such row, is left alone."""
    readme = (study / "README.md").read_text()
    assert run.main(["ablation"], study) == 0
    assert (study / "results/ablation.csv").read_text() == TINY_CSV
    (row,) = csv.DictReader((study / "results/manifest.csv").read_text().splitlines())
    assert row["figure"] == "figures/ablation.png" and row["notebook"] == "ablation"
    assert row["seconds"].isdigit() and not (study / "figures/01_a.png").exists()
    assert (
        not (study / "results/.ablation").exists() and (study / "README.md").read_text() == readme
    )
    assert (
        "fit 1: failed, RuntimeError: the Cholesky factor is not finite" in capfd.readouterr().out
    )
    assert claims.render_times(study).startswith("The committed run took 0 minutes () on")

    assert run.main(["ablation"], study) == 0
    assert capfd.readouterr().out == "ablation: up to date\n"
    (study / "results/ablation.csv").unlink()
    assert run.main(["ablation"], study) == 0
    assert (study / "results/ablation.csv").read_text() == TINY_CSV
    assert (study / "ran.txt").read_text().split() == list("01234")
    assert run.main(["ablation", "--force"], study) == 0
    assert (study / "ran.txt").read_text().split() == list("0123401234")


def test_stopped_study_goes_on_where_it_was(study):
    """Kills a journal written at the end, and a table published by a study that was stopped."""
    for path in Path(run.__file__).parent.glob("*.py"):
        shutil.copy(path, study / "notebooks")
    (study / "stop").touch()
    command = [sys.executable, str(study / "notebooks/run.py"), "ablation"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "Interrupted; the notebooks and fits that had finished are kept.\n"
    assert not (study / "results/ablation.csv").exists()
    assert not (study / "results/.ablation").exists() and not ledger.read_state(study)
    journal = study / "results/.ablation.jsonl"
    assert len(journal.read_text().splitlines()) == 2
    with journal.open("a") as file:
        file.write('{"key": "half a li')

    (study / "stop").unlink()
    assert run.main(["ablation"], study) == 0
    assert (study / "results/ablation.csv").read_text() == TINY_CSV
    assert (study / "ran.txt").read_text().split() == list("012234")


def test_dead_worker_ends_the_study_with_a_sentence(study, capfd):
    (study / "die").touch()
    assert run.main(["ablation"], study) == 1
    error = capfd.readouterr().err
    assert "A worker process died, perhaps for lack of memory; the finished fits are kept." in error
    assert "ablation failed with exit code 1, for the reason above" in error
    assert not (study / "results/ablation.csv").exists() and not ledger.read_state(study)


def test_a_study_that_fails_does_not_stop_the_next(study, capfd):
    """Kills a loop that ends at the first failure, and one that records what has failed."""
    (study / "die").touch()
    (study / "benchmarks/robustness.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "Path(sys.argv[2], 'figures/robustness.png').write_text('')\n"
        "Path('results/.robustness.seconds').write_text('7')\n"
    )
    assert run.main(["robustness", "ablation"], study) == 1
    assert "ablation failed with exit code 1" in capfd.readouterr().err
    (row,) = csv.DictReader((study / "results/manifest.csv").read_text().splitlines())
    assert (row["notebook"], row["seconds"]) == ("robustness", "7")
    assert list(ledger.read_state(study)) == ["robustness"]


def test_study_that_stopped_itself_ends_the_run_as_interrupted(study, capfd):
    """Kills a Ctrl-C that reached the study first and is told as its failure."""
    (study / "benchmarks/ablation.py").write_text("raise SystemExit(130)")
    assert run.main(["ablation"], study) == 130
    assert capfd.readouterr().err.startswith("Interrupted; the notebooks and fits that had")
    assert not ledger.read_state(study) and not (study / "results/.ablation").exists()


def test_fit_is_repeated_when_its_sources_or_its_spec_change(study, benchmarks):
    import pool

    source = pool.fingerprint(study)
    figures = sorted(path.name for path in (run.ROOT / "lib").glob("plots*.py"))
    assert figures[0] == "plots.py" and len(figures) > 1
    for name in figures:
        (study / "lib" / name).write_text("colour = 2\n")
        assert pool.fingerprint(study) == source, f"a figure's colour costs no fit: {name}"
    (study / "lib/sde.py").write_text("one = 2\n")
    assert pool.fingerprint(study) != source
    assert pool.key({"seed": 0}, source) != pool.key({"seed": 1}, source)
    assert pool.key({"a": 0, "b": 1}, source) == pool.key({"b": 1, "a": 0}, source)
    journal = study / "results/.x.jsonl"
    pool.append(journal, pool.key({"seed": 0}, source), {"seed": 0}, {"kl": float("inf")})
    specs = {"one": {"seed": 0}, "two": {"seed": 1}}
    assert pool.finished(specs, journal, source) == {"one": {"kl": float("inf")}}
    assert pool.finished(specs, journal, "another") == {}


def test_ablation_changes_one_option_at_a_time(benchmarks):
    """Kills a row that is the base under another name, and a grid that is not the paper's."""
    import ablation
    from fits import unpack

    names = [variant.name for variant in ablation.VARIANTS]
    assert names[0] == "study" and len(set(names)) == len(names)
    assert ablation.VARIANTS[0].fit_config(None) == lib.FitConfig()
    for variant in ablation.VARIANTS[1:]:
        config = variant.fit_config(None)
        assert config != lib.FitConfig(), variant.name
        if variant.preset == "paper":
            assert config.num_steps == 4000 and config.family.gate == "sigmoid"
    specs = ablation.specs(ablation.VARIANTS, None)
    assert len({json.dumps(spec) for spec in specs.values()}) == len(specs)
    one = specs["sir, paper unit 100 alpha 10, seed 2"]
    assert unpack(json.loads(json.dumps(one["config"]))).family.unit == 100


def test_ablation_counts_a_failed_fit_as_far_and_names_the_papers_best(benchmarks):
    import ablation

    good = {"kl": 0.2, "ess": 0.5, "k_hat": 0.4, "cpu_seconds": 9.0, "flagged": False}
    good |= {"converged": True, "reason": "converged", "sd_ratio": {"a": 0.9, "b": 0.7}}
    failed = {
        "error": "LinAlgError: not finite",
        "cpu_seconds": 1.0,
        "converged": False,
        "wall": 2.0,
    }
    stopped = good | {"kl": 3.0, "reason": "stopped at step 100: x", "converged": False}
    row = ablation.row(ablation.VARIANTS[0], "ou", [good, failed, stopped])
    assert (row["kl_median"], row["kl_min"], row["kl_max"]) == (3.0, 0.2, float("inf"))
    assert row["note"] == "seed 1: LinAlgError: not finite; seed 2: stopped at step 100: x"
    assert (row["flagged"], row["converged"]) == ("1 of 3", "1 of 3")
    assert row["cpu_seconds_median"] == 9.0
    assert (row["sd_ratio_min"], row["sd_ratio_param"]) == (0.7, "b")
    none = ablation.row(ablation.VARIANTS[0], "ou", [{"error": "e"}] * 3)
    assert none["kl_median"] == float("inf") and none["flagged"] == "3 of 3"

    variants = ablation.paper_grid()
    found = {label: good for label in ablation.specs(variants, None)}
    for seed in ablation.SEEDS:
        found[f"ou, {variants[3].name}, seed {seed}"] = good | {"kl": 0.1}
    frame = ablation.table(variants, found)
    best = frame[frame.variant == ablation.BEST].set_index("model")
    assert best.loc["ou", "note"] == f"is: {variants[3].name}" and set(best.index) == {"ou", "sir"}
    del found[f"ou, {variants[0].name}, seed 1"]
    frame = ablation.table(variants, found)
    assert len(frame) == 10 and list(frame[frame.variant == ablation.BEST].model) == ["sir"]
    assert ablation.markdown(frame).count("\n") == 11


@pytest.mark.parametrize(
    ("kl", "uncovered", "alone", "together", "missed", "false_alarm"),
    [
        (0.1, 0.002, False, False, False, False),
        (0.6, 0.002, False, False, True, False),
        (0.1, 0.06, False, False, True, False),
        (0.1, 0.06, False, True, False, False),
        (0.1, 0.002, False, True, False, True),
        (0.6, 0.002, True, False, False, False),
    ],
)
def test_robustness_judges_the_flag(
    benchmarks, kl, uncovered, alone, together, missed, false_alarm
):
    import robustness

    fit = {"kl": kl, "ess": 0.5, "k_hat": 0.4, "seconds": 9.0, "flagged": alone, "unseen": 0.0}
    fit |= {"verdict": "", "uncovered": {"log_theta1": uncovered, "log_theta3": 0.002}}
    below = {"log_theta1": 0.02, "log_theta3": 0.002}
    agreement = {"flagged": together, "verdict": ""}
    row = robustness.row("100", {"below": below, "fits": [fit, fit], "agreement": agreement})
    assert (row["missed"], row["false_alarm"]) == (missed, false_alarm)
    assert row["kind"] == "tailed" and not row["regular"]


def test_robustness_row_of_a_failed_fit_and_last_row(benchmarks):
    import robustness

    result = {"below": {"log_theta1": 0.0, "log_theta3": 0.65}}
    result |= {"fits": [{"error": "LinAlgError: x"}, {"error": "e"}]}
    result |= {"agreement": {"flagged": True, "verdict": ""}}
    frame = robustness.table({"data set 100": result})
    (row,) = frame.to_dict("records")
    assert row["verdict"] == "LinAlgError: x" and row["should_flag"] and row["flagged"]
    last = robustness.summary(frame)
    assert last["missed"] == "0 of 1" and last["flagged"] == "1 of 1" and last["kl"] == float("inf")
    with pytest.raises(SystemExit, match="data set 101 has no exact posterior: RuntimeError: x"):
        robustness.table({"data set 101": {"error": "RuntimeError: x"}})


def test_robustness_writes_table_and_figure(root, benchmarks):
    """From a journal, without a fit: a regular set, one with a tail, one whose fit has failed."""
    import pool
    import robustness

    fit = {"kl": 0.1, "ess": 0.5, "k_hat": 0.4, "seconds": 9.0, "flagged": False, "unseen": 0.0}
    fit |= {"verdict": "No fault seen.", "uncovered": {"log_theta1": 0.01, "log_theta3": 0.02}}
    ours, journal = pool.fingerprint(pool.ROOT), root / ".robustness.jsonl"
    for i, spec in enumerate(robustness.specs(["100", "101", "102"], None).values()):
        below = {"log_theta1": 0.02 * (i == 0), "log_theta3": 0.0}
        result = {"below": below, "fits": [fit, fit | {"kl": 0.3}], "wall": 9.0}
        result["agreement"] = {"flagged": i == 0, "verdict": ""}
        if i == 2:
            result |= {"fits": [{"error": "ValueError: x"}, fit], "wall": 1.0}
            result["agreement"]["flagged"] = True
        pool.append(journal, pool.key(spec, ours), spec, result)
    options = ["--finished", "--journal", str(journal), "--save-to", str(root), "--workers", "2"]
    assert robustness.main(options) == 0
    rows = list(csv.DictReader((root / "results/robustness.csv").read_text().splitlines()))
    assert [row["kind"] for row in rows[:2]] == ["tailed", "regular"]
    assert (rows[0]["false_alarm"], rows[0]["uncovered"], rows[0]["kl_other"]) == (
        "True",
        "0.02",
        "0.3",
    )
    assert rows[-1]["seed"] == "all" and rows[-1]["false_alarm"] == "1 of 3"
    assert (rows[-1]["missed"], rows[-1]["should_flag"]) == ("0 of 3", "1 of 3")
    assert (root / ".robustness.seconds").read_text() == "10"  # 9 + 9 + 1 on two workers
    assert (root / "figures/robustness.png").stat().st_size > 5000


def test_simulated_sets_are_those_of_notebook_01(benchmarks):
    """The first reading of seed 100, computed by the lines of the notebook."""
    import fits

    source = "".join(read_cells(run.ROOT, "01_ornstein_uhlenbeck")[5]["source"])
    names = {"lib": lib, "np": np, "pd": pd, "torch": torch, "simulate_seed": 100, "dt": 0.1}
    exec(source, names)
    assert torch.equal(fits.simulate_ou(100).y, names["observations"].y)
