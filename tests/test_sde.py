"""SDEs and the Euler-Maruyama density against closed forms and torch's own distributions."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from lib.probe_sde import check_sde
from lib.sde import SDE, SIR, EulerMaruyama, OrnsteinUhlenbeck, cholesky_unrolled


class Seasonal(SDE):
    """Any number of states, a full β, and everything depends on t, x and θ."""

    theta_names = ("rate", "pull")

    def __init__(self, size):
        self.state_names = tuple(f"x{i}" for i in range(size))

    def drift(self, t, x, theta):
        return theta[..., :1] * torch.sin(t) * x.roll(1, -1) - theta[..., 1:] * x

    def diffusion(self, t, x, theta):
        root = torch.diag_embed(1.5 + torch.cos(t) * x.tanh()) + 0.3 * theta[..., :1, None]
        return root @ root.mT


SDES = {
    "ou": (OrnsteinUhlenbeck(), lambda batch: torch.rand(*batch, 1) * 10),
    "sir": (SIR(), lambda batch: torch.rand(*batch, 2) * 300 + 20),
    **{f"p = {p}": (Seasonal(p), lambda batch, p=p: torch.randn(*batch, p)) for p in range(1, 6)},
}


@pytest.fixture(params=SDES)
def case(request):
    """(sde, x, θ, t) as in training: x (mc, time, p), θ (mc, 1, d), t (time, 1)."""
    sde, states = SDES[request.param]
    theta = torch.rand(4, 1, sde.num_theta) + 0.1
    return sde, states((4, 7)), theta, torch.linspace(0.3, 2.0, 7)[:, None]


def reference(sde, x, theta, t, dt):
    """Law of x_next one (draw, time) at a time, from drift and β only."""
    means, covariances = [], []
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            means.append(x[i, j] + sde.drift(t[j], x[i, j], theta[i, 0]) * dt)
            covariances.append(sde.diffusion(t[j], x[i, j], theta[i, 0]) * dt)
    shape = x.shape[:2]
    return MultivariateNormal(
        torch.stack(means).unflatten(0, shape), torch.stack(covariances).unflatten(0, shape)
    )


def test_sir_step_matches_reference_numbers():
    """R9, computed by hand and by an independent program."""
    sde, theta, t = SIR(), torch.tensor([0.002, 0.5]), torch.zeros(1)
    x = torch.tensor([762.0, 1.0])
    torch.testing.assert_close(sde.drift(t, x, theta), torch.tensor([-1.524, 1.024]))
    beta = sde.diffusion(t, x, theta)
    torch.testing.assert_close(beta, torch.tensor([[1.524, -1.524], [-1.524, 2.024]]))
    torch.testing.assert_close(torch.linalg.det(beta), torch.tensor(0.762))
    log_prob = EulerMaruyama(sde, 0.1).log_prob(x + torch.tensor([-1.0, 0.5]), x, theta, t)
    assert log_prob.item() == pytest.approx(-3.781428, abs=1e-6)


def test_ou_step_is_the_normal_density():
    theta, t, x = torch.tensor([0.2, 5.0, 1.5]), torch.zeros(1), torch.tensor([20.0])
    log_prob = EulerMaruyama(OrnsteinUhlenbeck(), 0.1).log_prob(x - 0.5, x, theta, t)
    variance, residual = 1.5**2 * 0.1, -0.5 + 0.2 * 15 * 0.1
    expected = -0.5 * (residual**2 / variance + math.log(2 * math.pi * variance))
    assert log_prob.item() == pytest.approx(expected, abs=1e-12)


def test_log_prob_matches_multivariate_normal(case):
    sde, x, theta, t = case
    law = reference(sde, x, theta, t, dt=0.13)
    x_next = law.sample()
    log_prob = EulerMaruyama(sde, 0.13).log_prob(x_next, x, theta, t)
    torch.testing.assert_close(log_prob, law.log_prob(x_next))


def test_sample_has_the_mean_and_factor_of_the_law(case):
    """Noise 0 gives the mean; unit noises give the columns of a root of β·dt."""
    sde, x, theta, t = case
    step, law = EulerMaruyama(sde, 0.13), reference(sde, x, theta, t, dt=0.13)
    mean = step.sample(x, theta, t, torch.zeros_like(x))
    torch.testing.assert_close(mean, law.mean)
    columns = [step.sample(x, theta, t, e.expand_as(x)) - mean for e in torch.eye(x.shape[-1])]
    root = torch.stack(columns, -1)
    torch.testing.assert_close(root @ root.mT, law.covariance_matrix)


def test_log_prob_of_a_sample_is_that_of_its_noise(case):
    sde, x, theta, t = case
    step, noise = EulerMaruyama(sde, 0.13), torch.randn_like(x)
    log_det = reference(sde, x, theta, t, dt=0.13).scale_tril.diagonal(dim1=-2, dim2=-1).log()
    expected = -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1) - log_det.sum(-1)
    log_prob = step.log_prob(step.sample(x, theta, t, noise), x, theta, t)
    torch.testing.assert_close(log_prob, expected)


def test_log_prob_has_the_gradient_of_finite_differences(case):
    sde, x, theta, t = case
    x, theta = x[:2, :2].requires_grad_(), theta[:2].requires_grad_()
    step = EulerMaruyama(sde, 0.1)
    assert torch.autograd.gradcheck(
        lambda a, b, c: step.log_prob(a, b, c, t[:2]), (x.detach() * 1.01 + 0.1, x, theta)
    )


@pytest.mark.parametrize("name", ["ou", "sir"])
def test_analytic_factor_is_the_cholesky_factor(name):
    sde, states = SDES[name]
    x, theta, t = states((50,)), torch.rand(50, sde.num_theta) + 0.1, torch.zeros(1)
    beta = sde.diffusion(t, x, theta)
    tril = sde.diffusion_tril(t, x, theta)
    torch.testing.assert_close(tril, torch.linalg.cholesky(beta))
    torch.testing.assert_close(SDE.diffusion_tril(sde, t, x, theta), tril)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_unrolled_cholesky_matches_lapack(size):
    root = torch.randn(11, size, size)
    beta = (root @ root.mT + 0.1 * torch.eye(size)).requires_grad_()
    weight = torch.randn(size, size).tril()
    torch.testing.assert_close(cholesky_unrolled(beta), torch.linalg.cholesky(beta))
    ours, lapack = (
        torch.autograd.grad((f(beta) * weight).sum(), beta)[0]
        for f in (cholesky_unrolled, torch.linalg.cholesky)
    )
    # LAPACK's gradient is symmetric; the unrolled one reads the lower triangle only.
    torch.testing.assert_close(0.5 * (ours + ours.mT), lapack)


def test_unrolled_cholesky_is_nan_where_not_positive_definite():
    beta = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.5], [0.5, 1.0]]])
    assert cholesky_unrolled(beta).isnan().any((-2, -1)).tolist() == [True, False]


@pytest.mark.parametrize("shapes", [((2,), (6, 2)), ((6, 2), (2,)), ((4, 1, 2), (6, 2))])
def test_arguments_broadcast_together(shapes):
    x, theta = torch.rand(shapes[0]) + 5, torch.rand(shapes[1]) + 0.1
    step, t = EulerMaruyama(SIR(), 0.1), torch.zeros(1)
    batch = torch.broadcast_shapes(shapes[0][:-1], shapes[1][:-1])
    full = step.log_prob(x + 0.1, x.expand(*batch, 2), theta.expand(*batch, 2), t.expand(*batch, 1))
    torch.testing.assert_close(step.log_prob(x + 0.1, x, theta, t), full)
    assert full.shape == batch


def test_constant_diffusion_and_scalar_entries_broadcast():
    """A user may stack θ with x, or return one matrix for all."""

    class Drifted(SDE):
        state_names, theta_names = ("a", "b"), ("rate",)

        def drift(self, t, x, theta):
            return torch.stack([theta[..., 0], t[..., 0] * x[..., 1]], -1)

        def diffusion(self, t, x, theta):
            return torch.tensor([[1.0, 0.2], [0.2, 2.0]])

    sde = Drifted()
    x, theta, t = torch.randn(4, 7, 2), torch.rand(4, 1, 1), torch.linspace(0, 1, 7)[:, None]
    log_prob = EulerMaruyama(sde, 0.1).log_prob(x, x, theta, t)
    torch.testing.assert_close(log_prob, reference(sde, x, theta, t, dt=0.1).log_prob(x))


def test_parameters_behind_the_own_ones_are_not_passed_on():
    """θ may carry σ; an SDE that unpacks θ must still work."""

    class Unpacking(OrnsteinUhlenbeck):
        def drift(self, t, x, theta):
            theta1, theta2, _ = theta.unbind(-1)
            return (theta1 * (theta2 - x[..., 0]))[..., None]

    x, theta, t = torch.rand(5, 1), torch.rand(5, 3), torch.zeros(1)
    step = EulerMaruyama(Unpacking(), 0.1)
    longer = torch.cat([theta, torch.full((5, 1), 7.0)], -1)
    torch.testing.assert_close(step.log_prob(x, x, longer, t), step.log_prob(x, x, theta, t))


def test_simulate_is_the_loop_over_steps():
    sde, t0, dt = Seasonal(3), 0.7, 0.2
    step, noise = EulerMaruyama(sde, dt), torch.randn(6, 9, 3)
    x, theta = torch.randn(6, 3), torch.rand(6, 2)
    path = step.simulate(x, theta, noise, t0)
    assert path.shape == (6, 10, 3)
    for i in range(9):
        torch.testing.assert_close(path[:, i], x)
        t = torch.tensor([t0 + i * dt])
        root = torch.linalg.cholesky(sde.diffusion(t, x, theta) * dt)
        x = x + sde.drift(t, x, theta) * dt + (root @ noise[:, i, :, None])[..., 0]
    torch.testing.assert_close(path[:, 9], x)


def test_simulate_starts_all_paths_from_one_state():
    noise = torch.randn(6, 3, 2)
    path = EulerMaruyama(SIR(), 0.1).simulate(
        torch.tensor([700.0, 50.0]), torch.tensor([0.002, 0.5]), noise
    )
    assert path.shape == (6, 4, 2)
    assert (path[:, 0] == torch.tensor([700.0, 50.0])).all()


@pytest.mark.parametrize("tiny", [1e-15, 1e-8])
def test_sir_log_density_holds_at_tiny_states_in_single_precision(tiny):
    """Kills the root of θ1 S I taken in one piece: that product is below the smallest float32."""
    step, values = EulerMaruyama(SIR(), 0.1), []
    for dtype in (torch.float32, torch.float64):
        x = torch.full((2,), tiny, dtype=dtype, requires_grad=True)
        theta = torch.tensor([1e-13, 1e-3], dtype=dtype, requires_grad=True)
        log_prob = step.log_prob(x, x, theta, torch.zeros(1, dtype=dtype))
        log_prob.backward()
        values.append(log_prob.item())
        assert x.grad.isfinite().all() and theta.grad.isfinite().all()
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize(
    ("positive", "expected"),
    [
        (True, [True, False, False, False]),
        (("b",), [True, True, False, False]),
        (False, [True, True, True, True]),
    ],
)
def test_alive_looks_at_the_positive_components(positive, expected):
    sde = SDE()
    sde.state_names, sde.positive_state = ("a", "b"), positive
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, 0.0], [1.0, math.nan]])
    assert sde.alive(x).tolist() == expected


def test_r0_is_population_times_the_ratio_of_rates():
    theta = torch.tensor([[0.002, 0.5], [0.003, 1.0]])
    torch.testing.assert_close(SIR(100).r0(theta), torch.tensor([0.4, 0.3]))


@pytest.mark.parametrize("dt", [0, -0.1, math.nan, math.inf])
def test_step_must_be_positive(dt):
    with pytest.raises(ValueError, match=r"dt must be positive and finite; got .*grid step"):
        EulerMaruyama(SIR(), dt)


def test_population_must_be_positive():
    with pytest.raises(ValueError, match=r"population must be positive and finite; got 0"):
        SIR(0)


@pytest.mark.parametrize("name", ["drift", "diffusion"])
def test_an_unwritten_function_is_named(name):
    class Unwritten(SDE):
        state_names, theta_names = ("x",), ("a",)

    with pytest.raises(NotImplementedError, match=rf"Unwritten must define {name}\(self, t, x"):
        getattr(Unwritten(), name)(torch.zeros(1), torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("name", ["drift", "diffusion"])
def test_the_door_says_in_one_sentence_that_a_function_is_unwritten(name):
    """Kills a message that tells how to index in a function that is not there."""
    sde = type("Mine", (Seasonal,), {name: getattr(SDE, name)})(1)
    words = rf"^{name} of Mine must be written; got none. Mine must define {name}\(.*p\)\.$"
    with pytest.raises(ValueError, match=words):
        check_sde(sde, torch.ones(70, sde.num_theta), torch.ones(70, sde.num_states))


@pytest.mark.parametrize("name", ["drift", "diffusion"])
def test_arguments_in_another_order_are_refused(name):
    """x before t, as other solvers have it. Kills t in the place of x, which fits every shape."""

    class Mine(SDE):
        state_names, theta_names = ("x",), ("a",)

        def drift(self, t, x, theta):
            return theta * x

        def diffusion(self, t, x, theta):
            return (theta * x).exp()[..., None]

    theta, x0 = torch.ones(70, 1), torch.ones(70, 1)
    check_sde(Mine(), theta, x0)
    right = getattr(Mine, name)
    setattr(Mine, name, lambda self, x, t, theta: right(self, t, x, theta))
    words = rf"{name} of Mine must take \(t, x, theta\) in that order; got \(x, t, theta\)"
    with pytest.raises(ValueError, match=words):
        check_sde(Mine(), theta, x0)
    # Names of the reader's own say nothing of the order.
    setattr(Mine, name, lambda self, time, state, p: right(self, time, state, p))
    check_sde(Mine(), theta, x0)
