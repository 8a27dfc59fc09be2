"""q(ϑ, x) as a whole: log q against the Jacobian of noise → (ϑ, x), directions, x_0, presets."""

import copy
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import LogNormal, Normal, Pareto, Uniform
from torch.testing import assert_close

from lib.data import Grid, Observations
from lib.family import Family, check_options
from lib.local_iaf import LocalIAFTrace
from lib.network import NetworkTrace
from lib.posterior import Noise, Sample, VariationalPosterior
from lib.sde import SDE, SIR, OrnsteinUhlenbeck
from lib.smoother import Chain
from lib.ssm import GaussianObservation, StateSpaceModel
from lib.start import Start


class Pair(SDE):
    """Two states, the first one positive."""

    state_names, theta_names = ("a", "b"), ("rate", "noise")
    positive_theta, positive_state = ("noise",), ("a",)

    def drift(self, t, x, theta):
        return theta[..., :1] * x.flip(-1)

    def diffusion(self, t, x, theta):
        return torch.diag_embed(theta[..., 1:].square().expand_as(x))


class Problem(NamedTuple):
    """A model, data on its grid, and where q starts."""

    model: StateSpaceModel
    grid: Grid
    start: Start


def problem(sde: SDE, x0: object, num_steps: int = 4) -> Problem:
    p, d, n = sde.num_states, sde.num_theta, num_steps + 1
    prior = Normal(torch.full((d,), -3.0), torch.ones(d))
    observation = GaussianObservation(torch.eye(p)[:, -1:], 1.0)
    grid = Observations([0.1, 0.1 * num_steps] if n > 2 else [0.1], [3.0, 1.0][: n - 1], 0.1).grid()
    path = 0.5 + 3 * torch.rand(n, p)
    start = Start(torch.randn(d), 0.1 + torch.rand(d), path, 0.2 * path)
    return Problem(StateSpaceModel(sde, observation, prior, x0), grid, start)


def normal(p: int) -> Normal:
    return Normal(torch.ones(p), torch.ones(p))


PROBLEMS = {
    "p = 1, x_0 fixed": lambda n: problem(OrnsteinUhlenbeck(), torch.tensor([20.0]), n),
    "p = 1, x_0 random": lambda n: problem(OrnsteinUhlenbeck(), normal(1), n),
    "p = 2, x_0 fixed": lambda n: problem(SIR(), torch.tensor([762.0, 1.0]), n),
    "p = 2, x_0 random": lambda n: problem(
        Pair(), {"a": LogNormal(0.0, 1.0), "b": Normal(0.0, 1.0)}, n
    ),
    "p = 2, a fixed": lambda n: problem(Pair(), {"a": 2.0, "b": Normal(0.0, 1.0)}, n),
    "p = 2, a in an interval, b above 0.4": lambda n: problem(
        Pair(), {"a": Uniform(0.5, 9.0), "b": Pareto(0.4, 3.0)}, n
    ),
    "p = 2, b fixed": lambda n: problem(Pair(), {"a": LogNormal(0.0, 1.0), "b": -0.5}, n),
}
FAMILIES = {
    "paper": Family.paper(),
    "paper, even, unit": replace(Family.paper(unit=2.5), num_flows=4, receptive_field=2),
    "study": Family(),
    "study, odd": Family(num_flows=3, receptive_field=2),
    "chain alone": Family(num_flows=0, theta_flows=0),
    "no chain": Family(num_flows=1, base=False, taps=False, coupling=False),
}


