"""Random-walk Metropolis-Hastings: one step by hand, then the laws that the chain must keep."""

import math

import pytest
import torch
from torch.testing import assert_close

import lib.mh
from lib.mh import Adaptation, MHInfo, MHState, mh_step, random_walk_mh

NAN, INF = math.nan, math.inf


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def step_from(position, noise, log_u, log_density=normal, tril=None):
    position = torch.tensor(position)
    tril = torch.eye(position.shape[1]) if tril is None else tril
    state = MHState(position, log_density(position))
    return mh_step(state, torch.tensor(noise), torch.tensor(log_u), tril, log_density)


def test_one_step_accepts_below_the_log_ratio_and_rejects_above():
    """From 1 to 2 under N(0, 1): log ratio −1.5. Kills: no ratio, its sign, a density for a log."""
    new, info = step_from([[1.0]] * 3, [[1.0]] * 3, [-1.501, -1.499, -0.001])
    assert info.accepted.tolist() == [True, False, False]
    assert_close(new.position, torch.tensor([[2.0], [1.0], [1.0]]))
    assert_close(new.log_density, torch.tensor([-2.0, -0.5, -0.5]))
    assert_close(info.acceptance_probability, torch.full((3,), math.exp(-1.5)))


def test_one_step_uphill_is_always_accepted():
    """Kills: the sign of the ratio."""
    new, info = step_from([[2.0]], [[-1.0]], [-1e-12])
    assert bool(info.accepted) and float(new.position) == 1.0
    assert float(info.acceptance_probability) == 1.0


def test_one_step_proposes_position_plus_tril_times_noise():
    """Kills: L transposed, noise unscaled."""
    tril = torch.tensor([[2.0, 0.0], [3.0, 0.5]])
    new, _ = step_from([[10.0, 20.0]], [[1.0, 2.0]], [-1e9], tril=tril)
    assert_close(new.position, torch.tensor([[12.0, 24.0]]))


def test_one_step_takes_minus_infinity_for_a_zero_and_nan_and_infinity_for_faults():
    """Kills: a chain caught at +inf or NaN for ever, and a zero of the density counted as fault."""
    faults = torch.tensor([NAN, INF, -INF, 0.0])

    def log_density(theta):
        return torch.where(theta[:, 0] > 0, faults, 0.0)

    new, info = step_from([[-1.0]] * 4, [[2.0]] * 4, [-INF] + [-1e300] * 3, log_density)
    assert info.accepted.tolist() == [False, False, False, True]
    assert info.nonfinite.tolist() == [True, True, False, False]
    assert_close(new.position[:, 0], torch.tensor([-1.0, -1.0, -1.0, 1.0]))
    assert new.log_density.isfinite().all()


@pytest.mark.parametrize("scale", [2.4, 1.0, 0.1])
def test_long_run_acceptance_on_a_standard_normal(scale):
    """R10: (2/π)·arctan(2/s) = 0.442, 0.705, 0.968. Kills: any other acceptance rule."""
    start = torch.randn(4000, 1)
    result = random_walk_mh(normal, start, 25, 0, seed=1, proposal_sd=scale)
    rate = result.acceptance_rate
    expected = 2 / math.pi * math.atan(2 / scale)
    assert abs(float(rate.mean()) - expected) < 5 * float(rate.std()) / math.sqrt(len(rate))
    assert round(expected, 3) == {2.4: 0.442, 1.0: 0.705, 0.1: 0.968}[scale]


def within_five_standard_errors(statistic, expected):
    """Batch means with the independent chains as batches."""
    batch = statistic.mean(1)
    error = batch.std(0) / math.sqrt(len(batch))
    assert ((batch.mean(0) - torch.as_tensor(expected)).abs() < 5 * error).all()
    assert (error < 0.1).all()


def test_stationary_law_of_a_correlated_normal():
    """Kills: ratio inverted or dropped, rejected proposals left out, values not carried along."""
    mean, tril = torch.tensor([3.0, -1.0]), torch.tensor([[2.0, 0.0], [-1.0, 0.4]])
    target = torch.distributions.MultivariateNormal(mean, scale_tril=tril, validate_args=False)
    samples = random_walk_mh(target.log_prob, torch.randn(100, 2) * 4, 400, 400, seed=2).samples
    within_five_standard_errors(samples, mean)
    centred = samples - mean
    products = centred[..., :, None] * centred[..., None, :]
    within_five_standard_errors(products.flatten(2), (tril @ tril.T).flatten())


def test_stationary_law_at_a_hard_edge():
    """Exponential(1), −inf below 0. Kills: draws at rejected steps dropped, an edge that leaks."""

    def log_density(theta):
        return torch.where(theta[:, 0] > 0, -theta[:, 0], -INF)

    start = torch.rand(200, 1) + 0.5
    result = random_walk_mh(log_density, start, 400, 100, seed=3, proposal_sd=2.0)
    assert (result.samples > 0).all() and result.num_nonfinite == 0
    within_five_standard_errors(result.samples, 1.0)
    within_five_standard_errors(result.samples.square(), 2.0)


def record_proposals(monkeypatch):
    trils = []

    def recording(state, noise, log_u, tril, log_density):
        trils.append(tril.clone())
        return mh_step(state, noise, log_u, tril, log_density)

    monkeypatch.setattr(lib.mh, "mh_step", recording)
    return trils


def test_adaptation_is_frozen_after_warm_up(monkeypatch):
    """Kills: adaptation that goes on, which gives a chain without the right stationary law."""
    trils = record_proposals(monkeypatch)
    random_walk_mh(normal, torch.randn(4, 2), 50, 100, seed=4)
    assert len(trils) == 150
    assert len({tuple(tril.flatten().tolist()) for tril in trils[100:]}) == 1
    assert len({tuple(tril.flatten().tolist()) for tril in trils[:101]}) == 101


