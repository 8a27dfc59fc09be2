"""Quadrature of the OU posterior against the reference, dense Gaussians, brute force and MH."""

import json
import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal
from torch.testing import assert_close

from lib import panels, quadrature
from lib.data import data_path, read_csv
from lib.kalman import forward_filter, ou_transition, simulate_linear_gaussian
from lib.mh import random_walk_mh
from lib.quadrature import NAMES, QuadraturePosterior, ou_posterior

SHORT = [18.8, 19.3, 17.5, 17.9, 16.0, 16.6]  # at 0.1, …, 0.6: a long tail in both rates
LEVELS = torch.tensor([0.01, 0.025, 0.25, 0.5, 0.75, 0.975, 0.99], dtype=torch.float64)


@pytest.fixture(scope="module", params=["exact", "euler"])
def ou_a(request):
    """(posterior by quadrature, reference) for data/ou_a.csv."""
    reference = json.loads(data_path("reference/ou_a.json").read_text())[request.param]
    y = read_csv(data_path("ou_a.csv"), dt=0.1).y[:, 0]
    return ou_posterior(y, 0.1, exact=request.param == "exact"), reference


@pytest.fixture(scope="module")
def short():
    """Posterior of six observations."""
    return ou_posterior(torch.tensor(SHORT, dtype=torch.float64), 0.1, exact=True)


def close(found, expected, atol):
    assert_close(found, torch.as_tensor(expected), atol=atol, rtol=0)


def test_ou_a_has_the_reference_evidence_and_moments(ou_a):
    """Kills: θ2 integrated wrongly, prior or Jacobian of the grid left out, tails cut."""
    posterior, reference = ou_a
    assert abs(posterior.log_evidence - reference["log_evidence"]) < 1e-5
    close(posterior.mean, reference["mean"], 1e-4)
    close(posterior.sd, reference["sd"], 1e-4)
    close(posterior.correlation, reference["corr"], 1e-4)


def test_ou_a_has_the_reference_quantiles(ou_a):
    """The reference interpolated those of log θ1 and log θ3 on its grid: good to 0.007."""
    posterior, reference = ou_a
    levels = torch.tensor(reference["quantile_levels"])
    for name, atol in zip(NAMES, (0.008, 1e-3, 0.008), strict=True):
        close(posterior.quantile(name, levels), reference["quantiles"][name], atol)
    tail = reference["probability"]["log_theta1_below_minus4"]
    assert abs(float(posterior.probability_below("log_theta1", -4)) / tail - 1) < 0.03
    assert abs(float(posterior.probability_below("log_theta3", -2))) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_ou_a_density_distribution_and_quantile_agree(ou_a, name):
    """Kills: a quantile of another component, a density that is not the derivative of P."""
    posterior, _ = ou_a
    middle, spread = float(posterior.quantile(name, 0.5)), float(posterior.sd[NAMES.index(name)])
    points = middle + spread * torch.linspace(-30, 12, 2001)
    density = posterior.marginal(name, points)
    mass = torch.cumulative_trapezoid(density, points)
    close(mass[-1], 1.0, 1e-4)
    close(
        mass + posterior.probability_below(name, points[0]),
        posterior.probability_below(name, points[1:]),
        1e-4,
    )
    close(posterior.probability_below(name, posterior.quantile(name, LEVELS)), LEVELS, 1e-9)
    mean = torch.trapezoid(points * density, points)
    close(mean, posterior.mean[NAMES.index(name)], 1e-2 * spread)


