"""Guided steps: exact for linear models, densities by differences, the cut normal, a whole fit."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal, Uniform
from torch.testing import assert_close

import lib
from lib.elbo import Elbo
from lib.guided import above, look_ahead, steered
from lib.posterior import VariationalPosterior
from lib.smoother import Readings, Transitions
from lib.start import Start

GUIDED = lib.Family(num_flows=0, guided=True)


class Spring(lib.SDE):
    """Linear, two states that pull at each other, correlated noise, a drift that knows the time."""

    state_names, theta_names = ("u", "v"), ("k",)

    def drift(self, t, x, theta):
        u, v = x.unbind(-1)
        push = torch.cos(t[..., 0])
        return torch.stack([v - 0.3 * u + push, -theta[..., 0] * u - 0.2 * v], -1)

    def diffusion(self, t, x, theta):
        return torch.tensor([[0.5, 0.2], [0.2, 0.8]], dtype=x.dtype)


def spring(x0) -> tuple[lib.StateSpaceModel, lib.Observations]:
    """Two readings at a time, the first of which mixes the states; some are missing."""
    observation = lib.GaussianObservation([[1.0, 0.0], [0.5, 1.0]], ("s", 0.1))
    model = lib.StateSpaceModel(Spring(), observation, Normal(torch.zeros(2), 1.0), x0)
    nan = math.nan
    y = [[0.3, nan], [nan, -0.5], [nan, nan], [1.1, 0.2]]
    return model, lib.Observations([0.0, 0.3, 0.5, 0.7], y, dt=0.1)


def outbreak(dt: float = 0.1) -> tuple[lib.StateSpaceModel, lib.Observations]:
    """Four days of an epidemic that begins with one boy."""
    observation = lib.GaussianObservation([[0.0], [1.0]], "sigma")
    model = lib.StateSpaceModel(
        lib.SIR(763), observation, Normal(torch.zeros(3), 3.0), [762.0, 1.0]
    )
    return model, lib.Observations([1.0, 2.0, 3.0, 4.0], [3.0, 8.0, 26.0, 76.0], dt=dt)


def posterior(model, observations, vartheta, path, family=GUIDED) -> VariationalPosterior:
    """q about a path, in float64."""
    vartheta = torch.tensor(vartheta, dtype=torch.float64)
    start = Start(vartheta, torch.ones_like(vartheta), path, torch.ones_like(path))
    return VariationalPosterior(model, observations.grid(), family, start, 0)


def log_weights(q, model, observations, vartheta, n: int) -> torch.Tensor:
    """log p(ϑ, x, y) − log q(x | ϑ) of so many paths at one ϑ."""
    generator = torch.Generator().manual_seed(1)
    many = vartheta.expand(n, -1)
    x, log_q = q.path(q.draw_path_noise(n, generator), many)
    return model.log_joint(many, x, observations.grid()).total - log_q


X0 = {
    "known": [0.4, -0.2],
    "normal": {"u": Normal(0.5, 1.0), "v": Normal(-1.0, 0.7)},
    "in part": {"u": 0.4, "v": Normal(0.0, 1.0)},
}


@pytest.mark.parametrize("kind", X0)
def test_of_a_linear_model_every_weight_is_the_evidence(kind):
    """That of the smoother, tested elsewhere; kills a wrong gain, shift, reading, time or x_0."""
    model, observations = spring(X0[kind])
    path = torch.linspace(-1, 1, 16, dtype=torch.float64).view(8, 2)
    place = [0.8, -3.0]  # σ below the spread of the data, where it is capped
    vartheta = torch.tensor(place, dtype=torch.float64)
    found, right = (
        log_weights(
            posterior(model, observations, place, path, family), model, observations, vartheta, 50
        )
        for family in (GUIDED, lib.Family(num_flows=0))
    )
    # A random x_0 is matched to sampled quantiles of its prior: only nearly a normal's own.
    atol = 1e-9 if kind == "known" else 0.15
    assert_close(found, right.mean().expand(50), rtol=0, atol=atol)


def test_of_ou_every_weight_is_the_filters_likelihood():
    y = torch.tensor([19.5, math.nan, 19.2], dtype=torch.float64)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 10.0),
        x0=[20.0],
    )
    observations = lib.Observations([0.1, 0.2, 0.3], y, dt=0.1)
    vartheta = torch.tensor([-1.6, 5.0, 0.0], dtype=torch.float64)
    q = posterior(
        model, observations, vartheta.tolist(), torch.full((4, 1), 19.0, dtype=torch.float64)
    )
    found = log_weights(q, model, observations, vartheta, 20)
    euler = lib.ou_transition(model.to_theta(vartheta), 0.1, exact=False)
    known = lib.forward_filter(y, euler, 20.0, 0.0, 1.0).log_likelihood
    assert_close(found, (known + model.log_prior(vartheta)).expand(20), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "start", [[762.0, 1.0], {"S": Uniform(700.0, 763.0), "I": Uniform(0.1, 1.5)}]
)
def test_log_density_is_that_of_the_map_from_the_noise(start):
    """By differences, where steps are cut at 0; kills a lost mass of the cut, slope or column."""
    model, observations = outbreak(dt=0.5)
    model = lib.StateSpaceModel(model.sde, model.observation, Normal(torch.zeros(3), 3.0), start)
    t = observations.grid().t[:, None]
    path = torch.cat([740 - 5 * t, 1 + 2 * t], 1)
    q = posterior(model, observations, [-7.5, -0.2, 3.0], path)
    vartheta = torch.tensor([[-7.5, -0.2, 3.0]], dtype=torch.float64)
    noise = q.draw_path_noise(1, torch.Generator().manual_seed(3))
    noise[:, :, 1] -= 3.0  # few boys, so that the cut matters
    size, step = noise.numel(), 1e-5
    moves = step * torch.eye(size, dtype=torch.float64).view(size, *noise.shape[1:])
    many = vartheta.expand(size, -1)
    ends = [q.path(noise + sign * moves, many)[0][:, q.first :] for sign in (1, -1)]
    jacobian = ((ends[0] - ends[1]) / (2 * step)).flatten(1)
    x, log_q = q.path(noise, vartheta)
    assert x[..., 1].min() < 0.3
    expected = Normal(0.0, 1.0).log_prob(noise).sum() - torch.linalg.slogdet(jacobian).logabsdet
    assert_close(log_q[0], expected, rtol=0, atol=1e-5)


def test_a_cut_normal_is_scipys():
    low, z = (
        torch.tensor([-12.0, -1.0, 0.5, 3.0]).double(),
        torch.tensor([1.3, -0.4, -2.0, 0.1]).double(),
    )
    t, log_mass = above(low, z)
    law = stats.truncnorm(low.numpy(), np.inf)
    assert t.numpy() == pytest.approx(law.ppf(stats.norm.cdf(z.numpy())), rel=1e-8)
    assert (stats.norm.logpdf(t) - log_mass.numpy()) == pytest.approx(law.logpdf(t), abs=1e-8)


def test_a_steered_normal_is_the_product_of_two():
    """Dense matrices; kills a pull or a precision on the wrong side."""
    a, b = (
        m @ m.mT + 0.1 * torch.eye(3)
        for m in torch.randn(2, 3, 3, generator=torch.Generator()).double()
    )
    pull = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    mean, tril = steered(a[..., None], b[..., None], pull[:, None])
    cov = torch.linalg.inv(torch.linalg.inv(a) + b)
    assert_close(mean[:, 0], cov @ pull)
    assert_close(tril[..., 0], torch.linalg.cholesky(cov))


def test_a_reading_without_noise_pins_the_steps_before_it():
    """Its information, 1e16, is taken as 1e12; kills a look ahead that loses the rest of it."""
    one = torch.ones(3, 1, 1, 1, dtype=torch.float64)
    model = Transitions(one, 0 * one[:, 0], one)
    y = torch.tensor([[0.0], [0.0], [5.0]], dtype=torch.float64)
    data = Readings(y, one[..., 0], torch.full((1, 1), 1e-16, dtype=torch.float64), [[], [], [0]])
    precision, pull = look_ahead(model, data)
    assert precision.flatten().tolist() == pytest.approx([0.5, 1.0, 0.0], rel=1e-3)
    assert pull.flatten().tolist() == pytest.approx([2.5, 5.0, 0.0], rel=1e-3)


def test_readings_of_little_noise_cost_no_weight():
    """The gap was 0.20 nats at σ = 0.05; kills a reading that is linearised where the step ends."""
    model, observations = outbreak()
    t = observations.grid().t[:, None]
    path = torch.cat([762 - 1.2 * (1.08 * t).exp(), (1.08 * t).exp()], 1)
    place = [-6.0, -0.8, -3.0]
    q, vartheta = posterior(model, observations, place, path), torch.tensor(place).double()
    lw = log_weights(q, model, observations, vartheta, 400)
    assert float(torch.logsumexp(lw, 0) - math.log(400) - lw.mean()) < 1.0


@pytest.mark.parametrize("dt", [0.1, 0.02])
def test_a_finer_grid_costs_no_weight(dt):
    """The gap was 0.13 nats at 0.1 and 0.05 at 0.02; kills a diffusion that is not the path's."""
    model, observations = outbreak(dt)
    t = observations.grid().t[:, None]
    path = torch.cat([762 - 1.2 * (1.08 * t).exp(), (1.08 * t).exp()], 1)
    q = posterior(model, observations, [-6.0, -0.8, 1.5], path)
    vartheta = torch.tensor([-6.0, -0.8, 1.5], dtype=torch.float64)
    lw = log_weights(q, model, observations, vartheta, 400)
    assert float(torch.logsumexp(lw, 0) - math.log(400) - lw.mean()) < 0.3


