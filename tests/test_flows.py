"""Flows z → z': log |det dz'/dz|, what may depend on what, and the formulas of each layer."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lib.gauss_markov import backward_scan, push_chain, run_chain
from lib.local_iaf import LocalIAF, add_windows, past_windows, solve_band_transposed
from lib.maf import IAF, MAF
from lib.network import NetworkTrace, lower_product
from lib.smoother import Chain

K, D, NUM_FEATURES, HIDDEN, DRAWS = 3, 2, 4, (16, 16), 16


class Case(NamedTuple):
    """A flow with its context filled in: ``call(z)`` gives z' and one log-Jacobian per draw."""

    module: torch.nn.Module
    call: Callable[[Tensor], tuple[Tensor, Tensor]]


def perturbed(module: torch.nn.Module, size: float = 0.4) -> torch.nn.Module:
    """The module with every weight moved away from its start, where many terms are 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def time_case(module: torch.nn.Module, time: int, mc: int) -> Case:
    features, theta = torch.randn(time, NUM_FEATURES), torch.randn(mc, D)

    def call(z: Tensor) -> tuple[Tensor, Tensor]:
        y, log_diag = module(z, features, theta)
        return y, log_diag.sum((-2, -1))

    return Case(perturbed(module), call)


def local(p: int, time: int, mc: int, **options: object) -> Case:
    module = LocalIAF(p, NUM_FEATURES, D, window=K, hidden=HIDDEN, **options)
    return time_case(module, time, mc)


def vector_case(module: torch.nn.Module, call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Case:
    """A flow over one vector, here all times and components side by side."""

    def flat_call(z: Tensor) -> tuple[Tensor, Tensor]:
        y, ladj = call(z.flatten(1))
        return y.view_as(z), ladj

    return Case(perturbed(module), flat_call)


def iaf(p: int, time: int, mc: int) -> Case:
    module = IAF(p * time, (16, 16))
    return vector_case(module, module)


def log_normal(z: Tensor) -> Tensor:
    return -0.5 * z.square().sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)


def maf(p: int, time: int, mc: int) -> Case:
    module = MAF(p * time, 2, (16, 16), torch.randn(p * time), 0.2 + torch.rand(p * time))

    def call(z: Tensor) -> tuple[Tensor, Tensor]:
        vartheta, log_q = module(z)
        return vartheta, log_normal(z) - log_q

    return vector_case(module, call)


def some_chain(p: int, time: int, mc: int) -> Chain:
    """A chain of arbitrary laws, none of them like another."""
    entries = torch.randn(p * (p - 1) // 2, time, mc)
    a, log_diag = 0.5 * torch.randn(p, p, time, mc), 0.5 * torch.randn(p, time, mc)
    return Chain(a, entries, log_diag, torch.randn(p, time, mc), torch.randn(p, time, mc))


def chain_case(p: int, time: int, mc: int) -> Case:
    chain = some_chain(p, time, mc)

    def call(z: Tensor) -> tuple[Tensor, Tensor]:
        v = run_chain(chain, z.permute(2, 1, 0)).permute(2, 1, 0)
        return v, chain.log_diag.sum((0, 1))

    return Case(torch.nn.Module(), call)


FLOWS: dict[str, Callable[[int, int, int], Case]] = {
    "sigmoid": lambda p, time, mc: local(p, time, mc, gate="sigmoid"),
    "sigmoid, taps": lambda p, time, mc: local(p, time, mc, gate="sigmoid", taps=True),
    "unbounded": lambda p, time, mc: local(p, time, mc, gate="unbounded"),
    "unbounded, coupling": lambda p, time, mc: local(p, time, mc, gate="unbounded", coupling=True),
    "unbounded, coupling, taps": lambda p, time, mc: local(
        p, time, mc, gate="unbounded", coupling=True, taps=True
    ),
    "chain": chain_case,
    "iaf": iaf,
    "maf": maf,
}
LOCAL = [name for name in FLOWS if "sigmoid" in name or "unbounded" in name]


def jacobian(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """dz'/dz by autograd, (mc, time', state', mc, time, state)."""
    return torch.autograd.functional.jacobian(f, z)


def own_jacobian(case: Case, z: Tensor) -> Tensor:
    """dz'/dz within each draw, (mc, time', state', time, state)."""
    full = jacobian(lambda z: case.call(z)[0], z)
    return torch.stack([full[n, :, :, n] for n in range(len(z))])


