"""Bounds: maps and Jacobians by autograd, densities by quadrature, supports by hand."""

import math

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Beta,
    Dirichlet,
    Exponential,
    ExpTransform,
    Gumbel,
    HalfNormal,
    Independent,
    Kumaraswamy,
    LogNormal,
    MultivariateNormal,
    Normal,
    Pareto,
    Poisson,
    StudentT,
    TransformedDistribution,
    Uniform,
    VonMises,
)
from torch.testing import assert_close

from lib.bounds import Bounds, support
from lib.priors import NaturalPrior
from lib.state_map import StateMap

INF, ANY = math.inf, torch.tensor([-math.inf])
LOW = torch.tensor([-INF, 0.0, 2.0, 0.0, -3.0, 100.0])
HIGH = torch.tensor([INF, INF, INF, 1.0, 5.0, 101.0])


def test_theta_and_back_and_the_slope_by_autograd():
    """Kills a doubled or missing width, s(ϑ)² for s(ϑ)s(-ϑ), exp of a real component."""
    bounds = Bounds(LOW, HIGH)
    vartheta = torch.linspace(-4.0, 4.0, 9)[:, None].expand(-1, 6)
    theta = bounds.to_natural(vartheta)
    assert bounds.contain(theta).all()
    assert_close(bounds.to_unconstrained(theta), vartheta)
    slope = torch.func.vmap(torch.func.jacrev(bounds.to_natural))(vartheta)
    assert_close(slope.diagonal(dim1=-2, dim2=-1).log(), bounds.log_slope(vartheta))
    expected = [1.0, math.e, 2 + math.e, *(a + (b - a) / (1 + math.exp(-1)) for a, b in
                                          [(0, 1), (-3, 5), (100, 101)])]  # fmt: skip
    assert_close(bounds.to_natural(torch.ones(6)), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_out_nothing_reaches_an_end_of_an_interval(dtype):
    """A density there may be 0 or infinite. Kills a clamp of the sigmoid before the affine map."""
    bounds = Bounds(LOW.to(dtype), HIGH.to(dtype))
    vartheta = torch.tensor([[-60.0], [60.0]], dtype=dtype).expand(-1, 6).clone().requires_grad_()
    theta = bounds.to_natural(vartheta)
    assert bounds.contain(theta)[:, bounds.two_ends].all() and theta.isfinite().all()
    theta.sum().backward()
    assert vartheta.grad.isfinite().all() and bounds.log_slope(vartheta).isfinite().all()


def test_a_draw_at_an_end_is_just_inside_and_one_outside_is_nan():
    """Draws of Beta(0.01, 0.01) round to 0 and 1."""
    bounds = Bounds(torch.zeros(1), torch.ones(1))
    vartheta = bounds.to_unconstrained(torch.tensor([[0.0], [1.0], [-0.1], [1.1]]))[:, 0]
    assert vartheta[:2].isfinite().all() and vartheta[2:].isnan().all()
    assert vartheta[0] < -30 and vartheta[1] > 30
    positive = Bounds(torch.zeros(1), torch.tensor([INF]))
    assert positive.to_unconstrained(torch.tensor([-1.0])).isnan().all()


def test_inside_moves_only_what_lies_beyond_an_interval():
    theta = torch.tensor([-9.0, 7.0, -1.0, 1.5, 2.0, 99.0])
    assert_close(
        Bounds(LOW, HIGH).inside(theta), torch.tensor([-9.0, 7.0, -1.0, 0.999, 2.0, 100.001])
    )


def test_labels_say_what_the_unconstrained_number_is():
    bounds = Bounds(LOW, HIGH)
    assert [bounds.label("a", j) for j in range(5)] == [
        "a", "log a", "log(a − 2)", "logit a in (0, 1)", "logit a in (-3, 5)"]  # fmt: skip


LAWS = {
    "normal": (Normal(0.0, 2.0), -INF, INF),
    "student": (StudentT(4.0), -INF, INF),
    "gumbel": (Gumbel(0.0, 1.0), -INF, INF),
    "lognormal": (LogNormal(0.0, 1.0), 0.0, INF),
    "halfnormal": (HalfNormal(1.0), 0.0, INF),
    "pareto": (Pareto(2.0, 3.0), 2.0, INF),
    "uniform": (Uniform(0.1, 2.0), 0.1, 2.0),
    "beta": (Beta(2.0, 3.0), 0.0, 1.0),
    "kumaraswamy": (Kumaraswamy(torch.tensor(2.0), torch.tensor(2.0)), 0.0, 1.0),
    "von mises": (VonMises(1.0, 2.0), -math.pi, math.pi),
    "beta, shifted": (TransformedDistribution(Beta(2.0, 3.0), AffineTransform(1.0, 2.0)), 1.0, 3.0),
    "beta, turned": (
        TransformedDistribution(Beta(2.0, 3.0), AffineTransform(1.0, -2.0)), -1.0, 1.0),
    "log-uniform": (
        TransformedDistribution(Uniform(-1.0, 1.0), ExpTransform()), 1 / math.e, math.e),
    "exponential, shifted": (
        TransformedDistribution(Exponential(1.0), AffineTransform(5.0, 1.0)), 5.0, INF),
    "lognormal, scaled": (
        TransformedDistribution(LogNormal(0.0, 1.0), AffineTransform(0.0, 2.0)), 0.0, INF),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_support_is_that_of_the_law_and_its_density_of_vartheta_integrates_to_one(name):
    """Kills one Jacobian too many or too few, and torch's word on the support of affine maps."""
    law, low, high = LAWS[name]
    bounds = support("prior", law, ANY, "")
    assert_close(torch.cat([bounds.low, bounds.high]), torch.tensor([low, high]))
    prior = NaturalPrior([law], bounds)
    vartheta = torch.linspace(-60.0, 60.0, 600_001)[:, None]
    density = prior.log_prob(vartheta).exp()
    assert torch.trapezoid(density, vartheta[:, 0]).item() == pytest.approx(1.0, abs=2e-4)
    draws = bounds.to_natural(prior.sample(20_000))[:, 0]
    assert bounds.contain(draws[:, None]).all()
    theta = bounds.to_natural(vartheta)[:, 0]
    mean = torch.trapezoid((theta * density).nan_to_num(), vartheta[:, 0]).item()
    assert abs(draws.mean().item() - mean) < 5 * draws.std().item() / 20_000**0.5


def test_support_of_a_joint_law_has_an_end_for_each_number():
    """Kills ends taken from one component for all."""
    box = Independent(Uniform(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 9.0])), 1)
    floor = torch.tensor([0.0, -INF])
    found = support("x0", box, floor, "")
    assert found.low.tolist() == [0.0, 5.0] and found.high.tolist() == [1.0, 9.0]
    exps = TransformedDistribution(MultivariateNormal(torch.zeros(2), torch.eye(2)), ExpTransform())
    assert support("x0", exps, torch.full((2,), -INF), "").low.tolist() == [0.0, 0.0]
    cut = support("x0", MultivariateNormal(torch.zeros(2), torch.eye(2)), floor, "")
    assert cut.low.tolist() == [0.0, -INF]


