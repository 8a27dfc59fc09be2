"""The models of notebook 04: what a user would copy, and the data that were made from them."""

import ast

import nbformat
import pandas as pd
import pytest
import torch
from run import ROOT
from torch.distributions import LogNormal, Normal

import lib

TRUTH = {"birth": 0.5, "predation": 0.0025, "death": 0.3, "sigma": 10.0}
BLANK = {8, 21, 22, 23, 40}


@pytest.fixture(scope="module")
def notebook() -> dict[str, object]:
    """The names that the cells with a model define, and nothing that runs."""
    names = {"lib": lib, "torch": torch, "LogNormal": LogNormal, "Normal": Normal}
    cells = nbformat.read(ROOT / "notebooks/04_your_own_model.ipynb", as_version=4).cells
    for source in (cell.source for cell in cells if cell.cell_type == "code"):
        if "lib.SDE)" in source or "lib.StateSpaceModel(" in source:
            kept = [s for s in ast.parse(source).body if isinstance(s, ast.ClassDef | ast.Assign)]
            kept = [s for s in kept if "read_csv" not in ast.unparse(s)]
            kept = [s for s in kept if "problems[" not in ast.unparse(s)]
            exec(compile(ast.Module(kept, []), "notebook 04", "exec"), names)
    return names


def test_the_walk_through_takes_a_user_about_twenty_lines():
    cells = nbformat.read(ROOT / "notebooks/04_your_own_model.ipynb", as_version=4).cells
    (source,) = [c.source for c in cells if "class LotkaVolterra" in c.source]
    assert source.count("\n") + 1 <= 20


def test_lotka_volterra_data_are_made_again(notebook):
    """Kills: data that are not of the model, the values or the seed that data/README.md names."""
    model, table = notebook["model"], pd.read_csv(lib.data_path("lotka_volterra.csv"))
    theta = torch.tensor([[TRUTH[name] for name in model.theta_names]], dtype=torch.float64)
    paths = model.simulate(theta, 500, 0.1, seed=2)
    assert paths.alive.all()
    x = paths.x[0, 10::10]
    noise = torch.randn(50, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model.observation.sample(x, model.named(theta), noise)[:, 0]
    rows = torch.tensor(table[["prey_true", "predators_true"]].to_numpy())
    torch.testing.assert_close(rows, x, rtol=0, atol=0.00501)
    prey = torch.tensor(table.prey.to_numpy())
    assert set(table.t[table.prey.isna()]) == BLANK and list(table.t) == list(range(1, 51))
    there = ~prey.isnan()
    torch.testing.assert_close(prey[there], y[there], rtol=0, atol=0.0501)


def test_reactions_give_drift_and_diffusion(notebook):
    """a = S·h and β = S·diag(h)·Sᵀ of the stoichiometry S and hazards h.

    Kills: a square root in place of β, a sign or a rate that drift and diffusion do not share.
    """
    t, x = torch.zeros(1), torch.tensor([30.0, 7.0, 0.4])
    prey, predators, c = x
    theta = torch.tensor([0.5, 0.02, 0.3])
    change = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    hazard = torch.stack((0.5 * prey, 0.02 * prey * predators, 0.3 * predators))
    sde = notebook["LotkaVolterra"]()
    torch.testing.assert_close(sde.drift(t, x[:2], theta), change @ hazard)
    torch.testing.assert_close(
        sde.diffusion(t, x[:2], theta), change @ torch.diag(hazard) @ change.T
    )

    sde, theta = notebook["DriftingContact"](), torch.tensor([0.45, 0.8, 0.6, 0.2])
    change = torch.tensor([[-1.0, 0.0, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    hazard = torch.stack((c.exp() * prey * predators / 763, 0.45 * predators))
    drift = change[:, :2] @ hazard + torch.tensor([0.0, 0.0, 0.8 * (0.6 - 0.4)])
    torch.testing.assert_close(sde.drift(t, x, theta), drift)
    whole = change @ torch.diag(torch.cat([hazard, torch.tensor([0.04])])) @ change.T
    torch.testing.assert_close(sde.diffusion(t, x, theta), whole)
