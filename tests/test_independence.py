"""Independence Metropolis-Hastings: one step enumerated, then a fit against the exact posterior."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close

import lib
from lib.independence import _check_counts, convergence, held_proposals, judge
from lib.result import Draws, FitResult
from lib.weights import arviz

NAN, INF = math.nan, math.inf
NEVER, ALWAYS = -1e-300, -1e300  # log u of a step that refuses any smaller weight, or none

# Five states; p(state)/q(state) = 1/4, 2/3, 3/2, 6 and 0, whose ratios are multiples of 1/72.
P = torch.tensor([1, 2, 3, 6, 0], dtype=torch.float64) / 12
Q = torch.tensor([4, 3, 2, 1, 2], dtype=torch.float64) / 12
LOG_U = ((torch.arange(72, dtype=torch.float64) + 0.5) / 72).log()


def law_of_held(start, num_steps):
    """Exact law of the state held after each step: every proposal and every u, none drawn."""
    states = [torch.arange(len(P))] * (num_steps + 1)
    path = torch.cartesian_prod(*states, *[torch.arange(72)] * num_steps)
    path, u = path.split([num_steps + 1, num_steps], 1)
    path, u = (part[start[path[:, 0]] > 0] for part in (path, u))
    held = held_proposals((P / Q).log()[path], LOG_U[u])
    mass = start[path[:, 0]] * Q[path[:, 1:]].prod(1) / 72**num_steps
    state = path.gather(1, held.index)
    return [torch.zeros(len(P)).scatter_add(0, column, mass) for column in state.T]


def test_transition_matrix_keeps_p_and_balances():
    """Kills: a ratio inverted or of p alone, u in place of log u, a rejected step that moves on."""
    matrix = torch.stack([law_of_held(row, 1)[0] for row in torch.eye(5)[:4]])
    ratio = (P / Q) / (P / Q)[:4, None]
    expected = Q * ratio.clamp(max=1)
    expected += torch.eye(4, 5) * (1 - expected.sum(1, keepdim=True))
    assert_close(matrix, expected, rtol=0, atol=1e-10)
    assert_close(P[:4] @ matrix, P, rtol=0, atol=1e-10)
    flow = P[:4, None] * matrix[:, :4]
    assert_close(flow, flow.T, rtol=0, atol=1e-10)


def test_two_steps_are_the_transition_twice():
    """Kills: a step compared with the start, or with the last proposal instead of the one held."""
    once, twice = law_of_held(P, 2)
    assert_close(once, P, rtol=0, atol=1e-10)
    assert_close(twice, P, rtol=0, atol=1e-10)
    first = torch.eye(5)[3]
    once, twice = law_of_held(first, 2)
    assert_close(once, law_of_held(first, 1)[0], rtol=0, atol=1e-10)
    assert_close(twice, law_of_held(once, 1)[0], rtol=0, atol=1e-10)


def test_steps_by_hand_two_chains_at_once():
    """Log ratios: 1, −0.7 (twice), 0.3 from the second; kills chains that share what they hold."""
    log_weight = torch.tensor([[0.0, 1.0, 0.3, 0.3, 1.3], [1.0, 0.0, -0.5, 2.0, 0.0]])
    log_u = torch.tensor([[NEVER, -0.69, -0.71, NEVER], [-0.99, -1.51, NEVER, -1.99]])
    held = held_proposals(log_weight, log_u)
    assert held.index.tolist() == [[1, 1, 3, 4], [0, 2, 3, 3]]
    assert held.accepted.tolist() == [[True, False, True, True], [False, True, True, False]]


def test_weights_of_zero_and_faults_are_refused_whatever_u():
    """Kills: a chain caught at +∞ or NaN for ever, u = 0 that accepts a zero of the density."""
    log_weight = torch.tensor([[0.0, NAN, INF, -INF, -5.0, NAN, 1.0]])
    held = held_proposals(log_weight, torch.tensor([[-INF, -INF, -INF, ALWAYS, -INF, NEVER]]))
    assert held.index.tolist() == [[0, 0, 0, 4, 4, 6]]
    assert held.accepted.tolist() == [[False, False, False, True, False, True]]


def test_a_chain_starts_at_its_first_finite_weight():
    """Kills: a start at NaN, +∞ or zero, and a start counted as accepted when its turn comes."""
    log_weight = torch.tensor([[NAN, -INF, INF, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5, 0.5]])
    held = held_proposals(log_weight, torch.full((2, 4), ALWAYS))
    assert held.index.tolist() == [[3, 3, 3, 4], [1, 2, 3, 4]]
    assert held.accepted.tolist() == [[False, False, False, True], [True] * 4]


class Numbered(FitResult):
    """A fit whose draws have given log weights; ϑ and x are the number of the draw."""

    def __init__(self, log_weight):
        self.log_weight, self.calls = log_weight, []

    def draws(self, n, seed=0):
        self.calls.append((n, seed))
        count, weight = torch.arange(float(n)), self.log_weight.flatten()
        x, log_q = count[:, None, None] * torch.tensor([[1.0], [10.0], [100.0]]), 5 * count.sin()
        pair = torch.stack([count, -count.square()], 1)
        return Draws(pair.exp(), pair, x, log_q, weight + log_q, weight)


def test_exact_q_is_always_accepted():
    """q = p up to a constant. Kills: log q forgotten (here it moves by 10 nats), u for log u."""
    result = lib.independence_mh(Numbered(torch.full((4, 501), -7.0)), 500)
    assert result.acceptance_rate.tolist() == [1.0] * 4
    chains = torch.arange(4.0)[:, None] * 501 + torch.arange(1.0, 501)
    assert_close(result.samples[..., 0], chains)  # the start itself is not among the samples


def test_bookkeeping_of_a_chain():
    """Kills: x, ϑ and density of different draws, a chain that takes another's proposals."""
    log_weight = 2 * torch.randn(3, 401)
    fit = Numbered(log_weight)
    result = lib.independence_mh(fit, 400, chains=3, seed=5)
    assert fit.calls == [(1203, 5)]
    row = result.samples[..., 0]
    assert ((row >= 401 * torch.arange(3)[:, None]) & (row.diff(prepend=row[:, :1]) >= 0)).all()
    assert (row <= 401 * torch.arange(3)[:, None] + torch.arange(1, 401)).all()
    assert_close(result.samples[..., 1], -row.square())
    assert result.x.shape == (3, 400, 3, 1)
    assert_close(result.x[..., 0], row[..., None] * torch.tensor([1.0, 10.0, 100.0]))
    held = log_weight.flatten()[row.long()]
    assert_close(result.log_density, held + 5 * row.sin())
    start = 401.0 * torch.arange(3)[:, None]
    assert_close(result.acceptance_rate, (row.diff(prepend=start) > 0).double().mean(1))
    assert 0.1 < result.acceptance_rate.mean() < 0.9


