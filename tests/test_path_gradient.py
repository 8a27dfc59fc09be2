"""The score of q and the path gradient, against dense Jacobians and against the plain gradient."""

import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close

import lib
from lib.elbo import elbo
from lib.gauss_markov import backward_scan, push_chain, run_chain
from lib.local_iaf import solve_band_transposed
from lib.maf import stretched
from lib.path_gradient import find_score, with_path_gradient
from lib.posterior import Noise, VariationalPosterior
from lib.smoother import Chain
from lib.start import find_start


class Linear(lib.SDE):
    """Three states that pull on each other; the second is positive."""

    state_names, theta_names = ("u", "v", "w"), ("rate", "shift")
    positive_theta, positive_state = ("rate",), ("v",)

    def drift(self, t, x, theta):
        rate, shift = theta.split(1, -1)
        return rate * (shift - x) + 0.1 * x.roll(1, -1)

    def diffusion(self, t, x, theta):
        return torch.eye(3).to(x).expand(*x.shape, 3) * (0.5 + theta[..., :1, None])


def linear(x0: object) -> tuple[lib.StateSpaceModel, lib.Observations]:
    model = lib.StateSpaceModel(
        Linear(),
        lib.GaussianObservation([[1.0], [0.0], [0.5]], "sigma"),
        Normal(torch.zeros(3), 0.5),
        x0,
    )
    return model, lib.Observations([0.2, 0.3, 0.7], [1.0, 2.0, 1.5], 0.1)


def scalar() -> tuple[lib.StateSpaceModel, lib.Observations]:
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 0.5),
        [2.0],
    )
    return model, lib.Observations([0.2, 0.6, 0.9], [1.0, 2.0, 1.5], 0.1)


X0 = {
    "fixed": [1.0, 2.0, 3.0],
    "random": Normal(torch.tensor([1.0, 3.0, 2.0]), 0.2),
    "mixed": {"u": Normal(1.0, 0.3), "v": 2.0, "w": Normal(0.0, 1.0)},
}
FAMILIES = {
    "study": lib.Family(receptive_field=3, num_flows=3),
    "no chain": lib.Family(receptive_field=3, base=False),
    "chain alone": lib.Family(receptive_field=3, num_flows=0),
    "uncoupled": lib.Family(receptive_field=3, coupling=False, taps=False, layers=1),
    "uncoupled, no chain": lib.Family(3, coupling=False, taps=False, layers=1, base=False),
    "paper": lib.Family.paper(),
}


def posterior(case: str, family: lib.Family) -> tuple[lib.StateSpaceModel, VariationalPosterior]:
    """q with every weight moved away from its start."""
    model, data = scalar() if case == "scalar" else linear(X0[case])
    grid = data.grid()
    q = VariationalPosterior(model, grid, family, find_start(model, grid, 0), seed=1)
    with torch.no_grad():
        for weight in q.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    return model, q


def dense_score(q: VariationalPosterior, noise: torch.Tensor, theta: torch.Tensor):
    """∇ log q(x | ϑ) by ϑ and x at one draw: implicit differentiation with dense Jacobians."""
    free = q.free.bool().flatten()

    def run(theta: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = torch.zeros(len(free)).masked_scatter(free, z).view_as(noise)
        x, log_q = q.path(full[None], theta[None])
        return x[0, q.first :].flatten()[free], log_q[0]

    at = (theta, noise.flatten()[free])
    x_theta, x_z = torch.autograd.functional.jacobian(lambda *a: run(*a)[0], at)
    q_theta, q_z = torch.autograd.functional.jacobian(lambda *a: run(*a)[1], at)
    by_x = torch.linalg.solve(x_z.mT, q_z)
    return q_theta - x_theta.mT @ by_x, torch.zeros(len(free)).masked_scatter(free, by_x)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["scalar", *X0])
def test_score_is_that_of_dense_jacobians(case: str, family: str) -> None:
    """Kills a wrong window, sign, order of time, coupling, tap, gate or mask in any solve.

    With the chain no gradient goes through ϑ, so none is asked for; that by x goes through it all.
    """
    _, q = posterior(case, FAMILIES[family])
    noise = q.draw_noise(2, torch.Generator().manual_seed(3))
    trace = q.trace(noise)
    vartheta, score = trace.sample.vartheta, find_score(q, trace)
    for draw in range(2):
        by_theta, by_x = dense_score(q, noise.path[draw], vartheta[draw].detach())
        assert_close(score.theta_path[draw], 0 * by_theta if q.family.base else by_theta)
        assert_close(score.path[draw].flatten(), by_x)
    inverse = torch.autograd.functional.jacobian(lambda z: q.theta_flow(z)[0].sum(0), noise.theta)
    by_noise = torch.autograd.functional.jacobian(lambda z: q.theta_flow(z)[1].sum(), noise.theta)
    for draw in range(2):
        expected = torch.linalg.solve(inverse[:, draw].mT, by_noise[draw])
        assert_close(score.theta[draw], 0 * expected if q.family.base else expected)