def posterior(
    case: Problem, family: Family, seed: int = 0, perturb: float = 0.3
) -> VariationalPosterior:
    """q with all that it learns moved away from the start, by the same amounts for one seed."""
    q = VariationalPosterior(*case[:2], family, case.start, seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in q.parameters():
            if parameter.requires_grad:
                step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                # By fan-in, or wide layers would push softplus so far out that no Jacobian is left.
                size = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.5
                parameter.add_(perturb * size * step)
    return q


def noise_for(q: VariationalPosterior, n: int, seed: int = 0) -> Noise:
    return q.draw_noise(n, torch.Generator().manual_seed(seed))


def free_states(case: Problem) -> Tensor:
    """Which entries of x (time, state), x_0 included, q has a density for."""
    free = torch.ones(case.start.path.shape, dtype=torch.bool)
    free[0] = ~case.model.x0_fixed
    return free


def log_normal(z: Tensor) -> Tensor:
    return (-0.5 * z.square() - 0.5 * math.log(2 * math.pi)).sum()


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_log_q_is_noise_density_over_jacobian_of_the_whole_map(
    name: str, family: str, num_steps: int
) -> None:
    """Kills a missing log scale, a wrong sign of log h', an unmasked fixed component of x_0.

    And the chain's log diagonal or log sd, left out or of the wrong sign.
    """
    case = PROBLEMS[name](num_steps)
    q, free = posterior(case, FAMILIES[family]), free_states(case)
    noise = noise_for(q, 2)
    used = free[-noise.path.shape[1] :]
    sample = q(noise)
    for n in range(2):
        inputs = (noise.theta[n], noise.path[n])
        by_theta = torch.autograd.functional.jacobian(
            lambda theta: q.theta_flow(theta[None])[0][0], inputs[0]
        )
        # At one ϑ: with the chain no gradient goes through ϑ, and none is needed here.
        theta = sample.vartheta[[n]].detach()
        x_by_path = torch.autograd.functional.jacobian(
            lambda path, theta=theta: q.path(path[None], theta)[0][0], inputs[1]
        )
        assert (x_by_path[~free] == 0).all() and (x_by_path[..., ~used] == 0).all()
        square = x_by_path[free][:, used]
        log_q_theta = log_normal(inputs[0]) - torch.linalg.slogdet(by_theta).logabsdet
        log_q_x = log_normal(inputs[1][used]) - torch.linalg.slogdet(square).logabsdet
        assert_close(sample.vartheta[n], q.theta_flow(noise.theta[[n]])[0][0])
        assert_close(sample.x[n], q.path(noise.path[[n]], sample.vartheta[[n]])[0][0])
        assert_close(sample.log_q_theta[n], log_q_theta)
        assert_close(sample.log_q_x[n], log_q_x)


def at_one_theta(q: VariationalPosterior, path: Tensor) -> Sample:
    """Paths of one ϑ, the chain of which is made once."""
    theta = noise_for(q, 1).theta
    chain = q.chain(q.theta_flow(theta)[0].detach())
    if chain is not None:
        chain = Chain(*(part.expand(*part.shape[:-1], len(path)) for part in chain))
    return q(Noise(theta.expand(len(path), -1), path, chain))


@pytest.mark.parametrize("family", ["study", "chain alone", "no chain"])
@pytest.mark.parametrize(
    "name, num_steps",
    [
        ("p = 1, x_0 fixed", 1),
        ("p = 1, x_0 fixed", 2),
        ("p = 1, x_0 random", 1),
        ("p = 2, x_0 fixed", 1),
    ],
)
def test_density_of_the_path_integrates_to_one(name: str, num_steps: int, family: str) -> None:
    """Σ q(x)·|cell| over the images of small cells of noise: no Jacobian, by trapezoids."""
    q = posterior(PROBLEMS[name](num_steps), FAMILIES[family], perturb=0.2)
    size = q.loc0.numel()
    side = torch.linspace(-7.0, 7.0, 4001 if size == 1 else 401)
    path = torch.cartesian_prod(*[side] * size).view(-1, *q.loc0.shape)
    with torch.no_grad():
        sample = at_one_theta(q, path)
    x = sample.x[:, -len(q.loc0) :].reshape(*[len(side)] * size, size)
    density = sample.log_q_x.exp().reshape(x.shape[:-1])
    if size == 1:
        total = torch.trapezoid(density, x[:, 0])
    else:
        one, other = x[1:, 1:] - x[:-1, :-1], x[1:, :-1] - x[:-1, 1:]
        area = 0.5 * (one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0]).abs()
        corners = density[1:, 1:] + density[:-1, :-1] + density[1:, :-1] + density[:-1, 1:]
        total = (0.25 * corners * area).sum()
    assert float(total) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", PROBLEMS)
