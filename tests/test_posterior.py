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
from lib.gauss_markov import GaussMarkovTrace
from lib.posterior import Noise, VariationalPosterior
from lib.sde import SDE, SIR, OrnsteinUhlenbeck
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
    "base alone": Family(num_flows=0, theta_flows=0),
    "no base": Family(num_flows=1, base=False, taps=False, coupling=False),
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
    """Kills a missing log scale, a wrong sign of log h', an unmasked fixed component of x_0."""
    case = PROBLEMS[name](num_steps)
    q, free = posterior(case, FAMILIES[family]), free_states(case)
    noise = noise_for(q, 2)
    used = free[-noise.path.shape[1] :]
    sample = q(noise)
    for n in range(2):

        def mapped(theta: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
            draw = q(Noise(theta[None], path[None]))
            return draw.vartheta[0], draw.x[0]

        inputs = (noise.theta[n], noise.path[n])
        (by_theta, by_path), (x_by_theta, x_by_path) = torch.autograd.functional.jacobian(
            mapped, inputs
        )
        assert (by_path == 0).all()
        assert (x_by_path[~free] == 0).all() and (x_by_theta[~free] == 0).all()
        assert (x_by_path[..., ~used] == 0).all()
        square = x_by_path[free][:, used]
        log_q_theta = log_normal(inputs[0]) - torch.linalg.slogdet(by_theta).logabsdet
        log_q_x = log_normal(inputs[1][used]) - torch.linalg.slogdet(square).logabsdet
        assert_close(sample.log_q_theta[n], log_q_theta)
        assert_close(sample.log_q_x[n], log_q_x)


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

    def trace(self, z: Tensor, features: Tensor, theta: Tensor) -> GaussMarkovTrace:
        return GaussMarkovTrace(z, z, z, y=z, log_diag=torch.zeros_like(z))


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


def test_base_looks_ahead_to_the_end() -> None:
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


@pytest.mark.parametrize("family", ["paper", "study"])
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
def test_learned_scaling_starts_at_the_given_path_and_spread(name: str) -> None:
    """With no flow between, x = h(loc + scale z): value and slope at z = 0 are the start's."""
    case = PROBLEMS[name](4)
    q = posterior(case, Family(num_flows=0, base=False, theta_flows=0), perturb=0.0)
    noise = Noise(*(torch.zeros_like(part) for part in noise_for(q, 1)))
    free = free_states(case)
    assert_close(q(noise).vartheta[0], case.start.vartheta)
    assert_close(q(noise).x[0][free], case.start.path[free])
    size = noise.path.shape[1]
    slope = torch.autograd.functional.jacobian(
        lambda path: q(noise._replace(path=path)).x[0, -size:].flatten(), noise.path
    ).flatten(1)
    used = free[-size:].flatten()
    assert_close(slope.diagonal()[used], case.start.path_sd[-size:].flatten()[used])
    spread = torch.autograd.functional.jacobian(
        lambda theta: q(noise._replace(theta=theta)).vartheta[0], noise.theta
    )[:, 0]
    assert_close(spread, case.start.vartheta_sd.diag())


@pytest.mark.parametrize("name", PROBLEMS)
def test_default_family_starts_near_the_given_path(name: str) -> None:
    case = PROBLEMS[name](4)
    q, free = posterior(case, Family(), perturb=0.0), free_states(case)
    sample = q(Noise(*(torch.zeros_like(part) for part in noise_for(q, 1))))
    assert ((sample.x[0] - case.start.path) / case.start.path_sd)[free].abs().max() < 0.1
    assert ((sample.vartheta[0] - case.start.vartheta) / case.start.vartheta_sd).abs().max() < 0.3


@pytest.mark.parametrize("unit", [1.0, 2.5])
def test_constant_scaling_is_one_unit_for_all_and_not_learned(unit: float) -> None:
    """x = unit·h(z), a change of units. Kills h(unit·z), which bends ever more sharply instead."""
    case = PROBLEMS["p = 2, x_0 random"](4)
    q = posterior(case, replace(Family.paper(unit=unit), num_flows=0))
    noise = noise_for(q, 3)
    u = noise.path
    expected = torch.stack([(1 + u[..., 0].exp()).log(), u[..., 1]], -1)
    assert_close(q(noise).x, unit * expected)
    learned = {name for name, weight in q.named_parameters() if weight.requires_grad}
    assert not learned & {"shift", "stretch"}


@pytest.mark.parametrize("standardise", [True, False])
def test_networks_see_standardised_theta(standardise: bool) -> None:
    """Another centre and unit of ϑ must not move x; fed raw, ϑ does move it."""
    case = PROBLEMS["p = 1, x_0 fixed"](4)
    scale, shift = torch.tensor([10.0, 0.1, 3.0]), torch.tensor([100.0, -1.0, 0.0])
    start = case.start
    other = start._replace(vartheta=start.vartheta + shift, vartheta_sd=start.vartheta_sd * scale)
    family = Family(standardise_theta=standardise)
    here, there = posterior(case, family), posterior(case._replace(start=other), family)
    noise = noise_for(here, 5)
    same = torch.isclose(here(noise).x[:, 1:], there(noise).x[:, 1:])
    assert same.all() if standardise else not same.any()


def test_paper_preset_is_that_of_appendix_b() -> None:
    q = posterior(PROBLEMS["p = 2, x_0 fixed"](12), Family.paper())
    assert len(q.layers) == 5 and q.base is None
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
        ({"scaling": "none"}, "scaling must be one of .*learned.*; got 'none'"),
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
