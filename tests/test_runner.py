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
import pytest
import run

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
    assert done.stderr.endswith("Interrupted; the notebooks that had finished are kept.\n")
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