def dense_ou(u, v, y, dt, x0, s):
    """log p(u, v, y), E θ2 and Var θ2 given (u, v, y), with no filter: y ~ N(m, C + s² g gᵀ)."""
    theta1, theta3 = u.exp()[:, None, None], v.exp()[:, None, None]
    t = dt * torch.arange(1, len(y) + 1)
    gap, total = (t[:, None] - t).abs(), t[:, None] + t
    # Cov(x_s, x_t) = θ3²/(2θ1)·(e^{−θ1|t−s|} − e^{−θ1(t+s)}), written so that θ1 → 0 is safe.
    decay = -torch.expm1(-theta1 * (total - gap)) / theta1
    noise = 0.5 * theta3.square() * torch.exp(-theta1 * gap) * decay + torch.eye(len(y))
    g = -torch.expm1(-theta1[..., 0] * t)
    y0 = y - x0 * torch.exp(-theta1[..., 0] * t)
    law = MultivariateNormal(torch.zeros_like(g), noise + s**2 * g[..., :, None] * g[..., None, :])
    prior = Normal(0.0, s)
    precision_y = torch.linalg.solve(noise, torch.stack([y0, g], dim=-1))
    weight, square = (precision_y * g[..., None]).sum(-2).unbind(-1)
    var = 1 / (1 / s**2 + square)
    return law.log_prob(y0) + prior.log_prob(u) + prior.log_prob(v), var * weight, var


def test_short_series_equals_brute_force_with_dense_gaussians(short):
    """Long tails in both rates. Kills: range or tails cut, θ2's conditional law, lost mass."""
    axis = torch.arange(-60.0, 60.01, 0.4)
    u, v = torch.cartesian_prod(axis, axis).unbind(-1)
    log_density, mean2, var2 = dense_ou(u, v, torch.tensor(SHORT), 0.1, 20.0, 10.0)
    log_evidence = log_density.logsumexp(0) + 2 * math.log(0.4)
    weight = (log_density - log_density.logsumexp(0)).exp()
    assert abs(short.log_evidence - float(log_evidence)) < 1e-3
    mean = torch.stack([(weight * value).sum() for value in (u, mean2, v)])
    close(short.mean, mean, 2e-3)
    square = [u.square(), mean2.square() + var2, v.square()]
    sd = (torch.stack([(weight * s).sum() for s in square]) - mean.square()).sqrt()
    close(short.sd, sd, 2e-3)
    for name, value in (("log_theta1", u), ("log_theta3", v)):
        edge = -10.2  # half-way between two nodes of the brute grid
        tail = short.probability_below(name, edge)
        assert float(tail) > 0.01
        close(tail, (weight * (value < edge)).sum(), 1e-3)


def test_short_series_agrees_with_random_walk_metropolis(short):
    """The two referees share only the filter. 5 standard errors from the spread of chains."""
    y = torch.tensor(SHORT)

    def log_density(vartheta):
        theta = torch.stack([vartheta[:, 0].exp(), vartheta[:, 1], vartheta[:, 2].exp()], dim=-1)
        log_y = forward_filter(y, ou_transition(theta, 0.1), 20.0, 0.0, 1.0).log_likelihood
        return log_y - 0.5 * (vartheta / 10).square().sum(-1)

    start = torch.randn(400, 3) * 5 + torch.tensor([-5.0, 0.0, -5.0])
    result = random_walk_mh(log_density, start, 1500, 500, seed=1)
    for j, name in enumerate(NAMES):
        median = float(short.quantile(name, 0.5))
        for statistic, expected in (
            (result.samples[..., j], short.mean[j]),
            ((result.samples[..., j] < median).double(), 0.5),
        ):
            chain_means = statistic.mean(1)
            error = chain_means.std() / math.sqrt(len(chain_means))
            assert abs(chain_means.mean() - expected) < 5 * error


def bimodal_series():
    """A simulated set of the study whose posterior also allows a deterministic path."""
    generator = torch.Generator().manual_seed(102)
    transition = ou_transition(torch.tensor([0.2, 5.0, 1.0]), 0.1)
    x = simulate_linear_gaussian(transition, 20.0, torch.randn(200, generator=generator))
    return x[1:] + torch.randn(200, generator=generator)


def series_with_a_ridge() -> torch.Tensor:
    """θ = (0.2, 5, 1), and a deterministic path is likely enough: P(log θ3 < −5) = 3.4 %.

    At small θ3 log θ1 is known to 0.03, and no node of the first panels lies so near.
    """
    generator = torch.Generator().manual_seed(100)
    noise = torch.randn(2, 200, generator=generator)
    transition = ou_transition(torch.tensor([0.2, 5.0, 1.0]), 0.1)
    return simulate_linear_gaussian(transition, 20.0, noise[0])[1:] + noise[1]