def test_path_without_local_flows_is_the_chain_run_backwards(name: str) -> None:
    """x = h(loc0 + mean + sd·v), v_i = A_i v_{i+1} + L_i z_i, one time after the other.

    Kills a mean, sd or A of another time, and a chain run forward.
    """
    case = PROBLEMS[name](4)
    q = posterior(case, FAMILIES["chain alone"])
    noise = noise_for(q, 3)
    x = q(noise).x[:, q.first :]
    chain = q.chain(q(noise).vartheta)
    z, free = noise.path * q.free, q.free.bool()
    p, time = z.shape[2], z.shape[1]
    rows, columns = torch.tril_indices(p, p, -1)
    for n in range(3):
        later, u = torch.zeros(p), q.loc0.clone()
        for i in reversed(range(time)):
            lower = chain.log_diag[:, i, n].exp().diag()
            lower[rows, columns] = chain.entries[:, i, n]
            later = q.free[i] * (chain.a[:, :, i, n] @ later + lower @ z[n, i])
            u[i] += chain.mean[:, i, n] + chain.log_sd[:, i, n].exp() * later
        assert_close(x[n][free], q.to_range(u)[0][free])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_that_is_given_is_the_one_that_is_made(family: str) -> None:
    """Kills a chain that is ignored, and one made of another ϑ."""
    q = posterior(PROBLEMS["p = 2, a fixed"](4), FAMILIES[family])
    noise = noise_for(q, 4)
    chain = q.chain(q.theta_flow(noise.theta)[0].detach())
    assert (chain is None) == (not q.family.base)
    given = noise._replace(chain=chain)
    for draws in (q(given), q.trace(given).sample):
        assert all(a.equal(b) for a, b in zip(draws, q(noise), strict=True))
    if chain is not None:
        other = q(noise._replace(chain=chain._replace(mean=chain.mean + 1)))
        assert other.x[:, 1:].ne(q(noise).x[:, 1:]).all() and other.log_q_x.isfinite().all()


