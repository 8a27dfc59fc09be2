"""ELBO = log p(y) − KL(q‖p): named terms, exact Gaussian posteriors, and the compiled step."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import LogNormal, MultivariateNormal, Normal, kl_divergence
from torch.testing import assert_close

from lib.data import Grid, Observations
from lib.elbo import elbo
from lib.family import Family
from lib.kalman import forward_filter, ou_transition
from lib.posterior import Noise, Sample, VariationalPosterior
from lib.sde import SDE, SIR, OrnsteinUhlenbeck
from lib.smoother import part_of
from lib.ssm import GaussianObservation, StateSpaceModel
from lib.start import Start

NAN = math.nan
DT, SIGMA = 0.4, 0.7
ALPHAS = [1.0, 3.5]
# The chain has its F from central differences, which leave some 1e-10 of it.
ROUNDING = {"rtol": 0.0, "atol": 1e-8}


class Linear(SDE):
    """dX = (M X + G θ) dt + sqrt(β) dW: (θ, x, y) is jointly Gaussian."""

    theta_names = ("push", "pull")

    def __init__(self, size: int) -> None:
        self.state_names = ("a", "b")[:size]
        self.M = torch.tensor([[-0.8, 0.5], [-0.3, -0.4]])[:size, :size]
        self.G = torch.tensor([[1.0, 0.0], [-0.5, 2.0]])[:size]
        self.beta = torch.tensor([[1.3, -0.6], [-0.6, 0.9]])[:size, :size]

    def drift(self, t, x, theta):
        return x @ self.M.T + theta @ self.G.T

    def diffusion(self, t, x, theta):
        return self.beta.expand(*x.shape[:-1], -1, -1)


class Problem(NamedTuple):
    """A linear Gaussian model, its data, and the mean and sd of x_0 (sd 0 where it is fixed)."""

    model: StateSpaceModel
    grid: Grid
    x0_mean: Tensor
    x0_sd: Tensor


PRIOR_MEAN, PRIOR_SD = torch.tensor([0.5, -1.0]), torch.tensor([0.8, 1.5])
Y = [[1.0, NAN], [NAN, 3.0], [2.5, -1.0], [NAN, 0.4]]
X0 = {
    "x_0 fixed": ([1.0, -2.0], [0.0, 0.0]),
    "x_0 random": ([1.0, -2.0], [0.6, 1.2]),
    "a fixed": ([1.0, -2.0], [0.0, 1.2]),
    "b fixed": ([1.0, -2.0], [0.6, 0.0]),
}


def problem(size: int, x0: str, rows: int = 4) -> Problem:
    """y_0 is observed, so are parts of y_2, y_3, y_5; F mixes the two states."""
    mean, sd = (torch.tensor(part[:size]).double() for part in X0[x0])
    names = ("a", "b")[:size]
    spec = {
        name: Normal(m, s) if s > 0 else float(m)
        for name, m, s in zip(names, mean, sd, strict=True)
    }
    observation = GaussianObservation(torch.tensor([[1.0, 0.5], [0.0, 2.0]])[:size], SIGMA)
    prior = Normal(PRIOR_MEAN.double(), PRIOR_SD.double())
    grid = Observations([i * DT for i in (0, 2, 3, 5)][:rows], Y[:rows], DT).grid()
    return Problem(StateSpaceModel(Linear(size), observation, prior, spec), grid, mean, sd)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "p = 1, x_0 fixed": lambda: problem(1, "x_0 fixed"),
    "p = 1, x_0 random": lambda: problem(1, "x_0 random"),
    "p = 2, x_0 fixed": lambda: problem(2, "x_0 fixed"),
    "p = 2, x_0 random": lambda: problem(2, "x_0 random"),
    "p = 2, a fixed": lambda: problem(2, "a fixed"),
    "p = 2, b fixed": lambda: problem(2, "b fixed"),
}


class Exact(NamedTuple):
    """log p(y), and p(ϑ, x | y) over ϑ and the free entries of x (time, state), in that order."""

    log_evidence: Tensor
    posterior: MultivariateNormal
    free: Tensor


def exact(case: Problem) -> Exact:
    """By writing (θ, x) as an affine map of independent normals, and conditioning on y."""
    sde, grid = case.model.sde, case.grid
    p, n, d = sde.num_states, len(grid.t), 2
    size = d + n * p
    root, mean = torch.zeros(size, size), torch.zeros(size)
    mean[:d], root[:d, :d] = PRIOR_MEAN, PRIOR_SD.diag()
    mean[d : d + p], root[d : d + p, d : d + p] = case.x0_mean, case.x0_sd.diag()
    kick = torch.linalg.cholesky(sde.beta * DT)
    for i in range(1, n):
        now, before = slice(d + i * p, d + (i + 1) * p), slice(d + (i - 1) * p, d + i * p)
        keep = torch.eye(p) + sde.M * DT
        mean[now] = keep @ mean[before] + sde.G @ mean[:d] * DT
        root[now] = keep @ root[before] + sde.G @ root[:d] * DT
        root[now, now] += kick
    seen = (grid.observed > 0).flatten()
    read = torch.block_diag(*[case.model.observation.F.T] * n)[seen]
    read = torch.cat([torch.zeros(len(read), d), read], 1)
    covariance = root @ root.T
    law_y = read @ covariance @ read.T + SIGMA**2 * torch.eye(len(read))
    y, y_mean = grid.y.flatten()[seen], read @ mean
    gain = covariance @ read.T @ torch.linalg.inv(law_y)
    free = torch.ones(n, p, dtype=torch.bool)
    free[0] = case.x0_sd > 0
    kept = torch.cat([torch.ones(d, dtype=torch.bool), free.flatten()])
    after = (covariance - gain @ read @ covariance)[kept][:, kept]
    posterior = MultivariateNormal((mean + gain @ (y - y_mean))[kept], 0.5 * (after + after.T))
    return Exact(MultivariateNormal(y_mean, law_y).log_prob(y), posterior, free)


class GaussianQ(VariationalPosterior):
    """Any joint normal law of (ϑ, free entries of x), as a q."""

    def __init__(self, law: MultivariateNormal, free: Tensor, x0: Tensor) -> None:
        nn.Module.__init__(self)
        self.mean, self.tril = nn.Parameter(law.mean.clone()), nn.Parameter(law.scale_tril.clone())
        self.free, self.x0 = free, x0

    def forward(self, noise: Noise, wide: int = 0) -> Sample:
        assert wide == 0
        time = noise.path.shape[1]
        white = torch.cat([noise.theta, noise.path[:, self.free[-time:]]], 1)
        v = self.mean + white @ self.tril.tril().T
        log_q = Normal(0.0, 1.0).log_prob(white) - self.tril.diagonal().log()
        x = self.x0.expand(len(v), *self.free.shape).clone()
        x[:, self.free] = v[:, 2:]
        return Sample(v[:, :2], x, log_q[:, :2].sum(-1), log_q[:, 2:].sum(-1))


def gaussian_q(case: Problem, law: MultivariateNormal) -> GaussianQ:
    return GaussianQ(law, exact(case).free, case.x0_mean)


def noise_of(white: Tensor, free: Tensor) -> Noise:
    """Noise with the given entries where q is free."""
    time = len(free) if free[0].any() else len(free) - 1
    path = torch.randn(len(white), time, free.shape[1])
    path[:, free[-time:]] = white[:, 2:]
    return Noise(white[:, :2], path)


def cubature(free: Tensor) -> Noise:
    """±sqrt(D) unit vectors: a quadratic function has its exact normal mean over them."""
    size = 2 + int(free.sum())
    points = math.sqrt(size) * torch.eye(size)
    return noise_of(torch.cat([points, -points]), free)


def another_law(law: MultivariateNormal) -> MultivariateNormal:
    size = len(law.mean)
    tril = law.scale_tril @ (torch.eye(size) + 0.2 * torch.randn(size, size)).tril()
    tril = tril @ tril.diagonal().sign().diag()
    return MultivariateNormal(law.mean + 0.3 * torch.randn(size), scale_tril=tril)


def marginal_theta(law: MultivariateNormal) -> MultivariateNormal:
    return MultivariateNormal(law.mean[:2], law.covariance_matrix[:2, :2])


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_q_gives_the_log_evidence_for_every_noise(name: str) -> None:
    """log p(ϑ, x, y) − log q(ϑ, x) is the constant log p(y), so its slope in the noise is 0."""
    case = PROBLEMS[name]()
    answer = exact(case)
    q = gaussian_q(case, answer.posterior)
    white = torch.randn(7, len(q.mean), requires_grad=True)
    terms = elbo(case.model, q, case.grid, noise_of(white, answer.free))
    each = (
        terms.log_prior
        + terms.log_x0
        + terms.log_transition
        + terms.log_observation
        - terms.log_q_theta
        - terms.log_q_x
    )
    assert_close(each, answer.log_evidence.expand(7))
    assert_close(terms.value, answer.log_evidence)
    (slope,) = torch.autograd.grad(terms.value, white)
    assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_elbo_is_evidence_minus_kl_plus_tempered_entropy(name: str, alpha: float) -> None:
    """Kills α on log q(x|ϑ) or on both, a wrong sign, a mean over the wrong axis."""
    case = PROBLEMS[name]()
    answer = exact(case)
    law = another_law(answer.posterior)
    value = elbo(case.model, gaussian_q(case, law), case.grid, cubature(answer.free), alpha).value
    kl = kl_divergence(law, answer.posterior)
    entropy = marginal_theta(law).entropy()
    assert_close(value, answer.log_evidence - kl + (alpha - 1) * entropy)


def test_exact_q_is_where_the_gradient_in_q_vanishes() -> None:
    case = PROBLEMS["p = 2, x_0 random"]()
    answer = exact(case)
    gradients = {}
    for name, law in {"exact": answer.posterior, "other": another_law(answer.posterior)}.items():
        q = gaussian_q(case, law)
        elbo(case.model, q, case.grid, cubature(answer.free)).value.backward()
        gradients[name] = max(float(weight.grad.abs().max()) for weight in q.parameters())
    assert gradients["exact"] < 1e-10 < 1e-2 < gradients["other"]


SDES = {
    "ou": (OrnsteinUhlenbeck(), torch.tensor([2.0]), [[1.0]]),
    "ou, x_0 random": (OrnsteinUhlenbeck(), Normal(torch.ones(1), torch.ones(1)), [[1.0]]),
    "sir": (SIR(), torch.tensor([762.0, 1.0]), [[0.0], [1.0]]),
    "sir, I_0 random": (SIR(), {"S": 762.0, "I": LogNormal(0.0, 1.0)}, [[0.0], [1.0]]),
}
FAMILIES = {"paper": Family.paper(unit=3.0), "study": Family(receptive_field=3)}


def fitted(name: str, family: Family) -> tuple[StateSpaceModel, VariationalPosterior, Grid]:
    """A model with a real q, its weights moved a little."""
    sde, x0, F = SDES[name]
    center = [-6.0, -0.7, 1.0] if sde.num_states == 2 else [-1.0, 1.0, 0.0, 0.5]
    d = len(center)
    prior = Normal(torch.tensor(center), torch.ones(d))
    model = StateSpaceModel(sde, GaussianObservation(F, "sigma"), prior, x0)
    grid = Observations([0.0, 0.2, 0.6], [3.0, NAN, 5.0], dt=0.1).grid()
    path = torch.tensor([[762.0, 3.0]] if sde.num_states == 2 else [[2.0]]).repeat(7, 1)
    start = Start(torch.tensor(center), torch.full((d,), 0.3), path, 0.3 * path.sqrt())
    q = VariationalPosterior(model, grid, family, start, seed=0)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model, q, grid


def noise_for(q: VariationalPosterior, n: int, seed: int = 0) -> Noise:
    return q.draw_noise(n, torch.Generator().manual_seed(seed))


def with_chain(q: VariationalPosterior, noise: Noise) -> Noise:
    """Noise as a fit hands it to a step."""
    return noise._replace(chain=q.chain(q.theta_flow(noise.theta)[0].detach()))


def untrained(case: Problem, path: Tensor, theta_flows: int = 0) -> VariationalPosterior:
    """The chain alone, linearised about any path, under a q(ϑ) that is off the posterior."""
    d = case.model.num_theta
    start = Start(torch.linspace(-0.5, 0.5, d), torch.linspace(0.3, 0.9, d), path, path)
    family = Family(num_flows=0, theta_flows=theta_flows)
    return VariationalPosterior(case.model, case.grid, family, start, seed=0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ["p = 1, x_0 fixed", "p = 2, x_0 fixed"])
def test_untrained_elbo_of_a_linear_model_is_evidence_minus_kl_of_theta(
    name: str, alpha: float
) -> None:
    """q(x | ϑ) is exact: only KL(q(ϑ) | p(ϑ | y)) is left, whatever the noise of the paths.

    Kills a chain off by any term of its mean, A, L or density, and a reading that is left out.
    """
    case = PROBLEMS[name]()
    answer = exact(case)
    q = untrained(case, 3 * torch.randn(len(case.grid.t), case.model.num_states))
    white = torch.cat([math.sqrt(2) * torch.eye(2), -math.sqrt(2) * torch.eye(2)])
    loc, log_scale = q.theta_flow.loc_scale()
    law = MultivariateNormal(loc.detach(), log_scale.detach().exp().square().diag())
    kl = kl_divergence(law, marginal_theta(answer.posterior))
    expected = answer.log_evidence - kl + (alpha - 1) * law.entropy()
    for scale in (0.0, 1.0, 2.0):
        path = scale * torch.randn(4, *q.loc0.shape)
        value = elbo(case.model, q, case.grid, Noise(white, path), alpha).value
        assert_close(value, expected, **ROUNDING)


def log_start(q: VariationalPosterior, x: Tensor) -> Tensor:
    """Log density of x_0 as the chain takes it: normal, each free component by itself."""
    mean, variance = q.linearised().prior
    mean, variance = q.loc0[0] + mean, variance.diagonal()
    free = q.free[0] > 0
    return Normal(mean[free], variance[free].sqrt()).log_prob(x[:, 0, free]).sum(1)


@pytest.mark.parametrize("name", ["p = 1, x_0 random", "p = 2, x_0 random", "p = 2, a fixed"])
def test_untrained_path_is_exact_but_for_the_density_of_x_0(name: str) -> None:
    """log p(x, y | ϑ)/q(x | ϑ) is one number for all paths, with the chain's own normal for x_0.

    Kills a prior of x_0 at the wrong time, and a fixed component that is drawn or read.
    """
    case = PROBLEMS[name]()
    q = untrained(case, 3 * torch.randn(len(case.grid.t), case.model.num_states))
    noise = noise_for(q, 50)
    noise = noise._replace(theta=noise.theta[:1].expand(50, -1))
    terms, x = elbo(case.model, q, case.grid, noise), q(noise).x
    each = log_start(q, x) + terms.log_transition + terms.log_observation - terms.log_q_x
    assert_close(each, each.mean().expand(50), **ROUNDING)


def ou_problem(x0: object) -> Problem:
    """OU with unknown rate, level and noise; readings at some times, the first one at t_0."""
    prior = Normal(torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([0.5, 1.0, 0.4]))
    model = StateSpaceModel(OrnsteinUhlenbeck(), GaussianObservation([[1.0]], SIGMA), prior, x0)
    grid = Observations([0.0, 0.2, 0.3, 0.7], [3.0, NAN, 1.0, 2.0], 0.1).grid()
    return Problem(model, grid, torch.tensor([2.0]), torch.zeros(1))


def ou_filter(case: Problem, vartheta: Tensor, mean: float, variance: float) -> Tensor:
    """log p(y | ϑ) of the Euler grid, by the forward filter of appendix C."""
    theta, grid = case.model.to_theta(vartheta), case.grid
    y = torch.where(grid.observed > 0, grid.y, NAN)[:, 0]
    transition = ou_transition(theta, grid.dt, exact=False)
    return forward_filter(y[1:], transition, mean, variance, SIGMA**2, y[0]).log_likelihood


@pytest.mark.parametrize("theta_flows", [0, 3])
def test_untrained_elbo_of_ou_is_evidence_minus_kl_of_theta(theta_flows: int) -> None:
    """Draw by draw it is log p(y) − log q(ϑ)/p(ϑ | y) = log p(ϑ) p(y | ϑ) − log q(ϑ).

    Kills a chain at another ϑ than that of its draw, and Itô terms where h is a straight line.
    """
    case = ou_problem([2.0])
    q = untrained(case, 3 * torch.rand(len(case.grid.t), 1), theta_flows)
    noise = noise_for(q, 200)
    terms, (vartheta, log_q) = elbo(case.model, q, case.grid, noise), q.theta_flow(noise.theta)
    likelihood = ou_filter(case, vartheta.detach(), 2.0, 0.0)
    path_part = terms.log_transition + terms.log_observation - terms.log_q_x
    assert_close(path_part, likelihood, **ROUNDING)
    left = (case.model.log_prior(vartheta) + likelihood - log_q).mean()
    assert_close(terms.value, left.detach(), **ROUNDING)


def test_untrained_path_of_ou_with_a_random_start_is_that_of_the_filter() -> None:
    """The chain's own normal for x_0 is the filter's a and c."""
    case = ou_problem(Normal(torch.tensor([2.0]), torch.tensor([0.6])))
    q = untrained(case, 3 * torch.rand(len(case.grid.t), 1))
    noise = noise_for(q, 200)
    terms, sample = elbo(case.model, q, case.grid, noise), q(noise)
    mean, variance = q.linearised().prior
    mean, variance = float(q.loc0[0] + mean), float(variance)
    likelihood = ou_filter(case, sample.vartheta, mean, variance)
    path_part = log_start(q, sample.x) + terms.log_transition + terms.log_observation
    assert_close(path_part - terms.log_q_x, likelihood, **ROUNDING)
    assert mean == pytest.approx(2.0, abs=0.1) and variance == pytest.approx(0.36, abs=0.06)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SDES)
def test_value_is_the_sum_of_the_named_terms(name: str, family: str, alpha: float) -> None:
    model, q, grid = fitted(name, FAMILIES[family])
    noise = noise_for(q, 4)
    terms, sample = elbo(model, q, grid, noise, torch.tensor(alpha)), q(noise)
    joint = model.log_joint(sample.vartheta, sample.x, grid)
    for part in ("log_prior", "log_x0", "log_transition", "log_observation"):
        assert getattr(terms, part).equal(getattr(joint, part))
    assert terms.log_q_theta.equal(sample.log_q_theta) and terms.log_q_x.equal(sample.log_q_x)
    assert (terms.log_x0 != 0).all() if model.x0_random else (terms.log_x0 == 0).all()
    plus = terms.log_prior + terms.log_x0 + terms.log_transition + terms.log_observation
    # To rounding: far from the data one term may be a million times another.
    expected = (plus - alpha * terms.log_q_theta - terms.log_q_x).mean()
    assert_close(terms.value, expected, rtol=1e-14, atol=1e-12)
    assert elbo(model, q, grid, noise, alpha).value.equal(terms.value)


@pytest.mark.parametrize("name", SDES)
def test_elbo_is_a_pure_function_of_noise_and_averages_over_draws(name: str) -> None:
    model, q, grid = fitted(name, FAMILIES["study"])
    noise, before = noise_for(q, 6), torch.get_rng_state()
    value = elbo(model, q, grid, noise).value
    elbo(model, q, grid, noise_for(q, 3, seed=5), 2.0)
    assert elbo(model, q, grid, noise).value.equal(value)
    assert torch.get_rng_state().equal(before)
    single = [
        elbo(model, q, grid, Noise(noise.theta[[n]], noise.path[[n]])).value for n in range(6)
    ]
    assert_close(torch.stack(single).mean(), value)


@pytest.mark.parametrize("path_gradient", [False, True])
@pytest.mark.parametrize("name", SDES)
def test_elbo_with_the_chain_in_its_noise_is_the_same(name: str, path_gradient: bool) -> None:
    """Kills a chain of other draws, also where it is a part of one made for more of them."""
    model, q, grid = fitted(name, FAMILIES["study"])
    noise = noise_for(q, 6)
    given = with_chain(q, noise)
    terms = elbo(model, q, grid, noise, 2.0, path_gradient)
    for one, other in zip(elbo(model, q, grid, given, 2.0, path_gradient), terms, strict=True):
        assert one.equal(other)
    half = Noise(noise.theta[2:5], noise.path[2:5], part_of(given.chain, slice(2, 5)))
    assert_close(elbo(model, q, grid, half).log_q_x, terms.log_q_x[2:5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_weights_of_a_real_q_average_to_the_evidence(family: str) -> None:
    """20,000 draws, 5 SE. Kills a log scale, or the chain's Jacobian, missing from log q."""
    case = problem(1, "x_0 random", rows=2)
    answer, d = exact(case), 2
    sd = 2 * answer.posterior.stddev
    start = Start(answer.posterior.mean[:d], sd[:d], answer.posterior.mean[d:, None], sd[d:, None])
    q = VariationalPosterior(case.model, case.grid, FAMILIES[family], start, seed=0)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
        if not q.family.base:
            # Without the chain q starts at 0: the last gate of 0.88 moves it to the posterior.
            q.layers[-1].network.out.bias[0] += answer.posterior.mean[d:].mean() / 3.0 / 0.12
        terms = elbo(case.model, q, case.grid, noise_for(q, 20_000))
    joint = terms.log_prior + terms.log_x0 + terms.log_transition + terms.log_observation
    weight = (joint - terms.log_q_theta - terms.log_q_x - answer.log_evidence).exp()
    error = weight.std() / math.sqrt(len(weight))
    assert error < 0.1
    assert abs(weight.mean() - 1) < 5 * error


