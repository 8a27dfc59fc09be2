"""T, the monotone map of each component of ϑ: against autograd, areas, its inverse."""

import numpy as np
import pytest
import torch

from lib.quadratic_map import KNOTS, REACH, STEP, QuadraticMap


def perturbed(size: int = 2) -> QuadraticMap:
    """A map whose slopes differ a lot from knot to knot."""
    made = QuadraticMap(size)
    made.log_slope.data.normal_()
    return made


def everywhere(size: int = 2) -> torch.Tensor:
    """Values among the knots, at them, and beyond both ends."""
    z = torch.cat([torch.linspace(-2 * REACH, 2 * REACH, 200), STEP * torch.arange(KNOTS) - REACH])
    return z[:, None].expand(-1, size).contiguous()


def test_it_begins_as_the_identity():
    z = everywhere()
    x, log_slope = QuadraticMap(2)(z)
    torch.testing.assert_close(x, z, atol=1e-12, rtol=0.0)
    assert (log_slope == 0).all()


def test_slope_is_linear_between_knots_and_constant_beyond():
    """Kills a slope of the wrong knot or component, and one that goes on rising."""
    made, z = perturbed(), everywhere()
    slope = made(z)[1].exp().T.detach().numpy()
    knots = (STEP * torch.arange(KNOTS) - REACH).numpy()
    for j in range(2):
        at_knots = made.log_slope[j].exp().detach().numpy()
        np.testing.assert_allclose(slope[j], np.interp(z[:, j].numpy(), knots, at_knots), rtol=1e-9)


def test_slope_is_that_of_the_map_and_zero_stays():
    """Kills T_i that do not join up, which autograd alone would not see."""
    made, z = perturbed(), everywhere().requires_grad_()
    x, log_slope = made(z)
    (slope,) = torch.autograd.grad(x.sum(), z)
    torch.testing.assert_close(slope, log_slope.exp())
    fine = torch.linspace(-6, 6, 24_001)[:, None].expand(-1, 2).contiguous()
    x, log_slope = (part.detach() for part in made(fine))
    step = fine[1] - fine[0]
    areas = 0.5 * step * (log_slope.exp()[1:] + log_slope.exp()[:-1])
    torch.testing.assert_close(x[1:] - x[:-1], areas, atol=1e-9, rtol=1e-5)
    assert made(torch.zeros(1, 2))[0].abs().max() < 1e-12


def test_inverse_gives_back_the_value_and_its_slope():
    made, z = perturbed(), everywhere()
    x, log_slope = made(z)
    back, same = made.inverse(x)
    torch.testing.assert_close(back, z, atol=1e-9, rtol=0.0)
    torch.testing.assert_close(same, log_slope, atol=1e-8, rtol=0.0)


def test_gradient_of_the_inverse_is_that_of_its_differences():
    """Kills a piece that is held while its ends move."""
    made, x = perturbed(1), torch.linspace(-9.01, 9, 40)[:, None]
    made.inverse(x)[1].sum().backward()
    for k in (0, 3, KNOTS // 2, KNOTS - 1):
        ends = []
        for move in (1e-6, -1e-6):
            other = QuadraticMap(1)
            other.log_slope.data = made.log_slope.data.clone()
            other.log_slope.data[0, k] += move
            ends.append(float(other.inverse(x)[1].detach().sum()))
        found = float(made.log_slope.grad[0, k])
        assert found == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-5)


def test_a_ruined_flow_gives_no_index_out_of_range():
    """Kills a crash where NaN is to be reported."""
    made = perturbed()
    ruined = torch.full((3, 2), torch.nan)
    assert made(ruined)[0].isnan().all() and made.inverse(ruined)[0].isnan().all()


def test_it_computes_in_the_dtype_of_its_weights():
    """Kills the knots' places in the default dtype."""
    made = perturbed().to(torch.float32)
    x, _ = made(everywhere().float())
    assert x.dtype == torch.float32 and made.inverse(x)[0].dtype == torch.float32


def test_longer_tails_leave_the_middle_and_both_sides_alike():
    """Kills a slope added where it is to be multiplied, one side alone, and quantiles that move."""
    made = perturbed()
    before, z = made.log_slope.detach().clone(), everywhere()
    old = made(z)[0].detach()
    made.lengthen()
    factor = (made.log_slope.detach() - before).exp()
    right = {-4.0: 1.25, -2.0: 1.125, -1.5: 1.0, 0.0: 1.0, 1.5: 1.0, 2.5: 1.25, 4.0: 1.25}
    for place, value in right.items():
        k = round((place + REACH) / STEP)
        torch.testing.assert_close(factor[:, k], torch.full_like(factor[:, k], value))
    new, middle = made(z)[0].detach(), z.abs() <= 1.5
    torch.testing.assert_close(new[middle], old[middle], rtol=0.0, atol=1e-12)
    assert (new.abs() > old.abs())[z.abs() >= 2].all()