@pytest.mark.parametrize("family", ["study", "chain alone"])
def test_no_gradient_goes_through_theta_where_there_is_a_chain(family: str) -> None:
    q = posterior(PROBLEMS["p = 2, x_0 fixed"](4), FAMILIES[family])
    noise = noise_for(q, 3)
    noise.theta.requires_grad_()
    for sample in (q(noise), q(noise, 1), q.trace(noise).sample):
        assert not sample.vartheta.requires_grad and not sample.log_q_theta.requires_grad
        assert sample.x.requires_grad == (q.family.num_flows > 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_known_of_x_0_is_put_in_its_place(name: str, family: str) -> None:
    case = PROBLEMS[name](4)
    q = posterior(case, FAMILIES[family])
    x = q(noise_for(q, 3)).x
    fixed = case.model.x0_fixed
    assert x.shape == (3, 5, case.model.num_states)
    assert x[:, 0, fixed].equal(case.model.x0_value[fixed].expand(3, -1))
    assert (x[1:, free_states(case)] != x[0, free_states(case)]).all()


def test_x_0_stays_where_its_density_has_mass_and_later_states_do_not():
    """Kills an end that is lost, and one that holds for all times."""
    case = PROBLEMS["p = 2, a in an interval, b above 0.4"](4)
    q = posterior(case, FAMILIES["study"])
    noise = noise_for(q, 500)
    x = q(noise._replace(path=5 * noise.path)).x
    first, later = x[:, 0], x[:, 1:]
    assert (first[:, 0] > 0.5).all() and (first[:, 0] < 9).all() and (first[:, 1] > 0.4).all()
    assert (later[..., 0] < 0.5).any() and (later[..., 1] < 0.4).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_positive_states_are_positive_however_far_out(
    name: str, family: str, dtype: torch.dtype
) -> None:
    """Kills a softplus that underflows to 0 in float32, and log h' = log of an underflown slope."""
    case = PROBLEMS[name](4)
    q = posterior(case, FAMILIES[family]).to(dtype)
    noise = noise_for(q, 200)
    sample = q(noise._replace(path=100 * noise.path))
    positive = torch.tensor(case.model.positive_states)
    assert (sample.x[..., positive] > 0).all()
    assert sample.x.isfinite().all() and sample.log_q_x.isfinite().all()
    if (~positive).any():
        assert (sample.x[:, 1:, ~positive] < 0).any()


class Skip(torch.nn.Module):
    """In place of a layer: z' = z."""

    def trace(self, z: Tensor, features: Tensor, theta: Tensor) -> LocalIAFTrace:
        network = NetworkTrace(z, [], theta, None)
        return LocalIAFTrace(z, z, network, None, y=z, log_diag=torch.zeros_like(z))


def keep_layer(q: VariationalPosterior, kept: int) -> VariationalPosterior:
    for other in range(len(q.layers)):
        if other != kept:
            q.layers[other] = Skip()
    return q


def states_moved_by_noise(q: VariationalPosterior) -> Tensor:
    """Which free times of x depend on which times of noise, in any of many draws."""
    noise = noise_for(q, 16)
    size = noise.path.shape[1]
    jacobian = torch.autograd.functional.jacobian(
        lambda path: q(noise._replace(path=path)).x[:, -size:].sum(0), noise.path
    )
    return jacobian.abs().sum((1, 2, 4)) > 0


LAYERS = {
    "paper": replace(Family.paper(), num_flows=4, receptive_field=2),
    "study": Family(num_flows=4, receptive_field=2, base=False),
}


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("name", ["p = 1, x_0 fixed", "p = 2, x_0 random"])
def test_layers_look_back_and_ahead_in_turn(name: str, family: str, layer: int) -> None:
    """Kills a composition that does not reverse, or does not reverse back."""
    q = keep_layer(posterior(PROBLEMS[name](6), LAYERS[family]), layer)
    seen = states_moved_by_noise(q)
    size = len(seen)
    ones = torch.ones(size, size, dtype=torch.bool)
    band = ones.tril() & ones.triu(-2)
    assert seen.equal(band if layer % 2 == 0 else band.T)


def test_chain_looks_ahead_to_the_end() -> None:
    q = posterior(PROBLEMS["p = 2, x_0 fixed"](6), Family(num_flows=0))
    assert states_moved_by_noise(q).equal(torch.ones(6, 6, dtype=torch.bool).triu())


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["p = 1, x_0 fixed", "p = 1, x_0 random"])
def test_data_move_the_states_whose_window_they_are_in(name: str, layer: int) -> None:
    """Kills features of the past in a layer that runs backwards, and a window with y_i in it."""
    case, k = PROBLEMS[name](6), 2
    first = 0 if case.model.x0_random else 1

    def path_given(y: Tensor) -> Tensor:
        grid = case.grid._replace(y=y, observed=torch.ones_like(y))
        q = keep_layer(posterior(case._replace(grid=grid), LAYERS["paper"]), layer)
        return q(noise_for(q, 8)).x[..., 0]

    y = torch.randn(7, 1)
    for j in range(7):
        moved = (path_given(y + 5.0 * torch.eye(7)[:, [j]]) != path_given(y)).any(0)
        near = range(j + 1, j + k + 1) if layer % 2 == 0 else range(j - k, j)
        assert moved.nonzero()[:, 0].tolist() == [i for i in near if first <= i <= 6]


