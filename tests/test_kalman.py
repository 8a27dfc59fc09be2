"""The forward filter against published numbers and the dense joint Gaussian it factorises."""

import json
import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal, Normal
from torch.testing import assert_close

from lib.data import data_path, read_csv
from lib.kalman import LinearGaussian, forward_filter, ou_transition, simulate_linear_gaussian

NAN = math.nan
THETA = (0.2, 5.0, 1.0)
Y = [19.5, 18.9, 19.2]
IRREGULAR = [0.1, 0.2, 0.05]
UNITS = (0.2 / 24, 5.0, 1 / math.sqrt(24))


def filter_ou(y, theta=THETA, dt=0.1, exact=True, x0=20.0, c=0.0, sigma2=1.0, y0=None):
    step = torch.tensor(dt) if isinstance(dt, list) else dt
    transition = ou_transition(torch.as_tensor(theta), step, exact)
    return forward_filter(torch.as_tensor(y), transition, x0, c, sigma2, y0)


def dense(transition, num_steps, a, c):
    """Mean (N+1,) and covariance (N+1, N+1) of x_0..x_N by x = A·(x_0, noise) + offset."""
    phi, b, q = (part.expand(num_steps) for part in transition)
    root = torch.zeros(num_steps + 1, num_steps + 1)
    mean = torch.zeros(num_steps + 1)
    mean[0], root[0, 0] = a, math.sqrt(c)
    for i in range(num_steps):
        mean[i + 1] = phi[i] * mean[i] + b[i]
        root[i + 1] = phi[i] * root[i]
        root[i + 1, i + 1] = q[i].sqrt()
    return mean, root @ root.T


def condition(mean, cov, y, sigma2):
    """log p(y), and mean and covariance of x given y = x + noise where y is not NaN."""
    seen = ~y.isnan()
    noisy = cov[seen][:, seen] + sigma2 * torch.eye(int(seen.sum()))
    log_p = MultivariateNormal(mean[seen], noisy).log_prob(y[seen])
    gain = torch.linalg.solve(noisy, cov[seen]).T
    return log_p, mean + gain @ (y - mean)[seen], cov - gain @ cov[seen]


@pytest.mark.parametrize(
    ("expected", "kwargs"),
    [
        pytest.param(-3.131322, {"y": Y}, id="R1"),
        pytest.param(-2.027964, {"y": [19.5, NAN, 19.2]}, id="R2 missing"),
        pytest.param(-3.106828, {"y": Y, "dt": IRREGULAR}, id="R3 irregular"),
        pytest.param(-3.131322, {"y": Y, "theta": UNITS, "dt": 2.4}, id="R4 other units"),
        pytest.param(-3.724042, {"y": Y, "theta": (1e-12, 5.0, 1.0)}, id="R5 Brownian limit"),
        pytest.param(-3.133279, {"y": Y, "exact": False}, id="R6 Euler"),
        pytest.param(
            -3.131322,
            {"y": [v + 10_000 for v in Y], "theta": (0.2, 10_005.0, 1.0), "x0": 10_020.0},
            id="R7 shifted",
        ),
        pytest.param(0.0, {"y": [NAN] * 3}, id="R8 nothing observed"),
    ],
)
def test_log_likelihood_has_the_reference_value(expected, kwargs):
    """Kills: σ² in the state prior variance, gain 1 (both printed: −3.191155), NaN read as 0."""
    assert_close(filter_ou(**kwargs).log_likelihood, torch.tensor(expected), atol=1e-6, rtol=0)


def test_filtered_law_has_the_reference_values():
    seen, blind = filter_ou(Y), filter_ou([NAN] * 3)
    found = torch.stack([r[..., -1] for r in (*seen[1:], *blind[1:])])
    expected = torch.tensor([19.066793, 0.198205, 19.126468, 0.282699])
    assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("model", ["exact", "euler"])
def test_ou_a_log_likelihoods_match_the_reference_posterior(model):
    reference = json.loads(data_path("reference/ou_a.json").read_text())
    points = reference[model]["log_likelihood_at"]
    vartheta = torch.tensor([point["vartheta"] for point in points])
    theta = torch.stack([vartheta[:, 0].exp(), vartheta[:, 1], vartheta[:, 2].exp()], dim=-1)
    y = read_csv(data_path("ou_a.csv"), dt=0.1).y[:, 0]
    found = filter_ou(y, theta, exact=model == "exact").log_likelihood
    assert_close(found, torch.tensor([p["log_likelihood"] for p in points]), rtol=1e-11, atol=0)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dt", [0.1, [0.3, 0.1, 0.7, 0.2, 0.05, 1.1]], ids=["regular", "irregular"])
