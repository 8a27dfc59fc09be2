"""The linearised model: exact for linear ones, otherwise Itô's formula and its slopes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import LogNormal, Normal

import lib
from lib.elbo import log_ratio
from lib.family import Family
from lib.linearised import Linearised, range_map
from lib.posterior import VariationalPosterior
from lib.start import Start

ALONE = Family(num_flows=0, theta_flows=0)
Y = [[1.0], [math.nan], [0.4], [-0.2], [math.nan], [1.3]]


def smoother(
    model: lib.StateSpaceModel, data: lib.Observations, path: Tensor | None = None
) -> VariationalPosterior:
    """q(x | ϑ) without any flow on it, linearised about a path."""
    d, shape = model.num_theta, (data.num_steps + 1, model.num_states)
    path = torch.full(shape, 0.7, dtype=torch.float64) if path is None else path
    start = Start(torch.zeros(d).double(), torch.ones(d).double(), path, torch.ones_like(path))
    return VariationalPosterior(model, data.grid(), ALONE, start, 0)


def weights(model: lib.StateSpaceModel, data: lib.Observations, vartheta: Tensor) -> Tensor:
    """log p(x, y | ϑ) − log q(x | ϑ) of drawn paths, (draws, ϑ)."""
    q, g = smoother(model, data), torch.Generator().manual_seed(0)
    ratios = [log_ratio(model, q, data.grid(), vartheta, g) for _ in range(3)]
    return torch.stack(ratios) - model.log_prior(vartheta)


def ou(x0: object) -> lib.StateSpaceModel:
    seen = lib.GaussianObservation([[1.0]], 0.5)
    return lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), seen, Normal(torch.zeros(3), 2.0), x0)


X0 = {"known": (1.5, 0.0, None), "normal": (0.3, 0.49, None), "seen": (0.3, 0.49, 0.8)}


@pytest.mark.parametrize("kind", X0)
def test_every_path_of_ou_has_the_weight_that_the_forward_filter_gives(kind: str) -> None:
    """Kills a wrong prior of x_0, a lost reading at t_0, and any slip of the linearisation."""
    a, c, y0 = X0[kind]
    y = torch.tensor(Y, dtype=torch.float64)
    model = ou([a] if kind == "known" else {"x": Normal(a, math.sqrt(c))})
    times = 0.1 * np.arange(1, 7)
    data = lib.Observations(times, y, dt=0.1)
    if y0 is not None:
        data = lib.Observations([0.0, *times], torch.cat([torch.tensor([[y0]]), y]), dt=0.1)
    vartheta = torch.randn(4, 3, dtype=torch.float64)
    found = weights(model, data, vartheta)
    transition = lib.ou_transition(model.to_theta(vartheta), 0.1, exact=False)
    right = lib.forward_filter(y[:, 0], transition, a, c, 0.25, y0=y0).log_likelihood
    # A random x_0 is matched to sampled quantiles of its prior: only nearly a normal's own.
    if kind == "known":
        torch.testing.assert_close(found, right.expand_as(found), rtol=1e-9, atol=1e-9)
    else:
        assert (found - right).abs().max() < 0.1


class Rotation(lib.SDE):
    """Two linear states with a correlated, constant β."""

    state_names, theta_names = ("a", "b"), ("turn", "pull")

    def drift(self, t, x, theta):
        turn, pull = theta.unbind(-1)
        a, b = x.unbind(-1)
        return torch.stack((turn * b - pull * a, -turn * a - pull * b + t[..., 0]), -1)

    def diffusion(self, t, x, theta):
        beta = torch.tensor([[0.5, 0.2], [0.2, 0.4]], dtype=x.dtype)
        return beta.expand(*x.shape[:-1], 2, 2)


def test_weights_of_a_linear_model_with_two_states_are_constant() -> None:
    seen = lib.GaussianObservation([[1.0, 0.5], [-0.3, 1.0]], ("s", 0.3))
    prior = Normal(torch.zeros(3), 1.0)
    model = lib.StateSpaceModel(Rotation(), seen, prior, [0.2, -0.1])
    y = torch.randn(5, 2, dtype=torch.float64)
    y[1, 0] = y[3, 1] = math.nan
    data = lib.Observations(0.2 * np.arange(1, 6), y, dt=0.1)
    vartheta = torch.randn(4, 3, dtype=torch.float64).clamp(max=0.0)
    found = weights(model, data, vartheta)
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("seen_at_0", [False, True])
@pytest.mark.parametrize("kind", ["ou", "both", "one"])
def test_with_the_exact_prior_of_x0_weights_are_constant(kind: str, seen_at_0: bool) -> None:
    """Kills slopes, times or readings one step off where x_0 is part of the path."""
    mean, sd = torch.tensor([0.3, -0.4]), torch.tensor([0.7, 0.5])
    if kind == "ou":
        mean, sd, model = mean[:1], sd[:1], ou({"x": Normal(0.3, 0.7)})
    else:
        x0 = {"a": Normal(0.3, 0.7), "b": Normal(-0.4, 0.5) if kind == "both" else -0.4}
        sd = sd if kind == "both" else torch.tensor([0.7, 0.0])
        seen = lib.GaussianObservation([[1.0], [-0.3]], 0.5)
        model = lib.StateSpaceModel(Rotation(), seen, Normal(torch.zeros(2), 1.0), x0)
    y = torch.tensor([[0.8 if seen_at_0 else math.nan], *Y])
    data = lib.Observations(0.1 * np.arange(7), y, dt=0.1)
    vartheta = torch.randn(4, model.num_theta)
    q, g = smoother(model, data), torch.Generator().manual_seed(0)
    free = torch.where(sd > 0, mean - q.loc0[0], 0.0)
    q.linearised().prior = free, sd.square().diag()
    ratios = [log_ratio(model, q, data.grid(), vartheta, g) for _ in range(3)]
    found = torch.stack(ratios) - model.log_prior(vartheta)
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=0, atol=1e-9)
    if kind == "ou":
        transition = lib.ou_transition(model.to_theta(vartheta), 0.1, exact=False)
        y0 = 0.8 if seen_at_0 else None
        right = lib.forward_filter(y[1:, 0], transition, 0.3, 0.49, 0.25, y0=y0).log_likelihood
        torch.testing.assert_close(found, right.expand_as(found), rtol=0, atol=1e-9)


def test_prior_of_x0_has_its_median_and_spread_in_u() -> None:
    """Within 5 standard errors of 10⁴ draws; kills quantiles of x in place of u, and no square."""
    model, data = sir({"S": 40.0, "I": LogNormal(1.0, 0.5)})
    linearised = smoother(model, data).linearised()
    mean, variance = linearised.prior
    x = LogNormal(1.0, 0.5).icdf(torch.tensor([0.16, 0.5, 0.84]))
    low, median, high = torch.log(torch.expm1(2 * x.sqrt()))
    assert abs(mean[1] + linearised.loc[0, 1] - median) < 5 * 1.25 * (high - low) / 2 / 100
    assert variance[1, 1].sqrt() == pytest.approx(float(high - low) / 2, rel=0.06)
    assert mean[0] == 0 and variance[0].eq(0).all() and variance[1, 0] == 0


class Growth(lib.SDE):
    """Geometric Brownian motion."""

    state_names, theta_names, positive_theta = ("x",), ("mu", "s"), ("s",)
    positive_state = True

    def drift(self, t, x, theta):
        return theta[..., :1] * x

    def diffusion(self, t, x, theta):
        return (theta[..., 1:] * x).square()[..., None]


@pytest.mark.parametrize("kind", ["growth", "sir"])
def test_transitions_are_the_slopes_of_itos_formula(kind: str) -> None:
    """Kills a lost ½h''β, a slope taken at the wrong time, and β without its slopes."""
    if kind == "sir":
        sde, x0, F = lib.SIR(), [50.0, 3.0], [[0.0], [1.0]]
        vartheta = torch.tensor([[-5.0, -1.0]], dtype=torch.float64)
    else:
        sde, x0, F = Growth(), [2.0], [[1.0]]
        vartheta = torch.tensor([[0.3, -1.0]], dtype=torch.float64)
    p, dt = len(x0), 0.1
    model = lib.StateSpaceModel(
        sde, lib.GaussianObservation(F, 1.0), Normal(torch.zeros(2), 2.0), x0
    )
    data = lib.Observations([0.1, 0.2, 0.3], torch.ones(3, 1), dt=dt)
    path = torch.tensor(x0) * torch.tensor([1.0, 1.2, 0.8, 0.5], dtype=torch.float64)[:, None]
    to_range = range_map(model, 3)
    loc, theta = to_range.inverse(path[1:]), model.to_theta(vartheta)
    found = Linearised(model, data.grid(), loc).transitions(theta)
    before = torch.cat([to_range.inverse(path[:1].expand(3, -1))[:1], loc[:-1]])

    def h(u: Tensor) -> Tensor:
        return 0.25 * torch.nn.functional.softplus(u).square()

    def first(u: Tensor) -> Tensor:
        return 0.5 * torch.nn.functional.softplus(u) * torch.sigmoid(u)

    def ahead(u: Tensor) -> Tensor:
        x, slope, s = h(u), first(u), torch.sigmoid(u)
        bend = 0.5 * (s.square() + torch.nn.functional.softplus(u) * s * (1 - s))
        beta = sde.diffusion(torch.zeros(1), x, theta[0]).diagonal()
        drift = sde.drift(torch.zeros(1), x, theta[0])
        return u + dt * (drift / slope - 0.5 * bend * beta / slope**3)

    for i in range(3):
        u = before[i]
        torch.testing.assert_close(found.c[i, :, 0], ahead(u) - loc[i], rtol=1e-7, atol=1e-7)
        slopes = torch.autograd.functional.jacobian(ahead, u)
        torch.testing.assert_close(found.F[i, ..., 0], slopes, rtol=1e-5, atol=1e-6)
        inverse = torch.diag(1 / first(u))
        Q = dt * inverse @ sde.diffusion(torch.zeros(1), h(u), theta[0]) @ inverse
        torch.testing.assert_close(found.Q[i, ..., 0], Q, rtol=1e-9, atol=1e-12)
    assert found.c.shape == (3, p, 1)


def sir(x0: object = (40.0, 3.0)) -> tuple[lib.StateSpaceModel, lib.Observations]:
    seen = lib.GaussianObservation([[0.0], [1.0]], "sigma")
    model = lib.StateSpaceModel(lib.SIR(), seen, Normal(torch.zeros(3), 3.0), x0)
    return model, lib.Observations([0.5, 1.0, 1.5], [[4.0], [0.0], [6.0]], dt=0.1)


def test_readings_with_next_to_no_noise_pin_a_positive_state() -> None:
    """Kills a reading linearised about the path, which would be off by the curve of h."""
    model, data = sir()
    path = torch.tensor([[30.0, 4.0]], dtype=torch.float64).expand(16, -1).contiguous()
    q = smoother(model, data, path)
    vartheta = torch.tensor([[-4.0, -1.0, -9.0]], dtype=torch.float64).expand(500, -1)
    noise = q.draw_path_noise(500, torch.Generator().manual_seed(0))
    x = q.path(noise, vartheta)[0][..., 1]
    assert x.isfinite().all() and (x > 0).all()
    off = (x[:, [5, 15]] - torch.tensor([4.0, 6.0])).abs()
    assert off.max() < 6 * math.exp(-9.0) and off.mean() > 0.1 * math.exp(-9.0)


def test_a_positive_state_read_as_next_to_nothing_stays_above_it() -> None:
    """Kills a reading linearised at or below 0, where u has no slope left."""
    model = sir()[0]
    data = lib.Observations([0.5, 1.0, 1.5], [[0.0], [-2.0], [1e-6]], dt=0.1)
    path = torch.tensor([[30.0, 4.0]]).expand(16, -1).contiguous()
    q = smoother(model, data, path)
    vartheta = torch.tensor([[-4.0, -1.0, -9.0]]).expand(500, -1)
    x, log_q = q.path(q.draw_path_noise(500, torch.Generator().manual_seed(0)), vartheta)
    assert (x > 0).all() and x.isfinite().all() and log_q.isfinite().all()
    assert (x[:, [5, 10, 15], 1] < 4e-3).all()


def test_what_is_known_of_x0_stays_and_the_rest_is_drawn() -> None:
    model, data = sir({"S": 40.0, "I": LogNormal(1.0, 0.5)})
    path = torch.tensor([[30.0, 4.0]], dtype=torch.float64).expand(16, -1).contiguous()
    q = smoother(model, data, path)
    noise = q.draw_path_noise(2000, torch.Generator().manual_seed(0))
    vartheta = torch.tensor([[-5.0, -1.0, 3.0]], dtype=torch.float64).expand(2000, -1)
    x, log_q = q.path(noise, vartheta)
    assert (x[:, 0, 0] == 40.0).all() and log_q.isfinite().all()
    assert x[:, 0, 1].std() > 0.3
    chain = q.chain(vartheta[:2])
    for part in (chain.a[0], chain.log_diag[0], chain.mean[0], chain.log_sd[0]):
        assert (part[..., 0, :] == 0).all()


def test_noise_beyond_the_spread_of_the_data_is_capped() -> None:
    model, data = sir()
    linearised = smoother(model, data).linearised()
    sd = float(torch.tensor([4.0, 0.0, 6.0]).std(correction=0))
    vartheta = torch.tensor([[-4.0, -1.0, s] for s in (math.log(sd), 9.0, 20.0)]).double()
    for part in linearised(vartheta):
        torch.testing.assert_close(part, part[..., :1].expand_as(part))


def test_sigma_may_be_a_function_of_parameters() -> None:
    seen = lib.GaussianObservation([[1.0]], lambda named: 0.1 * named["theta3"])
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(), seen, Normal(torch.zeros(3), 1.0), x0=[1.0]
    )
    data = lib.Observations(0.1 * np.arange(1, 7), Y, dt=0.1)
    found = weights(model, data, torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-10, atol=1e-9)