@pytest.mark.parametrize("family", ["paper", "study"])
def test_seed_decides_weights_and_leaves_the_global_generator_alone(family: str) -> None:
    case = PROBLEMS["p = 2, x_0 fixed"](4)
    before = torch.get_rng_state()
    first, other = (posterior(case, FAMILIES[family], seed, perturb=0.0) for seed in (1, 2))
    noise = noise_for(first, 3)
    draws = first(noise)
    assert torch.get_rng_state().equal(before)
    torch.randn(17)
    again = posterior(case, FAMILIES[family], 1, perturb=0.0)
    assert all(a.equal(b) for a, b in zip(draws, again(noise), strict=True))
    weights, others = first.state_dict(), other.state_dict()
    assert all(weights[key].equal(value) for key, value in again.state_dict().items())
    drawn = [key for key in weights if key.endswith("weight") and (weights[key] != 0).any()]
    assert drawn and not any(weights[key].equal(others[key]) for key in drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_a_pure_function_of_noise_one_by_one(family: str) -> None:
    q = posterior(PROBLEMS["p = 2, a fixed"](4), FAMILIES[family])
    noise = noise_for(q, 5)
    first = q(noise)
    q(noise_for(q, 7, seed=9))
    assert all(a.equal(b) for a, b in zip(first, q(noise), strict=True))
    alone = q(Noise(noise.theta[3:4], noise.path[3:4]))
    for a, b in zip(first, alone, strict=True):
        assert_close(a[3:4], b)


@pytest.mark.parametrize("family", ["paper", "no chain"])
@pytest.mark.parametrize("wide", [1, 3, 5])
def test_wide_draws_are_draws_whose_theta_takes_no_gradient(family: str, wide: int) -> None:
    """Kills wide draws at the wrong end or place, and a gradient that reaches q(ϑ) through x."""
    q = posterior(PROBLEMS["p = 2, x_0 fixed"](4), FAMILIES[family])
    noise = noise_for(q, 5)
    sample, plain = q(noise, wide), q(noise)
    for draws in (sample, q.trace(noise, wide).sample):
        assert all(a.equal(b) for a, b in zip(draws, plain, strict=True))

    def by_theta_flow(x: Tensor) -> list[Tensor]:
        weights = list(q.theta_flow.parameters())
        value = x.square().sum() + 0 * weights[0].sum()
        return list(torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True))

    inner = 5 - wide
    for part, same in ((sample.x, plain.x), (sample.vartheta, plain.vartheta)):
        assert all((g == 0).all() for g in by_theta_flow(part[inner:]))
        for got, expected in zip(by_theta_flow(part), by_theta_flow(same[:inner]), strict=True):
            assert_close(got, expected)
    sample.x[inner:].sum().backward()
    assert any(w.grad is not None and w.grad.any() for w in q.layers.parameters())
    assert sample.log_q_theta[inner:].requires_grad


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_single_precision_agrees_with_double(name: str, family: str) -> None:
    q = posterior(PROBLEMS[name](4), FAMILIES[family])
    single, noise = copy.deepcopy(q).float(), noise_for(q, 20)
    draws = single(Noise(noise.theta.float(), noise.path.float()))
    for a, b in zip(draws, q(noise), strict=True):
        assert a.dtype == torch.float32
        assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_noise_is_reproducible_and_of_the_size_of_what_q_draws() -> None:
    for name, time in {"p = 2, x_0 fixed": 4, "p = 2, b fixed": 5}.items():
        q = posterior(PROBLEMS[name](4), Family())
        noise, again = noise_for(q, 3), noise_for(q, 3)
        assert noise.theta.shape == (3, 2) and noise.path.shape == (3, time, 2)
        assert noise.path.equal(again.path) and noise.theta.equal(again.theta)
        assert noise_for(q.float(), 3).path.dtype == torch.float32


@pytest.mark.parametrize("name", PROBLEMS)
def test_parameters_start_at_their_given_centre_and_spread(name: str) -> None:
    case = PROBLEMS[name](4)
    q = posterior(case, FAMILIES["chain alone"], perturb=0.0)
    zero = torch.zeros_like(noise_for(q, 1).theta)
    assert_close(q.theta_flow(zero)[0][0], case.start.vartheta)
    spread = torch.autograd.functional.jacobian(lambda z: q.theta_flow(z)[0][0], zero)[:, 0]
    assert_close(spread, case.start.vartheta_sd.diag())
    q = posterior(case, Family(), perturb=0.0)
    off = q.theta_flow(zero)[0][0] - case.start.vartheta
    assert (off / case.start.vartheta_sd).abs().max() < 0.3


@pytest.mark.parametrize("name", PROBLEMS)
def test_local_flows_start_near_the_chain(name: str) -> None:
    """In units of the chain's sd at each time and state."""
    case = PROBLEMS[name](4)
    q = posterior(case, Family(theta_flows=0), perturb=0.0)
    alone = posterior(case, Family(theta_flows=0, num_flows=0), perturb=0.0)
    noise = noise_for(q, 20)
    log_sd = q.chain(q(noise).vartheta).log_sd
    trace, other = q.trace(noise), alone.trace(noise)
    assert_close(trace.sample.vartheta, other.sample.vartheta)
    off = (trace.u - other.u).permute(2, 1, 0) / log_sd.exp()
    assert off.abs().max() < 0.3


