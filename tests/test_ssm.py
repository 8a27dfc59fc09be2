"""State-space model: the joint density against a slow independent loop, draws, and the door."""

import copy
import math

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    ExpTransform,
    Gamma,
    HalfNormal,
    Independent,
    LogNormal,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
)

from lib.data import Observations
from lib.sde import SDE, SIR, OrnsteinUhlenbeck
from lib.ssm import GaussianObservation, StateSpaceModel

NAN = math.nan


class Pair(SDE):
    """Two states, one of them positive, with everything depending on time."""

    state_names, theta_names = ("level", "size"), ("pull", "noise")
    positive_theta, positive_state = ("noise",), ("size",)

    def drift(self, t, x, theta):
        level, size = x.unbind(-1)
        return torch.stack([theta[..., 0] * size - level, torch.sin(t[..., 0]) + level], -1)

    def diffusion(self, t, x, theta):
        variance = theta[..., 1].square() * (1 + t[..., 0]) * x[..., 1]
        rows = [torch.stack([variance, 0.3 * variance], -1), torch.stack([0.3 * variance] * 2, -1)]
        return torch.stack(rows, -2)


def ou_model(prior=None, x0=(20.0,), sigma=1.0):
    prior = prior or normal(3, sd=10.0)
    return StateSpaceModel(OrnsteinUhlenbeck(), GaussianObservation([[1.0]], sigma), prior, x0)


def sir_model(sigma="sigma", d=3, x0=(762.0, 1.0)):
    observation = GaussianObservation([[0.0], [1.0]], sigma)
    return StateSpaceModel(SIR(), observation, normal(d, sd=3.0), x0)


def pair_model(sigma=("first", 0.7), prior=None, x0=None, d=3):
    """Two observed mixtures of two states; x_0 half known."""
    F = [[1.0, 0.5], [0.0, 2.0]]
    prior = prior or MultivariateNormal(torch.zeros(d), torch.eye(d) + 0.3)
    x0 = x0 or {"level": 0.4, "size": LogNormal(torch.tensor(0.2), torch.tensor(0.5))}
    return StateSpaceModel(Pair(), GaussianObservation(F, sigma), prior, x0)


def pair_data():
    """At t_0, with gaps, and with one of the two components missing."""
    y = [[0.3, NAN], [1.0, 2.0], [NAN, NAN], [NAN, 1.5]]
    return Observations([1.0, 1.2, 1.5, 1.7], y, dt=0.1, t0=1.0)


def normal(d, sd=1.0):
    return Normal(torch.zeros(d), sd * torch.ones(d))


# Made when asked for, so that a model that is refused fails its own test.
CASES = {
    "ou": lambda: (ou_model(), Observations([0.1, 0.4], [19.0, 18.5], dt=0.1)),
    "ou, x0 and sigma unknown": lambda: (
        ou_model(normal(4), Normal(torch.tensor([20.0]), 2.0), "sd"),
        Observations([0.0, 0.4], [19.0, 18.5], dt=0.1),
    ),
    "sir": lambda: (sir_model(), Observations([1.0, 2.0], [3.0, 8.0], dt=0.25)),
    "pair, x0 half known": lambda: (pair_model(), pair_data()),
    "pair, x0 joint": lambda: (
        pair_model(x0=MultivariateNormal(torch.ones(2), 0.2 * torch.eye(2))),
        pair_data(),
    ),
    "pair, sigma twice one name": lambda: (pair_model(("noise", "noise"), normal(2)), pair_data()),
    "pair, sigma a function": lambda: (
        pair_model(lambda named: 0.1 + named["noise"], normal(2)),
        pair_data(),
    ),
}
SIGMAS = {
    "ou": lambda theta: [1.0],
    "ou, x0 and sigma unknown": lambda theta: [theta[3]],
    "sir": lambda theta: [theta[2]],
    "pair, x0 half known": lambda theta: [theta[2], 0.7],
    "pair, x0 joint": lambda theta: [theta[2], 0.7],
    "pair, sigma twice one name": lambda theta: [theta[1], theta[1]],
    "pair, sigma a function": lambda theta: [0.1 + theta[1]] * 2,
}
LOG_X0 = {
    "ou, x0 and sigma unknown": lambda x0: Normal(20.0, 2.0).log_prob(x0[0]),
    "pair, x0 half known": lambda x0: LogNormal(0.2, 0.5).log_prob(x0[1]),
    "pair, x0 joint": lambda x0: Normal(1.0, 0.2**0.5).log_prob(x0).sum(),
}
LOG_X0["pair, sigma twice one name"] = LOG_X0["pair, x0 half known"]
LOG_X0["pair, sigma a function"] = LOG_X0["pair, x0 half known"]


