"""The repository as it is committed: who imports whom, docstring examples, the claims table."""

import ast
import doctest
import importlib
from graphlib import TopologicalSorter

import claims
import pytest
import torch
from run import ROOT

# Who may import whom inside lib (design picture): an arrow to the left only. The referees `kalman`
# and `mh` share no code with the player: they import nothing, and no part of the fit imports them.
PICTURE = {
    "bounds": set(),
    "data": {"probe_data"},
    "diagnostics": {"weights"},
    "weights": set(),
    "family": set(),
    "kalman": set(),
    "mh": set(),
    "movable": {"sde"},
    "muon": set(),
    "network": set(),
    "panels": set(),
    "plots": {"plots_fit", "plots_parts", "plots_studies", "plots_theta"},
    "plots_fit": {"data", "weights", "plots_parts", "result"},
    "plots_parts": set(),
    "plots_studies": {"weights", "plots_parts"},
    "plots_theta": {"weights", "plots_fit", "plots_parts", "priors", "probe", "result", "ssm"},
    "schedule": set(),
    "sde": set(),
    "features": {"data"},
    "gauss_markov": {"network", "smoother"},
    "linear_start": {"data", "weights", "elbo", "family", "posterior", "ssm", "start"},
    "guided": {"linearised", "maf", "movable", "smoother", "state_map"},
    "linearised": {"data", "features", "movable", "smoother", "ssm", "state_map"},
    "local_iaf": {"network"},
    "quadratic_map": set(),
    "maf": {"network", "quadratic_map"},
    "priors": {"bounds", "movable", "probe"},
    "probe": {"bounds", "sde"},
    "probe_sde": {"probe", "sde"},
    "probe_data": set(),
    "quadrature": {"kalman", "panels"},
    "ssm": {"data", "movable", "priors", "probe", "probe_sde", "sde"},
    "smoother": set(),
    "start": {"bounds", "data", "features", "ssm"},
    "state_map": {"bounds"},
    "posterior": {
        "data",
        "family",
        "features",
        "gauss_markov",
        "guided",
        "linearised",
        "local_iaf",
        "maf",
        "network",
        "smoother",
        "ssm",
        "start",
    },
    "config": {"family"},
    "cuda_graph": {"posterior", "step"},
    "machine": set(),
    "path_gradient": {"gauss_markov", "posterior"},
    "elbo": {"data", "guided", "weights", "path_gradient", "posterior", "smoother", "ssm"},
    "widened": {"diagnostics", "weights"},
    "refit": {"weights", "maf", "schedule", "step"},
    "storage": {"data", "family", "posterior", "priors", "probe_data", "ssm", "start"},
    "tables": {"data", "weights", "probe_data"},
    "result": {
        "data",
        "diagnostics",
        "elbo",
        "family",
        "posterior",
        "probe",
        "sde",
        "ssm",
        "storage",
        "tables",
        "weights",
        "widened",
    },
    "agreement": {"diagnostics", "probe", "weights", "result", "storage"},
    "independence": {"diagnostics", "probe", "weights", "result"},
    "step": {"muon", "network", "posterior"},
    "supply": {
        "config",
        "data",
        "elbo",
        "guided",
        "linear_start",
        "maf",
        "posterior",
        "refit",
        "smoother",
        "ssm",
    },
    "train": {
        "config",
        "cuda_graph",
        "data",
        "diagnostics",
        "elbo",
        "family",
        "linear_start",
        "machine",
        "posterior",
        "result",
        "schedule",
        "ssm",
        "start",
        "step",
        "storage",
        "supply",
    },
}
MODULES = sorted((ROOT / "lib").rglob("*.py"))


def imported(source: str) -> set[str]:
    """Every module that a source imports, wherever in it; `lib.x` for `from lib import x`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["lib" if node.level else "", node.module]))
            names |= {f"lib.{a.name}" for a in node.names} if module == "lib" else {module}
    return names


def picture_faults(name: str, source: str) -> set[str]:
    """Imports of lib's module `name` that the picture does not have."""
    inside = {i.split(".")[1] for i in imported(source) if i.startswith("lib.")}
    return inside - (set(PICTURE) if name == "__init__" else PICTURE[name])


def test_imports_keep_to_the_picture():
    assert {path.stem for path in MODULES} - {"__init__"} == set(PICTURE)
    tuple(TopologicalSorter(PICTURE).static_order())  # raises on a cycle
    faults = {path.stem: picture_faults(path.stem, path.read_text()) for path in MODULES}
    assert not {name: fault for name, fault in faults.items() if fault}


@pytest.mark.parametrize("line", ["from lib.elbo import elbo", "from lib import elbo"])
def test_the_picture_sees_an_import_that_points_up(line):
    assert picture_faults("sde", f"def f():\n    {line}") == {"elbo"}
    assert picture_faults("sde", "from .elbo import elbo") == {"elbo"}
    assert picture_faults("train", line) == set()


def test_only_plots_draws_and_only_training_knows_devices():
    for path in MODULES:
        source = path.read_text()
        drawing = {i for i in imported(source) if i.split(".")[0] in ("matplotlib", "seaborn")}
        # The studies' journal passes over files of this name: no number of a fit may hang on them.
        assert path.stem.startswith("plots") or not drawing, path.name
        assert path.stem in ("machine", "cuda_graph") or "torch.cuda" not in source, path.name


@pytest.fixture
def users_dtype():
    """An example is typed by a user, whose default is float32."""
    ours = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(ours)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_doctests(path, users_dtype):
    name = "lib" if path.stem == "__init__" else f"lib.{path.stem}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_shows_the_results():
    """Kills a number typed into the table, and a full run whose README was not committed."""
    assert claims.read_rows(ROOT)
    assert claims.render_readme(ROOT) == (ROOT / "README.md").read_text(encoding="utf-8")