@pytest.mark.parametrize(
    ("law", "floor", "message"),
    [
        (Poisson(3.0), 0.0, r"prior must have a density on an interval for each number; got Int"),
        (Dirichlet(torch.ones(3)), 0.0, r"prior must have a density on an .*got Simplex\(\) "),
        (Uniform(-3.0, -1.0), 0.0, r"must have mass in \(0, inf\); got \(-3, -1\) .*Go"),
        (TransformedDistribution(Exponential(1.0), AffineTransform(0.0, -1.0)), -INF,
         r"prior must not be bounded above alone; got \(-inf, "),
    ],
)  # fmt: skip
def test_what_has_no_interval_is_refused(law, floor, message):
    with pytest.raises(ValueError, match=message):
        support("prior", law, torch.tensor([floor]), "Go.")


@pytest.mark.compiled
def test_the_map_of_a_bounded_x_0_is_one_graph():
    """Kills a look at the numbers in each step, for which a GPU would have to wait."""
    start = Bounds(torch.tensor([2.0, 0.0]), torch.tensor([INF, 9.0]))
    state_map = StateMap((False, True), 4, start)
    u = torch.randn(3, 4, 2)
    whole = torch.compile(state_map, backend="eager", fullgraph=True)(u)
    for found, expected in zip(whole, state_map(u), strict=True):
        assert_close(found, expected)