@pytest.mark.compiled
# Dynamo itself makes the instance that torch.autograd warns of.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name, family, options, given",
    [
        ("ou", replace(Family.paper(), num_flows=2, layers=2), {}, False),
        ("ou", replace(Family.paper(), num_flows=2, layers=2), {"path_gradient": True}, False),
        ("ou", FAMILIES["study"], {}, True),
        ("ou, x_0 random", FAMILIES["study"], {"path_gradient": True, "wide": 2}, True),
        ("sir, I_0 random", FAMILIES["study"], {"path_gradient": True, "wide": 2}, True),
    ],
    ids=["ou-paper", "ou-paper-path", "ou-study", "ou-x0-study-path", "sir-x0-study-path"],
)
def test_compiled_step_is_the_eager_one_and_compiles_once(
    name: str, family: Family, options: dict[str, object], given: bool
) -> None:
    """One graph for values and gradients; α and the chain are tensors: new ones need no new graph.

    Kills a chain that is taken for a constant.
    """
    model, q, grid = fitted(name, family)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def step(noise: Noise, alpha: Tensor) -> Tensor:
        bound = elbo(model, q, grid, noise, alpha, **options)
        return bound.value + bound.conditional

    torch._dynamo.reset()
    # The score takes one gradient within the step.
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        _compare(step, torch.compile(step, backend=count, fullgraph=True), q, given)
    assert len(graphs) == 1


def _compare(step: Callable, compiled: Callable, q: VariationalPosterior, given: bool) -> None:
    """Values and gradients at three noises and temperatures."""
    learned = [weight for weight in q.parameters() if weight.requires_grad]
    for seed, alpha in enumerate((10.0, 2.5, 1.0)):
        noise = noise_for(q, 5, seed)
        inputs = with_chain(q, noise) if given else noise, torch.tensor(alpha)
        eager, fast = step(*inputs), compiled(*inputs)
        assert_close(fast, eager)
        for a, b in zip(
            torch.autograd.grad(fast, learned, allow_unused=True),
            torch.autograd.grad(eager, learned, allow_unused=True),
            strict=True,
        ):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b)
