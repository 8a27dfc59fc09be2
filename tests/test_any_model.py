"""A reader's own model and data, from the constructor to the fit: exact joint normal, evidence."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Gamma,
    HalfNormal,
    Kumaraswamy,
    LogNormal,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
    Uniform,
)
from torch.distributions.transforms import AffineTransform
from torch.testing import assert_close

import lib

NAN = math.nan
DT, T0 = 0.2, 1.0


class Linear(lib.SDE):
    """p states; drift and full β depend on time, and given θ everything is jointly normal."""

    theta_names, positive_theta = ("pull", "level", "noise"), ("pull", "noise")

    def __init__(self, p: int) -> None:
        self.state_names = tuple(f"x{i}" for i in range(p))

    def drift(self, t, x, theta):
        return theta[..., :1] * (theta[..., 1:2] - x) + torch.sin(t) * x.roll(1, -1)

    def diffusion(self, t, x, theta):
        p = len(self.state_names)
        root = torch.eye(p) + 0.4 * torch.ones(p, p).tril(-1) + t[..., None] * torch.ones(p, p) / 5
        return theta[..., 2:, None].square() * (root @ root.mT)


def steps(sde: Linear, theta: Tensor, num_steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(Φ, c, Q) of x_i = Φ x_{i-1} + c + N(0, Q), the drift's slope taken by hand."""
    p, (pull, level, _) = sde.num_states, theta
    out = []
    for i in range(num_steps):
        t = torch.tensor([T0 + i * DT])
        slope = torch.sin(t) * torch.eye(p).roll(1, 0) - pull * torch.eye(p)
        shift = (pull * level).expand(p)
        out.append((torch.eye(p) + DT * slope, DT * shift, DT * sde.diffusion(t, shift, theta)))
    return out