def draws(model, observations, mc=3):
    """ϑ and a path of positive values near x_0, one per draw."""
    vartheta = 0.5 * torch.randn(mc, model.num_theta)
    steps = 0.1 * torch.rand(mc, observations.num_steps + 1, model.num_states)
    return vartheta, model.sample_x0(mc, seed=1)[:, None].abs() + steps.cumsum(1)


def slow_terms(name, model, observations, vartheta, x):
    """One draw's terms from the definitions: loops, torch distributions, raw rows with NaN."""
    positive = [s in model.sde.positive_theta or s in ("sd", "sigma", "first")
                for s in model.theta_names]  # fmt: skip
    theta = torch.stack([v.exp() if p else v for v, p in zip(vartheta, positive, strict=True)])
    own = theta[: model.sde.num_theta]
    log_x0 = LOG_X0[name](x[0]) if name in LOG_X0 else torch.tensor(0.0)
    transition = torch.tensor(0.0)
    for i in range(1, len(x)):
        t = torch.tensor([observations.t0 + (i - 1) * observations.dt])
        mean = x[i - 1] + model.sde.drift(t, x[i - 1], own) * observations.dt
        beta = model.sde.diffusion(t, x[i - 1], own)
        transition += MultivariateNormal(mean, beta * observations.dt).log_prob(x[i])
    observation = torch.tensor(0.0)
    for time, row in zip(observations.times, observations.y, strict=True):
        i = round((time.item() - observations.t0) / observations.dt)
        mean = model.observation.F.T @ x[i]
        for j, sigma in enumerate(SIGMAS[name](theta)):
            if not row[j].isnan():
                observation += Normal(mean[j], sigma).log_prob(row[j])
    return log_x0, transition, observation


@pytest.mark.parametrize("name", CASES)
def test_log_joint_matches_a_slow_loop(name):
    """Observations at t_0, gaps, missing components, fixed, random and mixed x_0."""
    model, observations = CASES[name]()
    vartheta, x = draws(model, observations)
    terms = model.log_joint(vartheta, x, observations.grid())
    for k in range(len(x)):
        expected = slow_terms(name, model, observations, vartheta[k], x[k])
        found = (terms.log_x0[k], terms.log_transition[k], terms.log_observation[k])
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(terms.log_prior, model.log_prior(vartheta))
    torch.testing.assert_close(terms.total, sum(terms))


def test_path_integrates_out_to_the_reference_likelihood():
    """R6: log_joint is quadratic in the path of OU, so its integral over x_1..x_3 is exact."""
    model = ou_model()
    grid = Observations([0.1, 0.2, 0.3], [19.5, 18.9, 19.2], dt=0.1).grid()
    vartheta = model.to_vartheta(torch.tensor([[0.2, 5.0, 1.0]]))

    def log_density(path):
        x = torch.cat([torch.tensor([20.0]), path])[None, :, None]
        terms = model.log_joint(vartheta, x, grid)
        return (terms.total - terms.log_prior)[0]

    start = torch.full((3,), 19.0, requires_grad=True)
    precision = -torch.autograd.functional.hessian(log_density, start)
    gradient = torch.autograd.grad(log_density(start), start)[0]
    peak = log_density(start.detach() + torch.linalg.solve(precision, gradient))
    evidence = peak + 1.5 * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)
    assert evidence.item() == pytest.approx(-3.133279, abs=1e-6)