def test_a_guided_fit_takes_one_step_and_can_be_kept(tmp_path):
    """Kills steps that train nothing, a verdict on one step, and a family that is not stored."""
    model, observations = spring([0.4, -0.2])
    fit = lib.fit(model, observations, lib.FitConfig.guided(), progress=False)
    assert fit.converged and "no weights to train" in fit.reason and len(fit.history.step) == 1
    report = fit.diagnostics(2000)
    assert 0 <= report.log_evidence - report.elbo < 0.1, report.verdict
    fit.save(tmp_path / "fit.pt")
    again = lib.load_fit(tmp_path / "fit.pt", model, observations)
    assert torch.equal(again.draws(30).x, fit.draws(30).x)
    longer = lib.fit(model, observations, resume=fit, progress=False)
    assert len(longer.history.step) == 2 and longer.converged


def test_a_fit_without_training_whose_elbo_is_lost_has_not_converged(monkeypatch):
    """Kills a verdict that does not look at the one ELBO that there is."""
    monkeypatch.setattr("lib.train.elbo", lambda *args, **options: lost)
    value = torch.tensor(math.nan)
    lost = Elbo(value, torch.zeros(()), *torch.full((6, 40), math.nan))
    model, observations = spring([0.4, -0.2])
    fit = lib.fit(model, observations, lib.FitConfig.guided(refits=0), progress=False)
    assert not fit.converged and "skipped" in fit.reason


def test_flows_and_guided_steps_exclude_each_other():
    with pytest.raises(ValueError, match="guided needs base=True and num_flows=0"):
        lib.Family(guided=True)
    with pytest.raises(ValueError, match="base=False"):
        lib.Family(guided=True, num_flows=0, base=False)
