"""Muon's orthogonal matrices and its stacks; its steps against torch's own."""

import pytest
import torch
from torch.testing import assert_close

from lib.muon import COEFFICIENTS, NARROW, Stack, by_width, orthogonalise
from lib.step import Optimizer

SHAPES = [(5, 5), (3, 8), (9, 2), (4, 8), (3, 67), (67, 2)]


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


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[-1:]])
def test_stacks_hold_each_matrix_once_the_wide_ones_apart(shapes: list[tuple[int, int]]) -> None:
    """Kills a matrix left out, one that shares its place, and padding to the widest of all."""
    matrices = [torch.randn(shape) for shape in shapes]
    stacks = by_width(matrices)
    assert sorted(id(w) for stack in stacks for w in stack.matrices) == sorted(map(id, matrices))
    assert len(stacks) == len({max(shape) > NARROW for shape in shapes})
    for stack in stacks:
        whole = torch.zeros(stack.shape)
        for view, w in zip(stack.views(whole), stack.matrices, strict=True):
            view.copy_(w)
        assert whole.count_nonzero() == sum(w.numel() for w in stack.matrices)
        for view, w in zip(stack.views(whole), stack.matrices, strict=True):
            assert view.equal(w)


def test_a_matrix_moves_as_it_would_alone() -> None:
    """Kills a scale of another matrix, and a tall one whose step is that of a wide one."""
    matrices = [torch.randn(shape) for shape in SHAPES[:4]]
    stack = Stack(matrices)
    whole = torch.zeros(stack.shape)
    for view, w in zip(stack.views(whole), matrices, strict=True):
        view.copy_(w)
    moves = stack.views(stack.direction(whole, whole))
    for w, move in zip(matrices, moves, strict=True):
        alone = orthogonalise((w if w.shape[0] <= w.shape[1] else w.mT)[None])[0]
        alone = alone if w.shape[0] <= w.shape[1] else alone.mT
        assert_close(move, 0.2 * max(w.shape) ** 0.5 * alone)


def test_steps_are_those_of_torch() -> None:
    """Kills a wrong momentum, scale or sign; torch iterates in bfloat16, hence the tolerance."""
    ours, theirs = make(0), make(0)
    mine = Optimizer([], ours)
    mine.set_rate(0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    for seed in range(4):
        # Small, so that nothing is clipped.
        gradients = {id(w): 0.1 * g.detach() for w, g in zip(ours, make(seed + 10), strict=True)}
        before = [w.detach().clone() for w in theirs]
        mine.step([gradients[id(w)] for w in mine.weights])
        for w, g in zip(theirs, gradients.values(), strict=True):
            w.grad = g
        reference.step()
        for w, other, old in zip(ours, theirs, before, strict=True):
            moved = (other - old).detach()
            assert (w - other).detach().norm() < 0.04 * (seed + 1) * moved.norm()