def dense(transitions: list, mean0: Tensor, cov0: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of (x_0, …, x_N) as one long vector."""
    p, means, rows = len(mean0), [mean0], [[cov0]]
    for phi, c, q in transitions:
        means.append(phi @ means[-1] + c)
        across = [phi @ block for block in rows[-1]]
        rows.append([*across, across[-1] @ phi.mT + q])
    n = len(means)
    covariance = torch.zeros(n * p, n * p)
    for i in range(n):
        for j in range(i + 1):
            covariance[i * p : (i + 1) * p, j * p : (j + 1) * p] = rows[i][j]
            covariance[j * p : (j + 1) * p, i * p : (i + 1) * p] = rows[i][j].mT
    return torch.cat(means), covariance


def with_data(mean: Tensor, covariance: Tensor, F: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The law of (path, every cell of y), row after row."""
    n = len(mean) // len(F)
    see = torch.block_diag(*[F.mT] * n)
    both = torch.cat([torch.eye(len(mean)), see])
    joint = both @ covariance @ both.mT
    joint[len(mean) :, len(mean) :] += sigma.square().repeat(n).diag()
    return both @ mean, joint


Y = [[0.3, NAN, 1.0], [NAN, 2.0, NAN], [NAN, NAN, NAN], [1.5, -0.5, NAN]]
TIMES = [1.0, 1.4, 1.6, 1.8]


def data(m: int) -> lib.Observations:
    """At t_0, with a gap of two steps, single cells missing, one row all blank."""
    return lib.Observations(TIMES, [row[:m] for row in Y], dt=DT, t0=T0)


def x0_of(p: int, kind: str) -> tuple[object, Tensor, Tensor]:
    """x_0 for the model, and its mean and covariance."""
    mean, root = torch.linspace(-0.5, 1.0, p), 0.2 * torch.ones(p, p).tril() + 0.3 * torch.eye(p)
    names = tuple(f"x{i}" for i in range(p))
    if kind == "fixed":
        return mean.tolist(), mean, torch.zeros(p, p)
    if kind == "half":
        random = torch.arange(p) % 2 == 0
        spec = {s: Normal(float(m), 0.7) if r else float(m)
                for s, m, r in zip(names, mean, random, strict=True)}  # fmt: skip
        return spec, mean, 0.49 * random.double().diag()
    if kind == "transformed":
        law = TransformedDistribution(Normal(torch.zeros(p), 1.0), AffineTransform(mean, 0.6))
        return law, mean, 0.36 * torch.eye(p)
    return MultivariateNormal(mean, root @ root.mT), mean, root @ root.mT


@pytest.mark.parametrize("kind", ["fixed", "half", "joint", "transformed"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_log_joint_is_one_joint_normal_of_path_and_data(p: int, kind: str) -> None:
    """Full β(t, θ), mixtures of states in F, two known σ and one unknown.

    Kills a and β at t_i, p(x_0) left out or counted twice, F transposed, a missing cell that
    counts, a cell at t_0 that does not, σ² in place of σ.
    """
    m = 3
    F = torch.cos(torch.arange(p * m)).view(p, m)
    x0, mean0, cov0 = x0_of(p, kind)
    observation = lib.GaussianObservation(F.tolist(), ("sd", 0.5, 2))
    prior = MultivariateNormal(torch.zeros(4), torch.eye(4) + 0.3)
    model, obs = lib.StateSpaceModel(Linear(p), observation, prior, x0), data(m)
    vartheta, path = 0.5 * torch.randn(2, 4), torch.randn(2, obs.num_steps + 1, p)
    path[:, 0] = torch.where(model.x0_fixed, model.x0_value, path[:, 0])
    terms = model.log_joint(vartheta, path, obs.grid())
    cells = torch.full((obs.num_steps + 1, m), NAN)
    cells[[0, 2, 3, 4]] = torch.tensor([row[:m] for row in Y])
    for k in range(2):
        theta = model.to_theta(vartheta[k])
        sigma = torch.tensor([theta[3], 0.5, 2.0])
        moments = dense(steps(model.sde, theta[:3], obs.num_steps), mean0, cov0)
        mean, covariance = with_data(*moments, F, sigma)
        value = torch.cat([path[k].flatten(), cells.flatten()])
        used = (covariance.diagonal() > 0) & ~value.isnan()
        law = MultivariateNormal(mean[used], covariance[used][:, used])
        expected = law.log_prob(value[used]) + prior.log_prob(vartheta[k])
        assert_close(terms.total[k], expected)


class Known(lib.SDE):
    """Dynamics that are known; the parameters are there because a model must have some."""

    theta_names = ("idle", "unused")

    def __init__(self, p: int) -> None:
        self.p, self.state_names = p, tuple(f"x{i}" for i in range(p))

    def drift(self, t, x, theta):
        return 0.5 * (1.0 - x) + 0.3 * x.roll(1, -1) * (self.p > 1)

    def diffusion(self, t, x, theta):
        return 0.6 * torch.eye(self.p) + 0.2


def known_model(x0: object, F: list, sigma: float) -> lib.StateSpaceModel:
    prior = Normal(torch.zeros(2), torch.ones(2))
    return lib.StateSpaceModel(Known(len(F)), lib.GaussianObservation(F, sigma), prior, x0)


def short_fit(
    model: lib.StateSpaceModel, obs: lib.Observations, num_steps: int, refits: int, **family: object
) -> lib.FitResult:
    """The chain and few flows of ϑ: enough for what is normal, or nearly so."""
    small = lib.Family(**{"num_flows": 0, "theta_flows": 1, "theta_hidden": 16} | family)
    config = lib.FitConfig(num_steps=num_steps, refits=refits, dtype="float64", family=small)
    return lib.fit(model, obs, config, device="cpu", progress=False)


def weighted_mean(draws: lib.Draws, values: Tensor) -> float:
    return float((torch.softmax(draws.log_weight, 0) * values).sum())


def test_fit_with_a_normal_x0_has_the_evidence_of_the_forward_filter() -> None:
    """2·10⁴ draws. Kills p(x_0) counted twice or left out, and a q that does not move x_0."""
    y = [NAN, 2.5, NAN, 2.0, 0.5, NAN]
    obs = lib.Observations([0.2 * i for i in range(1, 7)], y, dt=0.2)
    model = known_model(Normal(torch.tensor([2.0]), 1.5), [[1.0]], 0.4)
    euler = lib.ou_transition(torch.tensor([0.5, 1.0, 0.8**0.5]), 0.2, exact=False)
    exact = lib.forward_filter(torch.tensor(y), euler, 2.0, 1.5**2, 0.4**2).log_likelihood.item()
    report = short_fit(model, obs, 20, 0).diagnostics(20_000)
    assert report.log_evidence == pytest.approx(exact, abs=0.01)
    assert exact - 0.05 < report.elbo < exact + 0.01


def test_fit_with_half_of_x0_random_has_the_exact_evidence_and_x0() -> None:
    """2·10⁴ draws. Kills a q that covers the fixed component, or not the random one."""
    obs = lib.Observations([0.2, 0.4, 0.6, 0.8], [0.4, NAN, 1.5, 1.0], dt=0.2)
    model = known_model({"x0": 1.0, "x1": Normal(-1.0, 1.2)}, [[1.0], [1.0]], 0.3)
    phi = 0.9 * torch.eye(2) + 0.06 * torch.eye(2).roll(1, 0)
    transition = (phi, torch.full((2,), 0.1), 0.12 * torch.eye(2) + 0.04)
    moments = dense([transition] * 4, torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.44]).diag())
    mean, covariance = with_data(*moments, torch.ones(2, 1), torch.tensor([0.3]))
    seen, value = torch.tensor([11, 13, 14]), torch.tensor([0.4, 1.5, 1.0])  # behind 10 states
    of_y = covariance[seen][:, seen]
    exact = MultivariateNormal(mean[seen], of_y).log_prob(value).item()
    x0 = mean[1] + covariance[1, seen] @ torch.linalg.solve(of_y, value - mean[seen])
    fit = short_fit(model, obs, 20, 0)
    report, draws = fit.diagnostics(20_000), fit.draws(20_000)
    assert report.log_evidence == pytest.approx(exact, abs=0.01)
    assert exact - 0.05 < report.elbo < exact + 0.01
    assert (draws.x[:, 0, 0] == 1.0).all()
    assert weighted_mean(draws, draws.x[:, 0, 1]) == pytest.approx(x0.item(), abs=0.05)


class Root(Known):
    """A positive state with noise that grows with it."""

    positive_state = True

    def diffusion(self, t, x, theta):
        return (0.1 * x)[..., None]


# Of a uniform x_0 the logit has longer tails than the chain's normal: k-hat 0.8, and the mean of
# 20,000 weights is known to a few hundredths only.
X0_LAWS = {
    "log-normal": (LogNormal(torch.tensor([1.0]), 0.3), 1e-3, 12.0, 0.01),
    "uniform": (Uniform(torch.tensor([1.5]), 3.0), 1.5, 3.0, 0.05),
}


@pytest.mark.parametrize("name", X0_LAWS)
def test_fit_with_a_positive_x0_has_the_evidence_of_a_quadrature(name: str) -> None:
    """One step, so (x_0, x_1) is a plane. Kills log h' or p(x_0) left out, or counted twice.

    The noise grows with the state, so the local IAFs have something to learn.
    """
    obs = lib.Observations([0.0, 0.5], [2.4, 1.6], dt=0.5)
    prior, (law, low, high, within) = Normal(torch.zeros(2), torch.ones(2)), X0_LAWS[name]
    model = lib.StateSpaceModel(Root(1), lib.GaussianObservation([[1.0]], 0.8), prior, law)
    x0, x1 = torch.linspace(low, high, 1201)[:, None], torch.linspace(1e-3, 9.0, 901)[None]
    log_density = law.log_prob(x0) + Normal(x0, 0.8).log_prob(torch.tensor(2.4))
    log_density = log_density + Normal(0.75 * x0 + 0.25, (0.05 * x0).sqrt()).log_prob(x1)
    density = (log_density + Normal(x1, 0.8).log_prob(torch.tensor(1.6))).exp()
    exact = torch.trapezoid(torch.trapezoid(density, x1[0]), x0[:, 0]).log().item()
    fit = short_fit(model, obs, 300, 0, num_flows=2)
    report, x0 = fit.diagnostics(20_000), fit.draws(2_000).x[:, 0]
    assert report.log_evidence == pytest.approx(exact, abs=within)
    assert exact - 0.05 < report.elbo < exact + 0.01
    assert low < x0.min() and x0.max() < high


class Six(lib.SDE):
    """Six parameters, positive, real and in an interval, all of which move the path."""

    state_names, theta_names = ("x",), (
        "gamma", "lognormal", "normal", "halfnormal", "uniform", "kumaraswamy")  # fmt: skip
    positive_theta = ("gamma", "lognormal", "halfnormal")

    def drift(self, t, x, theta):
        return 0.3 * theta[..., 2:3] - 0.1 * theta[..., :1] * x + theta[..., 4:5]

    def diffusion(self, t, x, theta):
        return (0.5 + 0.1 * theta[..., 1:2] + 0.1 * theta[..., 3:4] + theta[..., 5:])[..., None]


def test_data_that_say_nothing_leave_the_prior_of_every_parameter() -> None:
    """σ = 10⁸, 2·10⁴ draws. Kills a Jacobian that is doubled or left out: the mean of Gamma(4, 2)
    would be that of Gamma(5, 2) or Gamma(3, 2), a quarter off. q(ϑ) itself is 0.05 off in KS."""
    laws = {
        "gamma": Gamma(4.0, 2.0),
        "lognormal": LogNormal(0.5, 0.4),
        "normal": Normal(-1.0, 0.7),
        "halfnormal": HalfNormal(1.5),
        "uniform": Uniform(-2.0, 3.0),
        "kumaraswamy": Kumaraswamy(torch.tensor(2.0), torch.tensor(3.0)),
    }
    obs = lib.Observations([0.1, 0.3], [0.5, 0.5], dt=0.1)
    model = lib.StateSpaceModel(Six(), lib.GaussianObservation([[1.0]], 1e8), laws, [0.5])
    fit = short_fit(model, obs, 20, 2, theta_flows=2)
    report, theta = fit.diagnostics(20_000), fit.draws(20_000).theta
    evidence = 2 * Normal(0.0, 1e8).log_prob(torch.tensor(0.0)).item()
    assert evidence - 0.3 < report.elbo < evidence + 0.05
    assert report.log_evidence == pytest.approx(evidence, abs=0.1)
    rank = (torch.arange(20_000) + 0.5) / 20_000
    for column, (name, law) in zip(theta.T, laws.items(), strict=True):
        assert column.mean().item() == pytest.approx(law.mean.item(), rel=0.08), name
        assert column.std().item() == pytest.approx(law.stddev.item(), rel=0.15), name
        ks = (law.cdf(column.sort().values) - rank).abs().max()
        assert ks < (0.1 if name == "halfnormal" else 0.05), name


def equidistant(num_steps: int, m: int) -> lib.Observations:
    return lib.Observations(
        [T0 + DT * i for i in range(1, num_steps + 1)], torch.rand(num_steps, m), dt=DT, t0=T0
    )


ENDS = lib.Observations([T0, T0 + 6 * DT], [[0.1], [0.2]], dt=DT, t0=T0)
BLANK_END = lib.Observations([T0, T0 + 3 * DT], [[0.1], [NAN]], dt=DT, t0=T0)
SHAPES = {
    "p = 5 = N": (5, torch.eye(5).tolist(), lambda: equidistant(5, 5), 0.5),
    "p = n = N": (4, torch.eye(4).tolist(), lambda: equidistant(4, 4), "sd"),
    "p = 1, m = 3": (1, [[1.0, 2.0, -1.0]], lambda: equidistant(4, 3), ("a", 0.5, "b")),
    "p = 3, m = 1, N = 1": (3, [[0.0], [1.0], [1.0]], lambda: equidistant(1, 1), 0.5),
    "N = 1": (1, [[1.0]], lambda: equidistant(1, 1), "noise"),
    "N = 2": (2, [[1.0], [0.0]], lambda: equidistant(2, 1), 0.5),
    "both ends": (2, [[1.0], [0.0]], lambda: ENDS, 0.5),
    "x_0 alone": (1, [[1.0]], lambda: BLANK_END, 0.5),
}


@pytest.mark.parametrize(("preset", "kind"), [("study", "joint"), ("paper", "fixed")])
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_goes_from_the_model_to_the_forecast(name: str, preset: str, kind: str) -> None:
    """A window wider than the record, and as many draws as states, or one."""
    p, F, make, sigma = SHAPES[name]
    obs, (x0, _, _) = make(), x0_of(p, kind)
    observation = lib.GaussianObservation(F, sigma)
    own = len(set(observation.theta_names) - {"noise"})
    model = lib.StateSpaceModel(Linear(p), observation, Normal(torch.zeros(3 + own), 0.5), x0)
    num_samples = 4 if name == "p = n = N" else 1
    options = {"num_steps": 2, "num_samples": num_samples, "dtype": "float64", "refits": 0}
    config = lib.FitConfig(**options) if preset == "study" else lib.FitConfig.paper(**options)
    fit = lib.fit(model, obs, config, device="cpu", progress=False)
    assert (fit.history.elbo < math.inf).all()
    draws, future = fit.draws(3), fit.forecast(2, 3)
    assert draws.x.shape == (3, obs.num_steps + 1, p) and draws.log_weight.isfinite().all()
    assert fit.predict(3).shape == (3, obs.num_steps + 1, len(F[0]))
    assert future.y.shape == (3, 2, len(F[0])) and future.y.isfinite().all()


class Logistic(lib.SDE):
    """One parameter, and constants written as a reader would, in torch's default type."""

    state_names, theta_names, positive_theta, positive_state = ("n",), ("rate",), ("rate",), True

    def drift(self, t, x, theta):
        return theta * x * (1 - x / torch.tensor([10.0]))

    def diffusion(self, t, x, theta):
        return (torch.tensor(0.1) * x)[..., None]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_reader_with_torchs_own_default_type_can_fit(dtype: str) -> None:
    """Counts of 0 among them. Kills a constant of float32 that meets a tensor of float64."""
    torch.set_default_dtype(torch.float32)
    obs = lib.Observations([0.5, 1.0, 1.5], [0.0, 0.0, 3.0], dt=0.25)
    prior = {"rate": LogNormal(0.0, 1.0)}
    model = lib.StateSpaceModel(Logistic(), lib.GaussianObservation([[1.0]], 1.0), prior, [0.5])
    config = lib.FitConfig(num_steps=3, dtype=dtype, refits=0)
    draws = lib.fit(model, obs, config, device="cpu", progress=False).draws(100)
    assert draws.x.dtype == torch.float64 and (draws.x > 0).all()
    assert draws.log_weight.isfinite().all()


class Pull(lib.SDE):
    """dX = −θX dt + dW: one parameter."""

    state_names, theta_names, positive_theta = ("x",), ("rate",), ("rate",)

    def drift(self, t, x, theta):
        return -theta * x

    def diffusion(self, t, x, theta):
        return torch.ones_like(x)[..., None]


def test_one_parameter_is_fitted():
    """The whole default of training. Kills: units that see nothing, by which training explodes.

    The evidence is a sum over log θ of that of the forward filter.
    """
    t = 0.1 * torch.arange(1, 41)
    y = 2 * (-t).exp() + 0.3 * (7 * t).sin()
    model = lib.StateSpaceModel(
        Pull(), lib.GaussianObservation([[1.0]], 0.5), Normal(torch.zeros(1), 1.0), [2.0]
    )
    config = lib.FitConfig(num_steps=600)
    fit = lib.fit(model, lib.Observations(t, y, dt=0.1), config, progress=False)
    assert torch.tensor(fit.history.elbo).isfinite().all()
    points = torch.linspace(-6.0, 6.0, 2001)
    theta = torch.stack([points.exp(), torch.zeros(2001), torch.ones(2001)], -1)
    found = lib.forward_filter(y, lib.ou_transition(theta, 0.1, exact=False), 2.0, 0.0, 0.25)
    terms = found.log_likelihood + Normal(0.0, 1.0).log_prob(points)
    evidence = torch.logsumexp(terms, 0) + math.log(12 / 2000)
    draws, report = fit.draws(5000), fit.diagnostics(5000)
    # Of linear drift and constant β the chain is exact: what training does to it can only harm.
    own = torch.cat([draws.theta, torch.zeros(5000, 1), torch.ones(5000, 1)], 1)
    of_y = lib.forward_filter(y, lib.ou_transition(own, 0.1, exact=False), 2.0, 0.0, 0.25)
    log_p_theta = of_y.log_likelihood + Normal(0.0, 1.0).log_prob(draws.vartheta[:, 0])
    log_q_theta = fit._exact_q.theta_flow.log_prob(draws.vartheta)
    lost = log_p_theta - log_q_theta - draws.log_weight
    assert abs(lost.mean()) < 0.02, "KL of q(x | ϑ), in nats"
    # Of one parameter q(ϑ) is a normal; that of the posterior's own moments is 0.121 nats away.
    assert -4 * report.elbo_se < float(evidence) - report.elbo < 0.121
    assert report.log_evidence == pytest.approx(float(evidence), abs=0.05)