@pytest.mark.parametrize("series", [bimodal_series, series_with_a_ridge])
@pytest.mark.parametrize("top", [-3.125, -12.125])
def test_second_mode_in_log_theta3_is_kept(series, top):
    """A deterministic path: log θ3 anywhere below −3, log θ1 within 0.03. Compared with brute force
    over that slab. Kills: refinement round the highest mode only, dropped panels, panels left empty
    that were so before the ridge into them was resolved (0 in place of 1.2 % below −12).
    """
    y = series()
    posterior = ou_posterior(y, 0.1, exact=True)
    u, v, theta2 = torch.arange(-2.4, -1.2, 0.01), torch.arange(-61.0, top + 0.1, 0.25), 25.0
    theta = torch.cartesian_prod(u.exp(), torch.tensor([-theta2, 0.0, theta2]), v.exp())
    runs = forward_filter(y, ou_transition(theta, 0.1), 20.0, 0.0, 1.0).log_likelihood
    low, middle, high = runs.reshape(len(u), 3, len(v)).unbind(1)
    b, a = (high - low) / (2 * theta2), 0.01 - (high + low - 2 * middle) / theta2**2
    log_y = middle + b.square() / (2 * a) - 0.5 * (100 * a).log()
    prior = Normal(0.0, 10.0)
    log_p = log_y + prior.log_prob(u)[:, None] + prior.log_prob(v) - posterior.log_evidence
    below = float(log_p.exp().sum()) * 0.01 * 0.25
    found = float(posterior.probability_below("log_theta3", top))
    assert found > 0.01
    assert abs(found - below) < 1e-4, (found, below)


def test_ridge_of_paths_without_noise_is_followed_to_its_end():
    """So far out only the prior acts. Kills an end once no panel is halved any more, though some
    neighbour of the mass was not looked at yet: nothing is then left below −40.
    """
    posterior = ou_posterior(series_with_a_ridge(), 0.1, exact=True, prior_sd=20)
    points = torch.tensor([-60.0, -40.0])
    below = posterior.probability_below("log_theta3", points)
    assert below[1] > 0.004
    expected = Normal(0.0, 20.0).cdf(points)
    close(below[0] / below[1], expected[0] / expected[1], 1e-3)


def test_ridge_of_white_noise_is_followed_to_its_end():
    """log θ3 ≈ log θ1/2 + constant. At large θ1 the model is white noise, whatever θ1 is."""
    y = 5 + 2 * torch.randn(40)
    posterior = ou_posterior(y, 0.1, exact=True, x0=5.0)
    assert float(posterior.quantile("log_theta1", 0.975)) > 15
    assert float(posterior.correlation[0, 2]) > 0.98
    ratio = posterior.marginal("log_theta1", torch.tensor([15.0, 20.0])).log().diff()
    # Along the ridge only the priors of both parameters act; v moves by 2.5 when u moves by 5.
    at = posterior.mean[2] + (torch.tensor([15.0, 20.0]) - posterior.mean[0]) / 2
    prior = Normal(0.0, 10.0)
    expected = (prior.log_prob(torch.tensor([15.0, 20.0])) + prior.log_prob(at)).diff()
    close(ratio, expected, 0.02)


def test_nothing_observed_gives_the_prior_back():
    posterior = ou_posterior(torch.full((4,), math.nan), 0.1, exact=True, prior_sd=2)
    assert abs(posterior.log_evidence) < 1e-8
    close(posterior.mean, torch.zeros(3), 1e-6)
    close(posterior.correlation, torch.eye(3), 1e-6)
    expected = Normal(0.0, 2.0).icdf(LEVELS)
    for name in NAMES:
        close(posterior.quantile(name, LEVELS), expected, 1e-4)
    close(posterior.sd, torch.full((3,), 2.0), 1e-5)


def test_missing_and_irregular_times_agree():
    """Leaving out a time and marking it as missing are the same."""
    gap, y = torch.tensor([0.1, 0.3, 0.1]), torch.tensor([19.0, 17.0, 17.5])
    filled = torch.tensor([19.0, math.nan, math.nan, 17.0, 17.5])
    one = ou_posterior(y, gap, exact=True, prior_sd=1.0)
    other = ou_posterior(filled, 0.1, exact=True, prior_sd=1.0)
    assert abs(one.log_evidence - other.log_evidence) < 1e-9
    close(one.mean, other.mean, 1e-9)