def test_faulty_weights_are_counted_and_never_held():
    """Kills: zeros counted as faults, starts left out of the count, draws that drop out."""
    log_weight = torch.zeros(2, 200)
    log_weight[0, 0], log_weight[0, 7], log_weight[1, 9], log_weight[1, 20:30] = NAN, NAN, INF, -INF
    result = lib.independence_mh(Numbered(log_weight), 199, chains=2)
    assert result.num_nonfinite == 3 and "3 draws had a weight of NaN or +∞" in result.verdict
    assert result.log_density.isfinite().all()
    assert result.samples[0, :8, 0].tolist() == [1, 2, 3, 4, 5, 6, 6, 8]
    assert result.samples[1, 18:30, 0].tolist() == [219] * 11 + [230]
    clean = lib.independence_mh(Numbered(torch.zeros(2, 200)), 199, chains=2)
    assert clean.num_nonfinite == 0 and "NaN" not in clean.verdict


def test_chains_that_never_move_are_not_trusted():
    """Kills: a division by zero that stops the report, a start that steps on from +1000."""
    log_weight = torch.zeros(4, 101)
    log_weight[:, 0] = 1000.0
    result = lib.independence_mh(Numbered(log_weight), 100)
    assert result.acceptance_rate.tolist() == [0.0] * 4 and (result.r_hat > 1e10).all()
    assert result.verdict.startswith("Not to be trusted: the largest R-hat is ")
    assert "one draw held a chain for 100.0% of its steps" in result.verdict