@pytest.mark.parametrize("unit", [1.0, 2.5])
def test_without_the_chain_the_states_have_one_unit(unit: float) -> None:
    """x = unit·h(z), a change of units. Kills h(unit·z), which bends ever more sharply instead."""
    case = PROBLEMS["p = 2, x_0 random"](4)
    q = posterior(case, replace(Family.paper(unit=unit), num_flows=0))
    noise = noise_for(q, 3)
    u = noise.path
    expected = torch.stack([(1 + u[..., 0].exp()).log(), u[..., 1]], -1)
    assert_close(q(noise).x, unit * expected)
    assert q.chain(noise.theta) is None


@pytest.mark.parametrize("standardise", [True, False])
def test_networks_see_standardised_theta(standardise: bool) -> None:
    """Another centre and unit of ϑ must not move x; fed raw, ϑ does move it."""
    case = PROBLEMS["p = 1, x_0 fixed"](4)
    scale, shift = torch.tensor([10.0, 0.1, 3.0]), torch.tensor([100.0, -1.0, 0.0])
    start = case.start
    other = start._replace(vartheta=start.vartheta + shift, vartheta_sd=start.vartheta_sd * scale)
    family = Family(standardise_theta=standardise, base=False)  # the chain is of ϑ itself
    here, there = posterior(case, family), posterior(case._replace(start=other), family)
    noise = noise_for(here, 5)
    same = torch.isclose(here(noise).x[:, 1:], there(noise).x[:, 1:])
    assert same.all() if standardise else not same.any()


def test_paper_preset_is_that_of_appendix_b() -> None:
    q = posterior(PROBLEMS["p = 2, x_0 fixed"](12), Family.paper())
    assert len(q.layers) == 5 and q.chain(torch.zeros(1, 2)) is None
    assert q.features_ahead.shape == (12, 10)
    for layer in q.layers:
        widths = [m.out_features for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        assert layer.window == 10 and layer.gate == "sigmoid" and layer.taps is None
        assert set(widths) <= {20, 4} and not layer.coupling


def test_paper_networks_have_no_path_around_their_relus() -> None:
    """Kills a linear path from ϑ to the outputs, which appendix B does not have."""
    q = posterior(PROBLEMS["p = 1, x_0 fixed"](4), Family.paper())
    z, features = torch.zeros(6, 4, 1), q.features_ahead
    for layer in q.layers:
        torch.nn.init.zeros_(layer.network.out.weight)
        y, log_diag = layer(z, features, torch.randn(6, 3))
        for out in (y, log_diag):
            assert_close(out, out[:1].expand_as(out), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gate": "relu"}, "gate must be one of .*unbounded.*; got 'relu'"),
        ({"features": "future"}, "features must be one of .*centred.*; got 'future'"),
        ({"receptive_field": 0}, "receptive_field must be a whole number, 1 or more; got 0"),
        ({"hidden": -1}, "hidden must be a whole number, 1 or more; got -1"),
        ({"layers": 0}, "layers must be a whole number, 1 or more; got 0"),
        ({"theta_hidden": 0}, "theta_hidden must be a whole number, 1 or more; got 0"),
        ({"unit": 0.0}, "unit must be a positive number; got 0.0"),
        ({"unit": math.nan}, "unit must be a positive number; got nan"),
        ({"unit": math.inf}, "unit must be a positive number; got inf"),
        ({"num_flows": -1}, "num_flows must be a whole number, 0 or more; got -1"),
        ({"theta_flows": -2}, "theta_flows must be a whole number, 0 or more; got -2"),
    ],
)
def test_family_refuses_what_it_cannot_build(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Family(**changes)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"hidden": 2.5}, ValueError, "hidden must be a whole number, 1 or more; got 2.5"),
        ({"num_flows": "3"}, ValueError, "num_flows must be a whole number, 0 or more; got '3'"),
        ({"unit": "a"}, ValueError, "unit must be a positive number; got 'a'"),
        ({"base": "yes"}, TypeError, "base must be True or False; got 'yes'"),
    ],
)
def test_options_of_another_kind_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        check_options(SimpleNamespace(**asdict(Family()) | changes))
