"""The committed notebooks: fit to be replayed, and one with the study's values."""

import ast
import re
from pathlib import Path

import nbformat
import parameters
import pytest
from run import ROOT, select

STUDY = ["01_ornstein_uhlenbeck", "02_sir_boarding_school", "03_comparison_with_mh"]
STUDY.append("04_your_own_model")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A slash-led path of two or more parts, or a drive letter; not a URL, not a fraction.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/\\<}])/[A-Za-z][\w.-]*/[\w.-]|\b[A-Z]:\\\w")


def notebook_faults(path: Path) -> list[str]:
    """What makes the replay vacuous, or the notebook unfit to read or to commit."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    faults = [fault for cell in code for fault in cell_faults(cell)]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        faults.append("execution counts are not 1, 2, 3, …: run notebooks/refresh.py")
    if not any(cell.outputs for cell in code):
        faults.append("no outputs, so that a replay compares nothing")
    if "widgets" in notebook.metadata:
        faults.append("widget state in the metadata")
    if path.stat().st_size > 1_500_000:
        faults.append(f"{path.stat().st_size} bytes")
    texts = [cell.source for cell in notebook.cells] + [t for c in code for t in output_texts(c)]
    faults += [f"absolute path in {t!r}" for t in texts if ABSOLUTE_PATH.search(t)]
    return faults


def output_texts(cell) -> list[str]:
    """Text that a cell printed or showed; pictures left out."""
    shown = [(mime, text) for o in cell.outputs for mime, text in o.get("data", {}).items()]
    return [o.text for o in cell.outputs if "text" in o] + [
        text for mime, text in shown if mime.startswith("text/")
    ]


def cell_faults(cell) -> list[str]:
    """Faults of one code cell: its length, what it defines, what it printed."""
    first = cell.source.partition("\n")[0]
    faults = [f"defines {name}, which belongs in lib" for name in defined(ast.parse(cell.source))]
    if cell.source.count("\n") + 1 > 25:
        faults.append(f"more than 25 lines: {first}")
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            faults.append(f"{output.get('name', 'error')} below: {first}")
        if any("widget" in mime for mime in output.get("data", {})):
            faults.append(f"widget data below: {first}")
    return faults


def defined(tree: ast.AST) -> list[str]:
    """Functions and classes below a node, except a user's model: a class that derives lib.SDE."""
    names = []
    for node in ast.iter_child_nodes(tree):
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if "SDE" in bases or "lib.SDE" in bases:
            continue
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(node.name)
        names += defined(node)
    return names


def test_the_studys_notebooks_are_there():
    assert set(STUDY) <= {path.stem for path in NOTEBOOKS}
    assert [path.stem for path in NOTEBOOKS] == select(ROOT, []), "a name that the runner skips"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_be_replayed(path):
    assert notebook_faults(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_studys_values_are_parameters_of_the_notebook(path):
    defaults = parameters.read_defaults(ROOT, path.stem)
    assert defaults["quick"] is True and defaults["save_to"] == ""
    values = parameters.read_study(ROOT, path.stem, defaults)
    parameters.check_data(ROOT, path.stem, defaults)
    parameters.check_data(ROOT, path.stem, defaults | values)


def test_every_params_file_has_its_notebook():
    stems = {path.stem for path in (ROOT / "params").glob("*")}
    assert stems == {path.stem for path in NOTEBOOKS}


# --- the guard guarded: each fault is seen --------------------------------------------------------


@pytest.fixture
def good(tmp_path):
    """A notebook without a fault, and where to write it."""
    notebook = nbformat.v4.new_notebook()
    model = "class Mine(lib.SDE):\n    def drift(self, t, x, theta):\n        return x"
    notebook.cells = [
        nbformat.v4.new_markdown_cell("https://arxiv.org/abs/1811.08337, $a/b/c$, and/or/if"),
        nbformat.v4.new_code_cell(model, execution_count=1),
        nbformat.v4.new_code_cell("print(1)", execution_count=2),
    ]
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="<td>1</td></tr>\n")]
    return notebook, tmp_path / "01_a.ipynb"


def test_guard_passes_a_good_notebook(good):
    notebook, path = good
    nbformat.write(notebook, path)
    assert notebook_faults(path) == []


OUTPUTS = {
    "stderr below": nbformat.v4.new_output("stream", name="stderr", text="careful"),
    "error below": nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]),
    "widget data": nbformat.v4.new_output(
        "display_data", data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%"}
    ),
    "absolute path": nbformat.v4.new_output("stream", text="saved to /opt/me/figure.png"),
}


@pytest.mark.parametrize("fault", OUTPUTS)
def test_guard_sees_a_bad_output(good, fault):
    notebook, path = good
    notebook.cells[2].outputs.append(OUTPUTS[fault])
    nbformat.write(notebook, path)
    (said,) = notebook_faults(path)
    assert fault in said


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def helper():\n    pass", "defines helper"),
        ("class Tool:\n    pass", "defines Tool"),
        ("x = 1\n" * 26, "more than 25 lines"),
        ("open('/data/mine/x.csv')", "absolute path"),
    ],
)
def test_guard_sees_a_bad_cell(good, source, fault):
    notebook, path = good
    notebook.cells[2].source = source.rstrip()
    nbformat.write(notebook, path)
    (said,) = notebook_faults(path)
    assert fault in said


def test_guard_sees_counts_out_of_order_missing_outputs_widget_state_and_size(good):
    notebook, path = good
    notebook.cells[2].execution_count = 5
    notebook.cells[2].outputs = []
    notebook.metadata["widgets"] = {}
    notebook.cells[0].source += "x" * 1_500_000
    nbformat.write(notebook, path)
    said = notebook_faults(path)
    assert len(said) == 4
    for fault, words in zip(said, ("counts", "no outputs", "widget state", "bytes"), strict=True):
        assert words in fault