def test_convergence_of_chains_that_stand_still_is_no_number():
    """Apart, and all at one point. Kills: the warning of a division by zero, an R-hat of 1."""
    still = torch.randn(4, 1, 1).expand(4, 50, 1)
    assert not (convergence(still)[1] <= 1e10).any()
    assert not (convergence(torch.full((4, 50, 2), 2.0))[1] <= 1e10).any()


def test_u_is_not_of_the_stream_of_the_proposals():
    """Kills: one seed for both. Every weight is just above that stream's u, so all would pass."""
    u = torch.rand(2, 400, generator=torch.Generator().manual_seed(3))
    log_weight = torch.cat([torch.zeros(2, 1), u.log() + 1e-9], 1)
    result = lib.independence_mh(Numbered(log_weight), 400, chains=2, seed=3)
    assert result.acceptance_rate.max() < 0.9


def test_convergence_is_arviz_column_by_column():
    """Kills: columns swapped or pooled, chains and steps transposed, ESS of one chain."""
    samples = torch.randn(3, 200, 2)
    samples[..., 1] = samples[..., 1].cumsum(1)
    ess, r_hat = convergence(samples)
    for j in range(2):
        column = samples[..., j].clone().numpy()
        assert float(ess[j]) == pytest.approx(float(arviz.ess(column, method="bulk")))
        assert float(r_hat[j]) == pytest.approx(float(arviz.rhat(column, method="rank")))
    assert ess[0] > 300 > 30 > ess[1] and r_hat[0] < 1.02 < r_hat[1]


def verdict(ess=400.0, r_hat=1.01, stay=5, nonfinite=0, tail=0.1):
    """Two chains of 100 steps, whose proposals are all accepted but those of one stay."""
    index = torch.arange(1, 101).repeat(2, 1)
    index[1, 50 : 50 + stay] = 51
    values = (torch.tensor([0.5, 0.6]), torch.tensor([ess, 900.0]), torch.tensor([1.0, r_hat]))
    faulty = torch.full((nonfinite,), NAN)
    return judge(*values, index, torch.cat([tail * torch.randn(2000).abs(), faulty]))


def test_verdict_without_fault():
    assert verdict() == (
        "No fault seen. 55.0% of the proposals accepted, smallest ESS 400, largest R-hat 1.01, "
        "longest stay 5 of 100 steps. What q never proposes stays unseen: read "
        "fit.diagnostics() too."
    )
    assert "steps. 2 draws had a weight of NaN or +∞ and were rejected. What" in verdict(
        nonfinite=2
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r_hat": 1.0101}, "the largest R-hat is 1.0101, above 1.01"),
        ({"r_hat": NAN}, "the largest R-hat is nan, above 1.01"),
        ({"r_hat": INF}, "the largest R-hat is inf, above 1.01"),
        ({"ess": 399.0}, "the smallest ESS is 399, below 400"),
        ({"ess": NAN}, "the smallest ESS is nan, below 400"),
        ({"stay": 6}, "one draw held a chain for 6.0% of its steps, more than 5%"),
    ],
)
def test_verdict_names_the_fault(change, words):
    """Kills: a limit left out, the mean of ESS or R-hat, the first chain's longest stay."""
    assert verdict(**change).startswith(f"Not to be trusted: {words}. 55.0% of the proposals")