def test_shapes_follow_the_question(short):
    assert isinstance(short, QuadraturePosterior)
    assert short.weights.shape == (len(short.grid_log_theta1), len(short.grid_log_theta3))
    close(short.weights.sum(), 1.0, 1e-12)
    for name in NAMES:
        assert short.quantile(name, 0.5).shape == ()
        assert short.probability_below(name, torch.zeros(2, 3)).shape == (2, 3)
        assert short.marginal(name, torch.zeros(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("border", [0.0, -5.0, 2.5])
def test_a_narrow_posterior_across_a_border_of_panels_is_whole(monkeypatch, border):
    """Normals of sd 0.076 and 0.02, as of 20,000 readings, 1.7 sd below a border of first panels.

    Kills a wide panel whose nodes all lie beyond what its narrow neighbour leaves over: the 95 %
    quantile of log θ3 was 0.3 sd off.
    """
    mean, sd = torch.tensor([border - 0.13, border - 0.0344]), torch.tensor([0.076, 0.02])
    mean, sd = mean.double(), sd.double()

    def evaluate(model, rows, columns, missing):
        (u, v), cells = (panels.nodes(part)[0] for part in (rows, columns)), missing.nonzero().T
        u, v = u[cells[0]][:, :, None], v[cells[1]][:, None, :]
        value = -0.5 * (((u - mean[0]) / sd[0]).square() + ((v - mean[1]) / sd[1]).square())
        return torch.stack([value, torch.zeros_like(value), torch.ones_like(value)], 1)

    monkeypatch.setattr(quadrature, "_evaluate", evaluate)
    posterior = ou_posterior(torch.zeros(1), 0.1, exact=True)
    assert posterior.log_evidence == pytest.approx(math.log(2 * math.pi * 0.076 * 0.02), abs=1e-6)
    for k, name in ((0, "log_theta1"), (1, "log_theta3")):
        z = (posterior.quantile(name, LEVELS) - mean[k]) / sd[k]
        close(z, torch.special.ndtri(LEVELS), 1e-4)


def test_panels_integrate_a_polynomial_exactly():
    """Kills: Legendre coefficients or their integrals off by a factor."""
    intervals = torch.tensor([[0.0, 0.5], [0.5, 2.0]])
    x, w = panels.nodes(intervals)
    c = panels.coefficients(intervals, (w * x**7).flatten())
    points = torch.tensor([-1.0, 0.0, 0.3, 0.5, 1.7, 2.5])
    close(panels.density(intervals, c, points), [0, 0, 0.3**7, 0.5**7, 1.7**7, 0], 1e-10)
    expected = [0, 0, 0.3**8 / 8, 0.5**8 / 8, 1.7**8 / 8, 2**8 / 8]
    close(panels.cumulative(intervals, c, points), expected, 1e-10)


def test_refine_halves_and_remembers():
    intervals = torch.tensor([[0.0, 1.0], [1.0, 2.0], [4.0, 8.0]])
    refined, source, same = panels.refine(intervals, torch.tensor([False, True, True]))
    assert refined.tolist() == [[0.0, 1.0], [1.0, 1.5], [1.5, 2.0], [4.0, 6.0], [6.0, 8.0]]
    assert source.tolist() == [0, 1, 1, 2, 2]
    assert same.tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("prior_sd", [0.0, -1.0, math.nan, math.inf])
def test_prior_must_be_proper(prior_sd):
    with pytest.raises(ValueError, match="prior_sd must be positive and finite; got"):
        ou_posterior(torch.tensor(SHORT), 0.1, exact=True, prior_sd=prior_sd)


def test_unknown_names_and_levels_are_refused(short):
    for call in (short.quantile, short.marginal, short.probability_below):
        with pytest.raises(ValueError, match="name must be one of log_theta1, .*; got 'theta1'"):
            call("theta1", 0.5)
    with pytest.raises(ValueError, match=r"levels must lie between 0 and 1; got \[0.5, 1.0\]"):
        short.quantile("theta2", torch.tensor([0.5, 1.0]))