def test_proposal_sd_fixes_the_proposal(monkeypatch):
    trils = record_proposals(monkeypatch)
    random_walk_mh(normal, torch.randn(4, 2), 5, 20, seed=4, proposal_sd=0.7)
    assert all(torch.equal(tril, 0.7 * torch.eye(2)) for tril in trils)


def test_warm_up_finds_shape_and_scale(monkeypatch):
    """Kills: covariance of positions mistaken for its factor, scale not adapted, L transposed."""
    true = torch.tensor([[100.0, 0.0], [0.9, 0.1]])
    target = torch.distributions.MultivariateNormal(torch.zeros(2), scale_tril=true)
    trils = record_proposals(monkeypatch)
    result = random_walk_mh(target.log_prob, torch.randn(40, 2) @ true.T, 200, 800, seed=5)
    white = torch.linalg.solve_triangular(true, trils[-1], upper=False)
    assert_close(white / white[0, 0], torch.eye(2), atol=0.25, rtol=0)
    assert abs(float(result.acceptance_rate.mean()) - 0.337) < 0.05


def test_scale_moves_by_the_excess_acceptance():
    """Kills: Robbins-Monro with the wrong sign or gain."""
    adaptation = Adaptation(1, num_warmup=1000)
    state, ones = MHState(torch.zeros(2, 1), torch.zeros(2)), torch.ones(2)
    info = MHInfo(ones.bool(), ones, ~ones.bool())
    logs = [math.log(float(adaptation.tril))]
    for step in (1, 2):
        adaptation.update(step, state, info)
        logs.append(math.log(float(adaptation.tril)))
    assert_close(torch.tensor(logs).diff(), 0.56 / torch.tensor([1.0, 2.0]).sqrt())


def test_warm_up_of_a_chain_that_never_moves_keeps_a_usable_proposal():
    def spike(theta):
        return torch.where(theta.square().sum(-1) == 0, 0.0, -INF)

    result = random_walk_mh(spike, torch.zeros(1, 2), 5, 64, seed=6)
    assert result.acceptance_rate.tolist() == [0.0]
    assert torch.equal(result.samples, torch.zeros(1, 5, 2))


def test_sizes_and_bookkeeping():
    """Kills: warm-up kept, a density that belongs to the proposal, acceptance of the warm-up."""
    calls = []

    def log_density(theta):
        calls.append(len(theta))
        return normal(theta)

    result = random_walk_mh(log_density, torch.randn(3, 2), 70, 30, seed=7)
    assert calls == [3] * 101
    assert result.samples.shape == (3, 70, 2)
    assert_close(result.log_density, normal(result.samples))
    moved = (result.samples.diff(dim=1) != 0).any(-1).sum(1)
    first = result.acceptance_rate * 70 - moved
    assert_close(first, first.round())
    assert ((first.round() == 0) | (first.round() == 1)).all()


def test_nonfinite_proposals_are_counted_from_the_first_step_on():
    """Kills: warm-up left out of the count, zeros of the density counted."""
    faults = []

    def log_density(theta):
        value = torch.where(theta[:, 0] > 1, NAN, normal(theta))
        value = torch.where(theta[:, 0] < -1, -INF, value)
        faults.append(int(value.isnan().sum()))
        return value

    result = random_walk_mh(log_density, torch.zeros(5, 1), 40, 40, seed=8)
    assert result.num_nonfinite == sum(faults) > sum(faults[41:])
    assert (result.samples.abs() <= 1).all()


def test_same_seed_same_chain_and_the_global_generator_is_untouched():
    start, before = torch.randn(2, 3), torch.get_rng_state()
    one, two, other = (random_walk_mh(normal, start, 20, 20, seed=seed) for seed in (9, 9, 10))
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(one, two, strict=True):
        assert_close(left, right, rtol=0, atol=0)
    assert not torch.equal(one.samples, other.samples)


def test_float32_start_runs_in_float64_and_keeps_no_graph():
    start = torch.zeros(2, 1, dtype=torch.float32, requires_grad=True)
    result = random_walk_mh(normal, start, 5, 5, seed=11)
    assert result.samples.dtype == result.log_density.dtype == torch.float64
    assert not result.samples.requires_grad


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"initial": torch.zeros(3)}, r"initial must be \(chains, theta\); got shape \(3,\)"),
        ({"initial": torch.zeros(0, 2)}, r"initial must be .* got shape \(0, 2\)"),
        ({"num_steps": 0}, "num_steps must be at least 1; got 0"),
        ({"num_warmup": -1}, "num_warmup must not be negative; got -1"),
        ({"proposal_sd": 0.0}, "proposal_sd must be positive and finite; got 0.0"),
        ({"proposal_sd": NAN}, "proposal_sd must be positive and finite; got nan"),
        ({"log_density": lambda t: -t.square()}, r"log_density must map .* got shape \(2, 1\)"),
        (
            {"log_density": lambda t: torch.tensor([0.0, NAN])},
            "every chain must start where log_density is finite; got nan for chain 1",
        ),
        ({"log_density": lambda t: torch.tensor([-INF, 0.0])}, "got -inf for chain 0"),
    ],
)
def test_refusals_say_rule_and_value(kwargs, message):
    arguments = {"log_density": normal, "initial": torch.zeros(2, 1), "num_steps": 5}
    with pytest.raises(ValueError, match=message):
        random_walk_mh(**{**arguments, "num_warmup": 5, "seed": 0, **kwargs})