def test_verdict_looks_at_the_proposals():
    """Smooth chains of a q that hardly ever visits a tail. Kills: weights left out of it."""
    said = verdict(tail=5.0)
    assert "No fault" not in said and "k-hat is " in said and "the effective share" in said


def test_verdict_names_every_fault():
    assert verdict(ess=1.0, r_hat=2.0, stay=40).count(";") == 2


Y = [18.9, 15.6, 14.9, 12.4, 13.0, NAN, 9.1, 9.7, 7.2, 8.4]  # at 0.1, …, 1; x_0 = 20
PRIOR_SD = 0.3


@pytest.fixture(scope="module")
def fit() -> FitResult:
    """Ten times of an OU process, one of them unobserved; a small q, trained for seconds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    prior, observation = Normal(torch.zeros(3), PRIOR_SD), lib.GaussianObservation([[1.0]], 1.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), observation, prior, x0=[20.0])
    data = lib.Observations([0.1 * i for i in range(1, 11)], [[y] for y in Y], 0.1)
    config = lib.FitConfig(
        dtype="float64",
        num_steps=400,
        num_samples=10,
        wide_samples=5,
        refits=1,
        family=lib.Family(num_flows=1, theta_flows=1),
    )
    made = lib.fit(model, data, config, device="cpu", progress=False)
    torch.set_default_dtype(before)
    return made


def spoilt(fit: FitResult, factor: float, shift: float) -> FitResult:
    """The fit with q(ϑ) about that much wider, and moved by about that many of its old sds."""
    q = copy.deepcopy(fit.q)
    mu, s = q.theta_flow.steps[-1].network[-1].bias.data.chunk(2)
    mu += shift
    s += math.log(factor)
    return replace(fit, q=q)


@pytest.fixture(scope="module")
def poor(fit) -> FitResult:
    """A q that covers the posterior, but is a third too wide and aside."""
    return spoilt(fit, 1.3, 0.3)


@pytest.fixture(scope="module")
def chains(poor) -> lib.IndependenceMHResult:
    return lib.independence_mh(poor, 5000, seed=1)


def exact_posterior() -> lib.QuadraturePosterior:
    return lib.ou_posterior(torch.tensor(Y), 0.1, exact=False, prior_sd=PRIOR_SD)


def errors_of(values, expected):
    """How many standard errors, by their ESS, the mean of (chains, steps) is off."""
    error = values.std() / math.sqrt(arviz.ess(values.clone().numpy(), method="mean"))
    return float((values.mean() - expected) / error)


def test_chains_have_the_exact_posterior_where_q_has_not(poor, chains):
    """Quadrature of the Euler posterior. Kills: ratio inverted, log q forgotten, all accepted."""
    exact, raw = exact_posterior(), poor.draws(20_000, seed=2).vartheta
    assert chains.verdict.startswith("No fault seen") and chains.num_nonfinite == 0
    assert 0.3 < chains.acceptance_rate.mean() < 0.9 and chains.ess.min() > 2000
    error = exact.sd / chains.ess.sqrt()
    assert ((chains.samples.mean((0, 1)) - exact.mean).abs() < 5 * error).all()
    for j in range(3):
        squares = (chains.samples[..., j] - exact.mean[j]).square()
        assert abs(errors_of(squares, exact.sd[j].square())) < 5
    # Independent draws, so their own standard errors: far out in mean and in spread.
    assert ((raw.mean(0) - exact.mean).abs() > 5 * raw.std(0) / len(raw) ** 0.5).any()
    squares = (raw - exact.mean).square()
    assert ((squares.mean(0) - exact.sd.square()) > 5 * squares.std(0) / len(raw) ** 0.5).all()


def smoothed(time: int) -> tuple[float, float]:
    """E and Var of x_i given y under the Euler model, by dense Gaussians at quadrature nodes."""
    exact, y, n = exact_posterior(), torch.tensor(Y), len(Y)
    theta1, theta3 = exact.grid_log_theta1.exp()[:, None], exact.grid_log_theta3.exp()
    theta1, theta3 = torch.broadcast_tensors(theta1, theta3)
    phi, q = 1 - 0.1 * theta1, 0.1 * theta3.square()
    step = torch.eye(n) - phi[..., None, None] * torch.diag(torch.ones(n - 1), -1)
    precision = step.mT @ step / q[..., None, None] + torch.diag((~y.isnan()).double())

    def mean(theta2):
        inflow = (0.1 * theta1 * theta2)[..., None].repeat(1, 1, n)
        inflow[..., 0] += 20 * phi
        pull = (step.mT @ inflow[..., None])[..., 0] / q[..., None] + y.nan_to_num(0.0)
        return torch.linalg.solve(precision, pull)[..., time - 1]

    centre = mean(exact.theta2_mean)
    slope = mean(exact.theta2_mean + 1) - centre  # x's mean is linear in θ2
    within = torch.linalg.inv(precision)[..., time - 1, time - 1]
    total = (exact.weights * centre).sum()
    spread = within + slope.square() * exact.theta2_var + (centre - total).square()
    return float(total), float((exact.weights * spread).sum())


@pytest.mark.parametrize("time", [6, 10])
def test_paths_have_the_exact_smoothed_law(chains, time):
    """Where y is missing, and at the end. Kills: paths of every proposal, times moved by one."""
    mean, variance = smoothed(time)
    x = chains.x[:, :, time, 0]
    assert abs(errors_of(x, mean)) < 5
    assert abs(errors_of((x - mean).square(), variance)) < 5


def test_path_and_parameters_are_of_one_draw(poor, chains):
    """log p(ϑ, x, y) afresh. Kills: x not aligned with ϑ, another draw's density."""
    assert chains.x.shape == (4, 5000, 11, 1) and chains.samples.shape == (4, 5000, 3)
    grid = poor.observations.grid()
    vartheta, x = chains.samples.flatten(0, 1), chains.x.flatten(0, 1)
    joint = poor.model.log_joint(vartheta, x, grid).total
    assert_close(joint.reshape(4, 5000), chains.log_density)
    parts = (chains.samples, chains.x, chains.log_density, chains.ess, chains.r_hat)
    assert all(part.dtype == torch.float64 and not part.requires_grad for part in parts)