PRIORS = {
    "normal": Normal(torch.zeros(3), 2.0 * torch.ones(3)),
    "independent": Independent(Normal(torch.zeros(3), 2.0 * torch.ones(3)), 1),
    "multivariate": MultivariateNormal(torch.zeros(3), 4.0 * torch.eye(3)),
    "transformed": TransformedDistribution(
        Normal(torch.zeros(3), torch.ones(3)),
        AffineTransform(torch.zeros(3), torch.full((3,), 2.0, dtype=torch.float64)),
    ),
    "inverse transform": TransformedDistribution(
        LogNormal(torch.zeros(3), 2.0 * torch.ones(3)), ExpTransform().inv
    ),
    "dict": {"theta1": LogNormal(0.0, 2.0), "theta2": Normal(0.0, 2.0),
             "theta3": LogNormal(0.0, 2.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", PRIORS)
def test_all_spellings_of_one_prior_agree(name):
    """N(0, 2²) on ϑ; a log-normal prior on θ is that after exactly one Jacobian."""
    vartheta = torch.randn(7, 3) * 3
    expected = Normal(0.0, 2.0).log_prob(vartheta).sum(-1)
    torch.testing.assert_close(ou_model(PRIORS[name]).log_prior(vartheta), expected)
    torch.testing.assert_close(ou_model(PRIORS[name]).log_prior(vartheta[0]), expected[0])


@pytest.mark.parametrize(
    "prior", [LogNormal(0.3, 0.5), Gamma(2.0, 3.0), HalfNormal(2.0), Gamma(0.7, 0.2)]
)
def test_natural_prior_integrates_to_one_over_vartheta(prior):
    """Quadrature: a Jacobian that is missing or doubled gives another number."""

    class OnePositive(OrnsteinUhlenbeck):
        theta_names = positive_theta = ("scale",)

        def drift(self, t, x, theta):
            return -x

        diffusion_tril = SDE.diffusion_tril

        def diffusion(self, t, x, theta):
            return theta[..., None].square()

    observation = GaussianObservation([[1.0]], 1.0)
    model = StateSpaceModel(OnePositive(), observation, {"scale": prior}, [1.0])
    vartheta = torch.linspace(-60.0, 10.0, 70001)[:, None]
    mass = torch.trapezoid(model.log_prior(vartheta).exp(), vartheta[:, 0])
    assert mass.item() == pytest.approx(1.0, abs=1e-6)


def test_natural_prior_draws_have_its_moments():
    """10⁵ draws, 5 standard errors; kills a draw that is not brought to the unconstrained scale."""
    model = ou_model(
        {"theta1": Gamma(4.0, 2.0), "theta2": Normal(3.0, 1.0), "theta3": LogNormal(0.0, 0.3)}
    )
    vartheta = model.sample_prior(100_000, seed=3)
    assert vartheta.dtype == torch.float64 and vartheta.shape == (100_000, 3)
    theta = model.to_theta(vartheta)
    expected = torch.tensor([2.0, 3.0, math.exp(0.045)])
    assert ((theta.mean(0) - expected).abs() < 5 * theta.std(0) / 100_000**0.5).all()


def test_only_positive_parameters_are_logarithms():
    model = ou_model()
    vartheta = torch.tensor([[0.5, -2.0, -1.0]])
    theta = torch.tensor([[math.exp(0.5), -2.0, math.exp(-1.0)]])
    torch.testing.assert_close(model.to_theta(vartheta), theta)
    torch.testing.assert_close(model.to_vartheta(theta), vartheta)
    assert model.bounds.low.tolist() == [0.0, -math.inf, 0.0] and model.bounds.high.isinf().all()


def test_a_large_real_parameter_has_a_finite_gradient():
    """exp of it would be inf, and its masked gradient NaN."""
    vartheta = torch.tensor([[0.0, 1e4, 0.0]], requires_grad=True)
    ou_model().to_theta(vartheta).sum().backward()
    assert vartheta.grad.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("name", CASES)
def test_missing_cells_never_matter(name):
    """Gradients are finite, and the number in a missing cell changes neither value nor gradient.

    Kills a mask after the density alone: in single precision the square of 1e30 is inf.
    """
    model, observations = CASES[name]()
    grid = observations.grid(torch.float32)
    noisy = grid._replace(y=torch.where(grid.observed > 0, grid.y, 1e30))
    vartheta, x = (part.float().requires_grad_() for part in draws(model, observations))
    results = []
    for g in (grid, noisy):
        total = model.to(torch.float32).log_joint(vartheta, x, g).total
        results.append((total, *torch.autograd.grad(total.sum(), (vartheta, x))))
    for clean, other in zip(*results, strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(clean, other, rtol=0, atol=0)


def test_names_of_sigma_are_appended_as_positive_parameters():
    model = sir_model()
    assert model.theta_names == ("theta1", "theta2", "sigma")
    assert model.bounds.low.tolist() == [0.0, 0.0, 0.0]
    assert (model.num_theta, model.num_states, model.num_observed) == (3, 2, 1)
    assert pair_model(("b", "a"), d=4).theta_names == ("pull", "noise", "b", "a")
    known = StateSpaceModel(Pair(), GaussianObservation([[1.0], [0.0]], "noise"),
                            Normal(torch.zeros(2), torch.ones(2)), [0.0, 1.0])  # fmt: skip
    assert known.theta_names == ("pull", "noise")


def test_a_state_and_a_parameter_of_one_name_are_refused():
    """Also one that σ names. Kills a name that tables and InferenceData cannot tell apart."""

    class Echo(OrnsteinUhlenbeck):
        state_names = ("theta2",)

    prior, sentence = Normal(torch.zeros(3), 1.0), "must not share a name; got "
    observation = GaussianObservation([[1.0]], 1.0)
    with pytest.raises(ValueError, match=sentence + r"\['theta2'\]\. Rename one"):
        StateSpaceModel(Echo(), observation, prior, [20.0])
    observation = GaussianObservation([[1.0]], "x")
    prior = Normal(torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match=sentence + r"\['x'\]"):
        StateSpaceModel(OrnsteinUhlenbeck(), observation, prior, [20.0])


def test_named_has_one_column_each():
    theta = torch.rand(5, 1, 3)
    named = sir_model().named(theta)
    assert list(named) == ["theta1", "theta2", "sigma"]
    torch.testing.assert_close(named["sigma"], theta[..., 2:])


def test_observation_sample_is_mean_plus_scaled_noise():
    model = pair_model()
    x, noise = torch.rand(6, 2), torch.randn(6, 2)
    named = model.named(torch.tensor([[1.0, 1.0, 3.0]]).expand(6, 3))
    y = model.observation.sample(x, named, noise)
    expected = torch.stack([x[:, 0] + 3 * noise[:, 0],
                            0.5 * x[:, 0] + 2 * x[:, 1] + 0.7 * noise[:, 1]], -1)  # fmt: skip
    torch.testing.assert_close(y, expected)


def test_x0_is_described_by_component():
    model = pair_model()
    assert model.x0_random and model.x0_fixed.tolist() == [True, False]
    assert model.x0_value.tolist() == [0.4, 0.0]
    x0 = model.sample_x0(50_000, seed=1)
    assert (x0[:, 0] == 0.4).all()
    assert x0[:, 1].log().mean().item() == pytest.approx(0.2, abs=0.02)
    fixed = pair_model(x0={"level": 0.4, "size": 2})
    assert not fixed.x0_random and fixed.x0_value.tolist() == [0.4, 2.0]
    assert fixed.log_x0(torch.rand(3, 5, 2)).tolist() == [[0.0] * 5] * 3


def test_simulate_follows_each_parameter_draw_and_reports_the_dead():
    theta = torch.tensor([[0.002, 0.5, 10.0], [0.002, 200.0, 10.0]]).repeat(2000, 1)
    x, alive = sir_model().simulate(theta, num_steps=20, dt=0.1, seed=4)
    assert x.shape == (4000, 21, 2) and (x[:, 0] == torch.tensor([762.0, 1.0])).all()
    assert (x[alive] > 0).all() and x[alive].isfinite().all()
    assert not ((x > 0).all(-1).all(-1) & ~alive).any()
    assert alive[::2].double().mean() > 0.6 and alive[1::2].double().mean() < 0.01


def test_simulate_has_the_moments_of_the_euler_model():
    """4·10⁴ draws, 5 standard errors; kills a dropped sqrt(dt) and a shared noise."""
    theta = torch.tensor([[0.5, 5.0, 1.5]]).expand(40_000, 3)
    x, alive = ou_model().simulate(theta, num_steps=30, dt=0.1, seed=2)
    phi = 1 - 0.5 * 0.1
    mean = 5 + 15 * phi**30
    variance = 1.5**2 * 0.1 * (1 - phi**60) / (1 - phi**2)
    assert alive.all()
    assert abs(x[:, -1].mean() - mean) < 5 * (variance / 40_000) ** 0.5
    assert abs(x[:, -1].var() - variance) < 5 * variance * (2 / 40_000) ** 0.5


def test_simulate_passes_the_time_of_each_step():
    class Clock(OrnsteinUhlenbeck):
        def drift(self, t, x, theta):
            return t

    model = StateSpaceModel(
        Clock(), GaussianObservation([[1.0]], 1.0), Normal(torch.zeros(3), torch.ones(3)), [0.0]
    )
    x = model.simulate(torch.tensor([[1.0, 1.0, 1e-9]]), num_steps=3, dt=0.5, seed=0, t0=2.0).x
    torch.testing.assert_close(x[0, :, 0], torch.tensor([0.0, 1.0, 2.25, 3.75]), atol=1e-6, rtol=0)


def test_an_exploding_path_is_dead():
    theta = torch.tensor([[1e6, 0.0, 1.0]])
    assert not ou_model().simulate(theta, num_steps=200, dt=1.0, seed=0).alive.any()


def test_seeds_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    model = pair_model()
    theta = model.to_theta(model.sample_prior(4, seed=5))
    model.sample_x0(4, seed=5)
    model.simulate(theta, num_steps=3, dt=0.1, seed=5)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_repeat_draws_and_kinds_of_draw_are_independent():
    """With one seed for all, the prior's normals must not come back as the noise of the paths."""
    model = ou_model(Normal(torch.zeros(3), torch.ones(3)), Normal(torch.zeros(1), torch.ones(1)))
    first = model.sample_prior(1000, seed=5)
    torch.testing.assert_close(first, model.sample_prior(1000, seed=5), rtol=0, atol=0)
    assert not torch.allclose(first, model.sample_prior(1000, seed=6))
    x = model.simulate(torch.tensor([[1e-9, 0.0, 1.0]]).expand(1000, 3), 2, 1.0, seed=5).x
    kinds = [first, x[:, 0], x.diff(dim=1)]
    together = torch.corrcoef(torch.stack([kind.flatten()[:1000] for kind in kinds]))
    assert (together - torch.eye(3)).abs().max() < 5 / 1000**0.5


@pytest.mark.parametrize("name", PRIORS)
def test_single_precision_copy_computes_in_single_precision(name):
    model, observations = ou_model(PRIORS[name], Normal(torch.tensor([3.0]), 0.2)), CASES["ou"]()[1]
    vartheta, x = draws(model, observations)
    single = model.to(torch.float32)
    terms = single.log_joint(vartheta.float(), x.float(), observations.grid(torch.float32))
    assert {term.dtype for term in terms} == {torch.float32}
    expected = model.log_joint(vartheta, x, observations.grid())
    torch.testing.assert_close(terms.total.double(), expected.total, rtol=1e-5, atol=1e-4)
    assert model.x0_value.dtype == torch.float64
    # Draws do not depend on the precision or the device of the copy.
    torch.testing.assert_close(single.sample_prior(5, 0), model.sample_prior(5, 0))


def test_tensors_of_the_sde_move_along():
    class Table(OrnsteinUhlenbeck):
        level = torch.tensor(5.0, dtype=torch.float64)

        def __init__(self):
            self.rates = {"a": [torch.ones(1, dtype=torch.float64)], "steps": torch.arange(3)}

    model = StateSpaceModel(Table(), GaussianObservation([[1.0]], 1.0), PRIORS["normal"], [1.0])
    moved = model.to(torch.float32)
    assert moved.sde.level.dtype == moved.sde.rates["a"][0].dtype == torch.float32
    assert moved.sde.rates["steps"].dtype == torch.int64
    assert model.sde.level.dtype == Table.level.dtype == torch.float64


def test_no_gradient_flows_back_into_a_prior():
    """Kills a model that fits but cannot be copied, and a graph through the prior in each step."""
    loc = torch.zeros(3, requires_grad=True)
    model = ou_model(Normal(loc, 1.0), Normal(loc[:1], 1.0))
    assert not copy.deepcopy(model).log_prior(torch.zeros(2, 3)).requires_grad
    assert not model.sample_x0(2, seed=0).requires_grad and loc.requires_grad


def test_a_prior_is_copied_not_changed():
    prior = Normal(torch.zeros(3), torch.ones(3), validate_args=True)
    model = ou_model(prior)
    assert prior._validate_args
    prior.loc += 100.0
    assert model.log_prior(torch.zeros(1, 3)).item() == pytest.approx(-1.5 * math.log(2 * math.pi))


def test_models_can_be_copied():
    model = pair_model()
    vartheta = torch.randn(2, 3)
    torch.testing.assert_close(copy.deepcopy(model).log_prior(vartheta), model.log_prior(vartheta))


@pytest.mark.compiled
def test_log_joint_has_no_graph_break():
    """The engine captures it: no look at a value, no change of shape."""
    model, observations = CASES["pair, x0 half known"]()
    vartheta, x = draws(model, observations)
    grid = observations.grid()
    step = torch.compile(
        lambda v, p: model.log_joint(v, p, grid).total, backend="eager", fullgraph=True
    )
    torch.testing.assert_close(step(vartheta, x), model.log_joint(vartheta, x, grid).total)


def test_observations_must_have_the_columns_of_F():
    model, observations = CASES["ou"]()
    vartheta, x = draws(model, observations)
    grid = Observations([0.1, 0.4], [[1.0, 2.0]] * 2, dt=0.1).grid()
    with pytest.raises(ValueError, match=r"one column for each column of F, 1; got 2"):
        model.log_joint(vartheta, x, grid)


def test_huge_prior_draws_do_not_refuse_a_valid_model():
    """With N(0, 300²) on ϑ most draws overflow, or make β singular to rounding."""
    StateSpaceModel(
        SIR(), GaussianObservation([[0.0], [1.0]], 1.0),
        Normal(torch.zeros(2), 300 * torch.ones(2)), [762.0, 1.0],
    )  # fmt: skip