def gradients(model, q, grid, noise, path_gradient: bool) -> tuple[float, torch.Tensor]:
    q.zero_grad()
    bound = elbo(model, q, grid, noise, 2.0, path_gradient)
    bound.value.backward()
    return float(bound.value.detach()), torch.cat(
        [w.grad.flatten() for w in q.parameters() if w.grad is not None]
    )


@pytest.mark.parametrize("chain", [True, False])
def test_path_gradient_has_the_same_value_and_the_same_mean(chain: bool) -> None:
    """Kills a dropped term: over many draws both gradients estimate the same vector.

    The bound is tempered, so that log q(ϑ) and log q(x | ϑ) must keep their own parts.
    """
    model, q = posterior("scalar", lib.Family(2, num_flows=1, hidden=4, base=chain))
    grid, generator = scalar()[1].grid(), torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(60):
        noise = q.draw_noise(500, generator)
        (plain, g), (path, h) = (gradients(model, q, grid, noise, kind) for kind in (False, True))
        assert plain == pytest.approx(path, rel=1e-12)
        pairs.append(g - h)
    difference = torch.stack(pairs)
    z = difference.mean(0) / (difference.std(0) / 60**0.5 + 1e-12)
    assert z.abs().max() < 5 and 0.5 < z[z != 0].square().mean() < 2


@pytest.mark.parametrize("chain", [True, False])
def test_path_gradient_vanishes_where_q_is_the_posterior(chain: bool) -> None:
    """Kills a score term that was left in: it alone is noise of order one."""
    _, q = posterior("scalar", lib.Family(receptive_field=2, base=chain))
    noise = q.draw_noise(4, torch.Generator().manual_seed(0))
    trace = q.trace(noise)
    sample, score = with_path_gradient(q, trace), find_score(q, trace)
    # A target whose log density is log q itself, weights held.
    moves = (score.theta + score.theta_path) * sample.vartheta
    target = moves.sum(-1) + (score.path * sample.x[:, q.first :]).sum((-2, -1))
    (target - sample.log_q_theta - sample.log_q_x).sum().backward()
    assert all(w.grad is None or w.grad.abs().max() < 1e-10 for w in q.parameters())


def test_no_weight_gets_a_gradient_from_the_score() -> None:
    _, q = posterior("random", FAMILIES["study"])
    noise = q.draw_noise(2, torch.Generator().manual_seed(3))
    score = find_score(q, q.trace(noise))
    assert not any(part.requires_grad for part in score)
    assert all(w.grad is None for w in q.parameters())


@pytest.mark.parametrize("family", ["study", "no chain"])
@pytest.mark.parametrize("name", ["random", "mixed"])
def test_growth_is_that_of_all_local_flows_and_not_of_the_chain(name: str, family: str) -> None:
    """Kills a growth of the last flow alone, one that the chain has a part in, and fixed states."""
    _, q = posterior(name, FAMILIES[family])
    noise = q.draw_noise(1, torch.Generator().manual_seed(3))
    trace, growth = q.trace(noise), torch.ones(())
    seen, mask = q.seen(trace.sample.vartheta).detach(), q.free.mT[..., None]
    z, free = noise.path.permute(2, 1, 0) * mask, mask.flatten() > 0
    g = -z
    if trace.chain is not None:
        z, g = run_chain(trace.chain, z) * mask, push_chain(trace.chain, g, mask)
    g = g.flatten()
    for flow in q.flows():

        def run(flat: torch.Tensor, flow=flow) -> tuple[torch.Tensor, torch.Tensor]:
            made = flow.trace(flat.view_as(mask), seen)
            log_diag = flow.turn(made.log_diag) * mask
            return (flow.turn(made.y) * mask).flatten(), log_diag.sum()

        by_z, slope = torch.autograd.functional.jacobian(run, z.flatten())
        before, z = (g - slope)[free], run(z.flatten())[0].detach()
        g = torch.zeros_like(g)
        g[free] = torch.linalg.solve(by_z[free][:, free].mT, before)
        growth = growth * g.norm() / before.norm()
    assert_close(find_score(q, trace).growth, growth)