def test_a_narrow_q_is_not_trusted(fit):
    """A quarter of the width, aside. Kills: a verdict that does not look at the chains."""
    result = lib.independence_mh(spoilt(fit, 0.25, 1.5), 1000)
    assert result.verdict.startswith("Not to be trusted: "), result.verdict


def test_same_seed_same_chains_and_the_global_generator_is_untouched(fit):
    before = torch.get_rng_state()
    one, two, other = (lib.independence_mh(fit, 50, chains=2, seed=seed) for seed in (9, 9, 10))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.samples, two.samples) and torch.equal(one.x, two.x)
    assert one.verdict == two.verdict and not torch.equal(one.samples, other.samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number, 4 or more; got 0. R-hat splits"),
        ({"num_steps": 3}, "num_steps must be a whole number, 4 or more; got 3"),
        ({"num_steps": 5, "chains": 1}, "chains must be a whole number, 2 or more; got 1. R-hat"),
        ({"num_steps": 5, "chains": -2}, "chains must be a whole number, 2 or more; got -2"),
    ],
)
def test_counts_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        lib.independence_mh(Numbered(torch.zeros(4, 6)), **arguments)


def test_counts_of_numpy_are_taken():
    """Kills 'got np.int64(10)' for a whole number."""
    _check_counts(np.int64(10), np.int64(2))


def test_a_chain_needs_a_weight_to_start_at():
    log_weight = torch.zeros(3, 6)
    log_weight[1] = torch.tensor([NAN, INF, -INF, NAN, INF, -INF])
    with pytest.raises(ValueError, match="finite weight; got none among the 6 of chain 1"):
        lib.independence_mh(Numbered(log_weight), 5, chains=3)
