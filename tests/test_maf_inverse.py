"""log q(ϑ) at any ϑ: the inverse of the masked autoregressive flow against its forward pass.

And its tails: noise stretched one coordinate at a time, and what density that gives.
"""

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from lib.maf import IAF, MAF, STRETCH, log_stretched, stretched

TAILS = pytest.mark.parametrize("tails", [False, True])


def perturbed(size: int, num_flows: int = 3, tails: bool = False) -> MAF:
    """A flow far from the identity, with a location and scales of its own."""
    q = MAF(size, num_flows, (16, 16), torch.randn(size), torch.rand(size) + 0.3, tails)
    for weight in q.parameters():
        weight.data += 0.25 * torch.randn_like(weight)
    return q


@TAILS
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_log_prob_is_that_of_the_draws(size, tails):
    """Kills a permutation that is not undone, a lost scale, and s of the wrong component."""
    q = perturbed(size, tails=tails)
    with torch.no_grad():
        vartheta, log_q = q(torch.randn(500, size))
        torch.testing.assert_close(q.log_prob(vartheta), log_q, atol=1e-10, rtol=0.0)


@TAILS
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_score_is_the_gradient_of_log_prob(size, tails):
    """Kills a wrong permutation, slope of s or triangle in the solve without an inverse."""
    q, noise = perturbed(size, tails=tails), torch.randn(50, size)
    vartheta, _, traces = q.trace(noise)
    vartheta = vartheta.detach().requires_grad_()
    (expected,) = torch.autograd.grad(q.log_prob(vartheta).sum(), vartheta)
    torch.testing.assert_close(q.score(noise, traces), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("size", [1, 3])
def test_inverse_step_gives_back_its_input(size):
    step, z = perturbed(size).steps[1], torch.randn(50, size)
    out, ladj = step(z)
    assert isinstance(step, IAF) and not torch.allclose(out, z, atol=0.1)
    back, same = step.inverse(out)
    torch.testing.assert_close(back, z, atol=1e-10, rtol=0.0)
    torch.testing.assert_close(same, ladj, atol=1e-10, rtol=0.0)


def test_log_prob_without_flows_is_a_normal():
    q = MAF(2, 0, (4, 4), torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]))
    vartheta = torch.randn(20, 2)
    normal = torch.distributions.Normal(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]))
    torch.testing.assert_close(q.log_prob(vartheta), normal.log_prob(vartheta).sum(-1))


@TAILS
def test_density_integrates_to_one_in_the_plane(tails):
    """Kills a Jacobian that the forward pass and the inverse get wrong alike."""
    q = perturbed(2, num_flows=2, tails=tails)
    with torch.no_grad():
        draws = q(torch.randn(4000, 2))[0]
        low, high = draws.min(0).values - 3.0, draws.max(0).values + 3.0
        axes = [torch.linspace(float(a), float(b), 800) for a, b in zip(low, high, strict=True)]
        cell = float(torch.stack([axis[1] - axis[0] for axis in axes]).prod())
        total = q.log_prob(torch.cartesian_prod(*axes)).exp().sum() * cell
    assert total.item() == pytest.approx(1.0, abs=2e-3)


def test_log_prob_has_the_gradient_of_its_finite_differences():
    """Kills an inverse that works in place, or that detaches what it has solved for."""
    q, vartheta = perturbed(3, num_flows=2), torch.randn(4, 3, requires_grad=True)
    assert torch.autograd.gradcheck(q.log_prob, vartheta)
    q.log_prob(vartheta).sum().backward()
    for name, weight in q.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    assert all(weight.grad.abs().sum() > 0 for weight in (q.shift, q.stretch))


def test_log_prob_keeps_float32_and_stays_finite_far_away():
    q = perturbed(3).float()
    vartheta, log_q = q(torch.randn(200, 3, dtype=torch.float32))
    got = q.log_prob(vartheta.detach())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, log_q, atol=5e-3, rtol=1e-3)
    far = perturbed(3).log_prob(torch.full((1, 3), 1e3))
    assert far.isfinite().all() and (far < -1e3).all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_the_last_rows_are_stretched_in_one_coordinate_in_turn(size, count):
    """Kills the first rows in place of the last, a turn that starts late, a stretch of all."""
    noise = torch.randn(9, size)
    expected = noise.clone()
    for i in range(count):
        expected[9 - count + i, i % size] *= STRETCH
    kept = noise.clone()
    assert stretched(noise, count).equal(expected) and noise.equal(kept)
    assert stretched(noise, 0) is noise and stretched(noise.float(), count).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 2, 3])
def test_log_stretched_is_the_ratio_of_explicit_mixtures(size):
    """Kills a wrong share, a lost log determinant, and an overflow far out."""
    scales = torch.cat([torch.ones(1, size), 1 + (STRETCH - 1) * torch.eye(size)])
    shares = Categorical(torch.tensor([0.5] + [0.5 / size] * size))
    m = MixtureSameFamily(shares, Independent(Normal(torch.zeros(size + 1, size), scales), 1))
    far = torch.tensor([[0.0], [30.0], [-60.0]]).expand(3, size)
    noise = torch.cat([torch.randn(50, size), far])
    expected = m.log_prob(noise) - Normal(0.0, 1.0).log_prob(noise).sum(1)
    torch.testing.assert_close(log_stretched(noise), expected, atol=1e-12, rtol=1e-12)
    single = log_stretched(noise.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_mixture_integrates_to_one(size):
    """Kills shares that do not sum to 1; Gauss-Hermite nodes of scale 2 suit both densities."""
    nodes, weights = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(80))
    z = torch.cartesian_prod(*[2 * nodes] * size).reshape(-1, size)
    w = torch.cartesian_prod(*[weights / weights.sum()] * size).reshape(-1, size).prod(1)
    log_q, log_wide = (Normal(0.0, sd).log_prob(z).sum(1) for sd in (1.0, 2.0))
    total = (w * (log_stretched(z) + log_q - log_wide).exp()).sum()
    assert total.item() == pytest.approx(1.0, abs=1e-10)


@TAILS
@pytest.mark.parametrize("size", [1, 3])
def test_inverse_gives_back_the_noise_and_log_q(size, tails):
    q, noise = perturbed(size, tails=tails), torch.randn(50, size)
    vartheta, log_q = q(noise)
    back, same = q.inverse(vartheta)
    torch.testing.assert_close(back, noise, atol=1e-9, rtol=0.0)
    torch.testing.assert_close(same, log_q, atol=1e-9, rtol=0.0)