@pytest.mark.parametrize("tap", [20.0, 1e40])
def test_a_score_that_grows_along_time_leaves_the_plain_gradient(tap: float) -> None:
    """Kills training that a local IAF with an unstable inverse blows up, above all to infinity."""
    model, q = posterior("scalar", lib.Family(receptive_field=2, num_flows=1))
    grid = scalar()[1].grid()
    noise = q.draw_noise(4, torch.Generator().manual_seed(0))
    path, plain = (gradients(model, q, grid, noise, kind)[1] for kind in (True, False))
    assert path.ne(plain).any()
    with torch.no_grad():
        q.layers[0].taps.weights[-1].bias += tap
    assert not find_score(q, q.trace(noise)).growth < 100
    path, plain = (gradients(model, q, grid, noise, kind)[1] for kind in (True, False))
    assert_close(path, plain, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["study", "no chain"])
@pytest.mark.parametrize("path_gradient", [False, True])
def test_wide_draws_train_the_path_alone(path_gradient: bool, family: str) -> None:
    """Kills wide draws that enter the value, pull at q(ϑ), or sit at the wrong ϑ."""
    model, q = posterior("scalar", FAMILIES[family])
    grid, noise = scalar()[1].grid(), q.draw_noise(6, torch.Generator().manual_seed(0))
    noise = noise._replace(theta=stretched(noise.theta, 2))
    bound = elbo(model, q, grid, noise, 1.0, path_gradient, wide=2)
    plain = elbo(model, q, grid, Noise(noise.theta[:4], noise.path[:4]))
    assert_close(bound.value, plain.value)
    assert_close(bound.log_q_theta, plain.log_q_theta)
    outer = q.theta_flow(noise.theta)[0][4:].detach()
    x, log_q_x = q.path(noise.path[4:], outer)
    joint = model.log_joint(outer, x, grid)
    assert_close(bound.conditional, (joint.total - joint.log_prior - log_q_x).sum() / 4)
    bound.conditional.backward()
    assert all(w.grad is None or (w.grad == 0).all() for w in q.theta_flow.parameters())
    assert q.layers[0].network.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("family", ["study", "no chain"])
def test_wide_draws_get_the_score_of_their_own_theta(family: str) -> None:
    """Kills a score that stops at a wide ϑ, or that is that of another draw."""
    _, q = posterior("mixed", FAMILIES[family])
    noise = q.draw_noise(4, torch.Generator().manual_seed(0))
    noise = noise._replace(theta=stretched(noise.theta, 2))
    wide, plain = (find_score(q, q.trace(noise, count)) for count in (2, 0))
    for one, other in zip(wide, plain, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("path_gradient", [False, True])
@pytest.mark.parametrize("case", ["scalar", "mixed"])
def test_a_given_chain_gives_the_same_gradient(case: str, path_gradient: bool) -> None:
    """Kills a chain that only the value, or only the score, is made with; and one of other ϑ."""
    model, q = posterior(case, FAMILIES["study"])
    grid = (scalar() if case == "scalar" else linear(X0[case]))[1].grid()
    made = q.draw_noise(5, torch.Generator().manual_seed(0))
    chain, found = q.chain(q.theta_flow(made.theta)[0].detach()), []
    for noise in (made, made._replace(chain=chain), made._replace(chain=shifted(chain))):
        q.zero_grad()
        bound = elbo(model, q, grid, noise, 1.5, path_gradient, wide=2)
        (bound.value + bound.conditional).backward()
        assert all(w.grad is None for w in q.theta_flow.parameters())
        grads = [w.grad for w in q.layers.parameters()]
        found.append((bound.value.detach(), bound.conditional.detach(), *grads))
    assert_close(found[1], found[0], rtol=0, atol=0)
    assert all((one != other).any() for one, other in zip(found[2], found[0], strict=True))


def shifted(chain: Chain) -> Chain:
    """Each draw with the chain of the next."""
    return Chain(*(part.roll(1, -1) for part in chain))


def test_solves_leave_their_arguments_alone() -> None:
    """Kills a missing copy: with one draw of one state, turning the axes makes none."""
    g, band = torch.randn(1, 40, 1), 0.1 * torch.randn(3, 1, 40, 1)
    band[-1] = 1.0
    kept = g.clone()
    solve_band_transposed(band, g)
    a, none = 0.5 * torch.ones(1, 1, 40, 1), torch.zeros(0, 40, 1)
    backward_scan(a, g)
    chain = Chain(a, none, *torch.randn(3, 1, 40, 1))
    run_chain(chain, g), push_chain(chain, g, None)
    assert g.equal(kept) and (a == 0.5).all()