@pytest.mark.parametrize("gaps", [[], [0], [2, 3], [5]], ids=str)
@pytest.mark.parametrize(("c", "y0"), [(0.0, None), (0.0, 19.0), (2.0, None), (2.0, 19.0)])
def test_filter_equals_the_dense_joint(exact, dt, gaps, c, y0):
    """Kills: a wrong recursion of means or variances, y_0 left out of likelihood or update."""
    y = torch.tensor([18.0, 19.5, 17.0, 18.5, 16.0, 17.5])
    y[gaps] = NAN
    theta, sigma2 = torch.tensor([0.7, 5.0, 1.3]), 0.6
    result = filter_ou(y, theta, dt, exact, 20.0, c, sigma2, y0)
    step = torch.tensor(dt) if isinstance(dt, list) else dt
    mean, cov = dense(ou_transition(theta, step, exact), 6, 20.0, c)
    full = torch.cat([torch.tensor([NAN if y0 is None else y0]), y])
    assert_close(result.log_likelihood, condition(mean, cov, full, sigma2)[0])
    for i in range(1, 7):
        past = torch.where(torch.arange(7) <= i, full, NAN)
        if past.isnan().all():
            continue
        _, posterior_mean, posterior_cov = condition(mean, cov, past, sigma2)
        assert_close(result.means[i - 1], posterior_mean[i])
        assert_close(result.variances[i - 1], posterior_cov[i, i])


@pytest.mark.parametrize("exact", [True, False])
def test_exact_transition_is_a_semigroup_and_euler_is_not(exact):
    """Kills: Euler and exact confused, and a variance that is off by a factor."""
    theta = torch.tensor(THETA)
    half, whole = ou_transition(theta, 0.5, exact), ou_transition(theta, 1.0, exact)
    phi, b, q = half
    twice = LinearGaussian(phi**2, phi * b + b, phi**2 * q + q)
    for two, one in zip(twice, whole, strict=True):
        assert torch.allclose(two, one, rtol=1e-12) == exact


def test_simulated_path_has_the_dense_joint_law():
    """The path is linear in the noise: its covariance comes out without a draw."""
    transition = ou_transition(torch.tensor(THETA), torch.tensor([0.1, 0.4, 0.2, 1.0]))
    centre = simulate_linear_gaussian(transition, 20.0, torch.zeros(4))
    columns = simulate_linear_gaussian(transition, 20.0, torch.eye(4)) - centre
    mean, cov = dense(transition, 4, 20.0, 0.0)
    assert_close(centre, mean)
    assert_close(columns.T @ columns, cov)


def test_simulation_broadcasts_over_theta_and_x0():
    theta = torch.rand(3, 1, 3) + 0.1
    noise, x0 = torch.randn(5, 7), torch.randn(2, 1, 1)
    paths = simulate_linear_gaussian(ou_transition(theta, 0.1), x0, noise)
    assert paths.shape == (2, 3, 5, 8)
    one = simulate_linear_gaussian(ou_transition(theta[2, 0], 0.1), x0[1, 0, 0], noise[4])
    assert_close(paths[1, 2, 4], one)


def test_batch_of_everything_equals_one_at_a_time():
    theta, y = torch.rand(4, 1, 3) + 0.1, torch.tensor([1.0, NAN, 0.3])
    a, c, sigma2, y0 = torch.randn(3), torch.rand(3), torch.rand(2, 1, 1) + 0.1, torch.randn(3)
    batch = filter_ou(y, theta, IRREGULAR, True, a, c, sigma2, y0)
    assert batch.log_likelihood.shape == (2, 4, 3)
    assert batch.means.shape == batch.variances.shape == (2, 4, 3, 3)
    for i, j, k in [(0, 0, 0), (1, 3, 2), (1, 0, 1)]:
        one = filter_ou(y, theta[j, 0], IRREGULAR, True, a[k], c[k], sigma2[i, 0, 0], y0[k])
        for whole, single in zip(batch, one, strict=True):
            assert_close(whole[i, j, k], single)


def test_float32_input_is_computed_in_float64():
    theta, y = torch.tensor(THETA), torch.tensor(Y)
    single = filter_ou(y.float(), theta.float())
    assert single.log_likelihood.dtype == torch.float64
    assert_close(single.log_likelihood, filter_ou(y.float().double(), theta.float().double())[0])


