"""Muon against torch's own, step by step, and what it must leave alone."""

import pytest
import torch
from torch.testing import assert_close

from lib.muon import COEFFICIENTS, Muon, orthogonalise

SHAPES = [(5, 5), (3, 8), (9, 2), (4, 8)]


def make(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def test_singular_values_follow_the_iteration_and_the_vectors_stay() -> None:
    """Kills a wrong coefficient, a transposed Gram matrix, padding that leaks."""
    g = torch.randn(3, 4, 7)
    g[1, 2:], g[1, :, 5:] = 0.0, 0.0
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    s = s / (g.flatten(1).norm(dim=1)[:, None] + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert_close(orthogonalise(g), u @ torch.diag_embed(s) @ v)
    assert s[s > 0.05].sub(1).abs().max() < 0.35


def test_steps_are_those_of_torch() -> None:
    """Kills a wrong momentum, scale or sign; torch iterates in bfloat16, hence the tolerance."""
    ours, theirs = make(0), make(0)
    mine = Muon(ours, lr=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    for seed in range(4):
        for weights in (ours, theirs):
            for w, g in zip(weights, make(seed + 10), strict=True):
                w.grad = g.detach().clone()
        before = [w.detach().clone() for w in theirs]
        mine.step()
        reference.step()
        for w, other, old in zip(ours, theirs, before, strict=True):
            moved = (other - old).detach()
            assert (w - other).detach().norm() < 0.02 * (seed + 1) * moved.norm()


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_found_inf_leaves_weights_and_momentum(bad: float) -> None:
    weights = make(0)
    optimizer = Muon(weights, lr=0.1)
    for w in weights:
        w.grad = torch.full_like(w, torch.nan if bad else 1.0)
    kept = [w.detach().clone() for w in weights]
    optimizer.found_inf = torch.tensor(bad)
    optimizer.step()
    assert all(torch.equal(w, old) for w, old in zip(weights, kept, strict=True)) == bool(bad)
    assert bool((optimizer.average == 0).all()) == bool(bad)