def pattern(case: Case, z: Tensor) -> Tensor:
    """Which z'_i depend on which z_j, (time', time, state', state): in any of many draws, because
    ReLUs may hide a path in one."""
    return (own_jacobian(case, z) != 0).any(0).permute(0, 2, 1, 3)


@pytest.mark.parametrize("time", [1, 5, 8])
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", FLOWS)
def test_log_jacobian_is_that_of_autograd(name: str, p: int, time: int) -> None:
    case, z = FLOWS[name](p, time, 2), torch.randn(2, time, p)
    size = p * time
    dense = own_jacobian(case, z).reshape(2, size, size)
    assert_close(case.call(z)[1], torch.linalg.slogdet(dense).logabsdet)


@pytest.mark.parametrize("name", FLOWS)
def test_draws_do_not_mix(name: str) -> None:
    case, z = FLOWS[name](2, 4, 3), torch.randn(3, 4, 2)
    full = jacobian(lambda z: case.call(z)[0], z).abs().sum((1, 2, 4, 5))
    assert (full.diagonal() > 0).all()
    assert (full - full.diagonal().diag() == 0).all()


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("name", LOCAL)
def test_local_iaf_sees_its_window_and_nothing_else(name: str, p: int) -> None:
    time = 8
    case = FLOWS[name](p, time, DRAWS)
    seen = pattern(case, torch.randn(DRAWS, time, p))
    lower = torch.ones(p, p, dtype=torch.bool).tril()
    for i in range(time):
        for j in range(time):
            if i - K <= j < i:
                assert seen[i, j].all(), f"no path from z_{j} to z'_{i}"
            elif i == j:
                expected = lower if "coupling" in name else lower & lower.T
                assert seen[i, j].equal(expected), f"same time {i}"
            else:
                assert not seen[i, j].any(), f"a path from z_{j} to z'_{i}"


@pytest.mark.parametrize("p", [1, 3])
def test_chain_depends_on_the_whole_future_and_no_past(p: int) -> None:
    time = 7
    seen = pattern(FLOWS["chain"](p, time, DRAWS), torch.randn(DRAWS, time, p))
    lower = torch.ones(p, p, dtype=torch.bool).tril()
    for i in range(time):
        assert not seen[i, :i].any()
        assert seen[i, i + 1 :].all()
        assert seen[i, i].equal(lower)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("time", [1, 2, 3, 4, 6, 7, 8, 9, 13])
def test_scan_is_the_recursion_run_backwards(time: int, p: int) -> None:
    a, c = torch.randn(p, p, time, 2), torch.randn(p, time, 2)
    u = torch.zeros(p, time, 2)
    u[:, -1] = c[:, -1]
    for i in range(time - 2, -1, -1):
        u[:, i] = torch.einsum("ijn,jn->in", a[:, :, i], u[:, i + 1]) + c[:, i]
    assert_close(backward_scan(a, c), u)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("time", [1, 2, 5, 8])