def test_theta1_may_be_zero_and_its_neighbourhood_is_smooth():
    """Kills: division by θ1, and 1 − exp(−2θ1·dt) by subtraction."""
    theta1 = torch.tensor([0.0, 1e-300, 1e-12, 1e-9, 4.9e-5, 5.1e-5], requires_grad=True)
    theta = torch.stack([theta1, torch.full((6,), 5.0), torch.ones(6)], dim=-1)
    value = filter_ou(Y, theta).log_likelihood
    (slope,) = torch.autograd.grad(value.sum(), theta1)
    assert_close(value[:4], torch.full((4,), -3.724042), atol=1e-6, rtol=0)
    difference = (value[5] - value[4]) / 2e-6
    assert_close(slope[:4], slope[0].expand(4), rtol=1e-6, atol=0)
    assert_close(slope[4:], difference.expand(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("exact", [True, False])
def test_gradient_is_right_and_finite_with_missing_y(exact):
    """Kills: NaN multiplied by a zero mask."""
    y, theta = torch.tensor([19.5, NAN, 19.2, NAN]), torch.tensor(THETA, requires_grad=True)
    c, sigma2 = (torch.tensor(v, requires_grad=True) for v in (0.3, 0.8))

    def value(theta, c, sigma2):
        return tuple(filter_ou(y, theta, 0.3, exact, 20.0, c, sigma2, 20.5))

    assert gradcheck(value, (theta, c, sigma2))


def test_missing_y0_is_the_same_as_none():
    assert_close(filter_ou(Y, c=2.0, y0=NAN), filter_ou(Y, c=2.0))


def test_state_observed_exactly():
    """σ² = 0: the likelihood is the transition density and the filtered law is y itself."""
    result = filter_ou(Y, sigma2=0.0)
    phi, b, q = ou_transition(torch.tensor(THETA), 0.1)
    before = torch.tensor([20.0, *Y[:-1]])
    log_p = Normal(phi * before + b, q.sqrt()).log_prob(torch.tensor(Y)).sum()
    assert_close(result.log_likelihood, log_p)
    assert_close(result.means, torch.tensor(Y))
    assert_close(result.variances, torch.zeros(3))


def test_wildly_unstable_euler_step_still_follows_the_data():
    """Kills: a ← m + K(y − m), which loses y when m is 1e20 and K rounds to 1."""
    result = filter_ou(Y, theta=(1e22, 5.0, 1.0), exact=False, c=1.0)
    assert_close(result.means, torch.tensor(Y))
    assert_close(result.variances, torch.ones(3))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"y": [Y]}, r"y must be \(N,\).*got shape \(1, 3\)"),
        ({"y": []}, r"y must be \(N,\) with N >= 1"),
        ({"y": [1.0, math.inf]}, "y must be finite, or NaN where missing; got inf"),
        ({"y0": math.inf}, "y0 must be finite, or NaN"),
        ({"y0": torch.tensor([1.0, NAN])}, "y0 must be finite, or NaN"),
        ({"theta": (0.2, 5.0)}, "theta must have 3 components .* got size 2"),
        ({"dt": 0.0}, "dt must be positive and finite; got 0.0"),
        ({"dt": NAN}, "dt must be positive and finite; got nan"),
        ({"dt": [[0.1, 0.1, 0.1]]}, r"dt must be one step or \(N,\) steps; got shape \(1, 3\)"),
        ({"dt": [0.1, 0.1]}, r"transition.phi must end in 1 or N = 3 steps; got shape \(2,\)"),
        ({"sigma2": -1.0}, "sigma2 must not be negative; got -1"),
        ({"sigma2": NAN}, "sigma2 must not be negative; got nan"),
        ({"c": -0.5}, "c must not be negative; got -0.5"),
        ({"sigma2": 0.0, "theta": (0.2, 5.0, 0.0)}, "sigma2 must be positive where q = 0"),
        ({"sigma2": 0.0, "y0": 20.0}, "sigma2 must be positive where c = 0 and y0 is given"),
        ({"x0": torch.ones(2), "c": torch.ones(3)}, r"batch sizes must broadcast; .*a \(2,\)"),
    ],
)
def test_refusals_say_rule_and_value(kwargs, message):
    with pytest.raises(ValueError, match=message):
        filter_ou(**{"y": Y, **kwargs})


def test_simulator_refuses_a_transition_of_another_length():
    transition = ou_transition(torch.tensor(THETA), torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="transition.phi must end in 1 or N = 3 steps"):
        simulate_linear_gaussian(transition, 20.0, torch.zeros(3))