def test_gradient_of_the_scan_is_exact(time: int, p: int) -> None:
    a, c = torch.randn(p, p, time, 2, requires_grad=True), torch.randn(p, time, 2)
    assert torch.autograd.gradcheck(backward_scan, (a, c.requires_grad_()))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_windows_are_shifted_copies_and_add_windows_their_transpose(length: int, p: int) -> None:
    z, weights = torch.randn(p, 6, 2, requires_grad=True), torch.randn(length * p, 6, 2)
    padded = torch.nn.functional.pad(z, (0, 0, length, 0))
    slices = torch.cat([padded[:, j : j + 6] for j in range(length)])
    assert_close(past_windows(z, length), slices, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(slices, z, weights)
    assert_close(add_windows(weights, length), expected)
    assert_close(torch.autograd.grad(past_windows(z, length), z, weights)[0], expected)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("time, window", [(1, 3), (5, 1), (32, 4), (70, 10), (80, 40)])
def test_band_is_solved_as_the_dense_matrix(time: int, window: int, p: int) -> None:
    """Kills a wrong block, above all where one block meets the next or the last is short."""
    size = time * p
    band = 0.1 * torch.randn(2, time, p, (window + 1) * p)
    band[..., -p:] = band[..., -p:].tril(-1) + torch.eye(p)
    dense = torch.zeros(2, size, (time + window) * p)
    for i in range(time):
        dense[:, i * p : (i + 1) * p, i * p : (i + window + 1) * p] = band[:, i]
    g = torch.randn(2, time, p)
    expected = torch.linalg.solve(dense[..., window * p :].mT, g.flatten(1)[..., None])
    solved = solve_band_transposed(band.permute(3, 2, 1, 0), g.permute(2, 1, 0))
    assert_close(solved.permute(2, 1, 0).flatten(1), expected[..., 0])


def unpack_lower(diagonal: Tensor, entries: Tensor) -> Tensor:
    """Lower triangular matrix from its diagonal and, row by row, what is below it."""
    matrix = torch.diag(diagonal)
    rows, columns = torch.tril_indices(len(diagonal), len(diagonal), -1)
    matrix[rows, columns] = entries
    return matrix


def slow_local_iaf(layer: LocalIAF, z: Tensor, features: Tensor, theta: Tensor) -> Tensor:
    """z' of one draw by an explicit loop: zeros before the start, oldest first, one time each."""
    time, p = z.shape
    result = []
    for i in range(time):
        past = [z[j] if j >= 0 else torch.zeros(p) for j in range(i - layer.window, i)]
        window = torch.cat(past)
        out = layer.network(window[:, None, None], features[[i]], theta[None])[:, 0, 0]
        mu, s, entries = out[:p], out[p : 2 * p], out[2 * p :]
        if layer.taps is not None:
            mu = mu + window @ layer.taps.matrix(theta[None])[..., 0]
        if layer.gate == "sigmoid":
            sigma = 1 / (1 + torch.exp(-s))
            result.append(sigma * z[i] + mu * (1 - sigma))
            continue
        diagonal = torch.exp(3 * torch.tanh(s / 3))
        entries = entries if layer.coupling else torch.zeros(p * (p - 1) // 2)
        result.append(unpack_lower(diagonal, entries) @ z[i] + mu)
    return torch.stack(result)


@pytest.mark.parametrize("time", [1, 2, 7])
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("name", LOCAL)
def test_local_iaf_is_the_slow_loop(name: str, p: int, time: int) -> None:
    layer = FLOWS[name](p, time, 2).module
    z, features, theta = torch.randn(2, time, p), torch.randn(time, NUM_FEATURES), torch.randn(2, D)
    slow = [slow_local_iaf(layer, z[n], features, theta[n]) for n in range(2)]
    assert_close(layer(z, features, theta)[0], torch.stack(slow))


@pytest.mark.parametrize("name", LOCAL)
def test_features_act_at_their_own_time_and_theta_everywhere(name: str) -> None:
    flow, time = FLOWS[name](2, 5, 1).module, 5
    z, features = torch.zeros(DRAWS, time, 2), torch.randn(time, NUM_FEATURES)
    by_features, by_theta = torch.autograd.functional.jacobian(
        lambda features, theta: flow(z, features, theta)[1].sum(-1),
        (features, torch.randn(DRAWS, D)),
    )
    moved = by_features.abs().sum((0, 3)) > 0
    assert moved.equal(torch.eye(time, dtype=torch.bool))
    assert (by_theta.abs().sum((0, 2, 3)) > 0).all()


class Constant(torch.nn.Module):
    """In place of a layer's network: the same outputs whatever goes in."""

    def __init__(self, outputs: list[float]) -> None:
        super().__init__()
        self.outputs = torch.tensor(outputs)

    def forward(self, window: Tensor | None, features: Tensor, theta: Tensor) -> Tensor:
        return self.outputs[:, None, None].expand(-1, len(features), len(theta))

    def trace(self, window: Tensor | None, features: Tensor, theta: Tensor) -> NetworkTrace:
        return NetworkTrace(self(window, features, theta), [], theta, None)


def constant_layer(p: int, outputs: list[float], **options: object) -> LocalIAF:
    layer = perturbed(LocalIAF(p, NUM_FEATURES, D, window=K, hidden=HIDDEN, **options))
    layer.network = Constant(outputs)
    return layer


def test_sigmoid_gate_is_the_printed_formula() -> None:
    layer = constant_layer(2, [0.7, -1.1, 0.3, -2.0], gate="sigmoid")
    z = torch.randn(3, 4, 2)
    y, log_diag = layer(z, torch.randn(4, NUM_FEATURES), torch.randn(3, D))
    mu, sigma = torch.tensor([0.7, -1.1]), 1 / (1 + torch.tensor([-0.3, 2.0]).exp())
    assert_close(y, sigma * z + mu * (1 - sigma))
    assert_close(log_diag, sigma.log().expand_as(z))
    assert (log_diag < 0).all()  # every factor below 1: the reason for scaled states


@pytest.mark.parametrize("s", [-100.0, -3.0, 0.0, 0.5, 3.0, 100.0])
def test_unbounded_gate_is_softly_bounded_at_three(s: float) -> None:
    layer = constant_layer(1, [0.7, s], gate="unbounded")
    z = torch.randn(3, 4, 1)
    y, log_diag = layer(z, torch.randn(4, NUM_FEATURES), torch.randn(3, D))
    bounded = 3 * math.tanh(s / 3)
    assert_close(log_diag, torch.full_like(z, bounded))
    assert_close(y, math.exp(bounded) * z + 0.7)


@pytest.mark.parametrize("gate", ["unbounded", "sigmoid"])
def test_taps_are_a_moving_average_with_weights_of_theta(gate: str) -> None:
    layer, time = constant_layer(2, [0.0] * 4, gate=gate, taps=True), 9
    features, theta = torch.randn(time, NUM_FEATURES), torch.randn(2, D)
    impulse = torch.zeros(2, 2, time, 2)  # component hit, draw
    impulse[0, :, 0, 0] = impulse[1, :, 0, 1] = 1.0
    response = torch.stack([layer(one, features, theta)[0] for one in impulse])
    assert (response[:, :, 1 : K + 1] != 0).all() and (response[:, :, K + 1 :] == 0).all()
    assert (response[:, 0, 1 : K + 1] != response[:, 1, 1 : K + 1]).all()  # ϑ differs
    z = torch.randn(2, time, 2)
    expected = torch.zeros_like(z)
    for i in range(time):
        for lag in range(min(i, K) + 1):
            expected[:, i] += torch.einsum("nj,jnm->nm", z[:, i - lag], response[:, :, lag])
    assert_close(layer(z, features, theta)[0], expected)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("time", [1, 2, 6])
def test_chain_is_the_slow_loop(time: int, p: int) -> None:
    """Kills A of another time, A or L transposed, a last A that is not left out."""
    chain, z = some_chain(p, time, 2), torch.randn(p, time, 2)
    v = torch.zeros(p, time, 2)
    for n in range(2):
        for i in reversed(range(time)):
            lower = unpack_lower(chain.log_diag[:, i, n].exp(), chain.entries[:, i, n])
            v[:, i, n] = lower @ z[:, i, n]
            if i + 1 < time:
                v[:, i, n] += chain.a[:, :, i, n] @ v[:, i + 1, n]
    assert_close(run_chain(chain, z), v)


@pytest.mark.parametrize("p", [1, 3])
def test_chain_is_linear_in_its_noise_and_markov(p: int) -> None:
    """dv_i/dz_j = A_i dv_(i+1)/dz_j for every j > i, with one A_i, and 0 stays 0."""
    time = 6
    case, z = FLOWS["chain"](p, time, 1), torch.randn(1, time, p)
    blocks = own_jacobian(case, z)[0].permute(0, 2, 1, 3)
    assert_close(own_jacobian(case, 5 * z)[0].permute(0, 2, 1, 3), blocks)
    assert_close(case.call(z)[0], torch.einsum("ijab,njb->nia", blocks, z))
    for i in range(time - 1):
        a = blocks[i, i + 1] @ torch.linalg.inv(blocks[i + 1, i + 1])
        for j in range(i + 1, time):
            assert_close(blocks[i, j], a @ blocks[i + 1, j])


@pytest.mark.parametrize("fixed", [(), (0,), (1,), (0, 2)])
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("time", [1, 2, 5])
def test_score_is_pushed_through_the_chain_as_by_the_dense_jacobian(
    time: int, p: int, fixed: tuple[int, ...]
) -> None:
    """Kills A or L transposed, a shift the other way, a fixed component that is not left out.

    What is fixed of the first time has no law: its row of A is 0 and its noise too.
    """
    free = torch.ones(p, time, 1)
    free[[k for k in fixed if k < p], 0] = 0.0
    chain = some_chain(p, time, 2)
    chain = chain._replace(a=chain.a * free[:, None], log_diag=chain.log_diag * free)
    kept, g = free.flatten() > 0, torch.randn(p, time, 2) * free
    pushed = push_chain(chain, g, free if fixed else None)
    assert (pushed * (1 - free) == 0).all()
    for n in range(2):
        own = Chain(*(part[..., n : n + 1] for part in chain))
        by_z = torch.autograd.functional.jacobian(
            lambda z, own=own: run_chain(own, z * free) * free, torch.zeros(p, time, 1)
        ).view(p * time, p * time)[kept][:, kept]
        expected = torch.linalg.solve(by_z.mT, g[..., n].flatten()[kept])
        assert_close(pushed[..., n].flatten()[kept], expected)


def test_lower_product_is_a_strictly_triangular_matrix() -> None:
    entries, z = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    matrix = torch.zeros(2, 5, 3, 3)
    matrix[..., 1, 0], matrix[..., 2, 0], matrix[..., 2, 1] = entries.unbind(-1)
    product = lower_product(entries.permute(2, 1, 0), z.permute(2, 1, 0))
    assert_close(product.permute(2, 1, 0), (matrix @ z[..., None])[..., 0])


@pytest.mark.parametrize("d", [1, 2, 5])
def test_maf_step_is_triangular_in_the_permuted_order(d: int) -> None:
    q = perturbed(MAF(d, 1, (16, 16), torch.zeros(d), torch.ones(d)))
    order = torch.arange(d).roll(1)
    q.permutation_0.copy_(order)
    full = jacobian(lambda z: q(z)[0], torch.randn(DRAWS, d))
    seen = torch.stack([full[n, :, n] != 0 for n in range(DRAWS)]).any(0)
    assert seen[:, order].equal(torch.ones(d, d, dtype=torch.bool).tril())


@pytest.mark.parametrize("num_flows", [0, 1, 3])
@pytest.mark.parametrize("d", [1, 5])
def test_maf_density_is_normal_over_jacobian(d: int, num_flows: int) -> None:
    q = perturbed(MAF(d, num_flows, (16, 16), torch.randn(d), 0.2 + torch.rand(d)))
    noise = torch.randn(3, d)
    full = jacobian(lambda z: q(z)[0], noise)
    dense = torch.stack([full[n, :, n] for n in range(3)])
    expected = log_normal(noise) - torch.linalg.slogdet(dense).logabsdet
    assert_close(q(noise)[1], expected)


def test_maf_without_steps_is_the_normal_it_starts_from() -> None:
    loc, scale = torch.tensor([3.0, -400.0]), torch.tensor([0.01, 7.0])
    vartheta, log_q = MAF(2, 0, (8, 8), loc, scale)(torch.randn(5, 2))
    assert_close(log_q, torch.distributions.Normal(loc, scale).log_prob(vartheta).sum(-1))


def test_maf_steps_start_with_other_components_and_their_order_travels_with_the_weights() -> None:
    """Kills an order of chance, in which one component can come first, and stay normal, in all."""
    first, second = (MAF(9, 3, (8, 8), torch.zeros(9), torch.ones(9)) for _ in range(2))
    order, starts = torch.arange(9), []
    for i in range(3):
        order = order[getattr(first, f"permutation_{i}")]
        starts.append(int(order[0]))
    assert len(set(starts)) == 3
    second.load_state_dict(first.state_dict())
    noise = torch.randn(4, 9)
    assert second(noise)[0].equal(first(noise)[0])


def test_standardise_undoes_the_outer_affine_map_up_to_its_bound() -> None:
    """Kills a gradient through loc and scale, another bound, and none far out."""
    q = perturbed(MAF(2, 0, (8, 8), torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0])))
    noise = torch.cat([torch.randn(4, 2), 100 * torch.randn(4, 2)])
    vartheta = q(noise)[0].detach().requires_grad_()
    seen = q.standardise(vartheta)
    assert_close(seen, 3 * torch.tanh(noise / 3))
    seen.sum().backward()
    assert vartheta.grad is not None
    assert all(parameter.grad is None for parameter in q.parameters())
