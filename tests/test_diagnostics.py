"""The trust report against closed forms: equal weights, normal weights, a Pareto tail."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from lib.diagnostics import LEVELS, Diagnostics, SecondLook, diagnose, marginals
from lib.weights import bound, ess_fraction, k_hat, psis_weights, tempered, weighted_quantile
from lib.widened import NormalMixture, second_look


def test_equal_weights_are_perfect():
    report = diagnose(torch.full((1000,), -3.0), 200, True, "converged")
    assert report[:4] == (-3.0, 0.0, pytest.approx(-3.0), pytest.approx(1.0))


def test_normal_log_weights():
    """log w ~ N(0, s²): log evidence s²/2, effective share exp(−s²). Kills log-mean mix-ups."""
    s = 0.5
    log_weight = s * torch.randn(400_000)
    report = diagnose(log_weight, 200, True, "")
    assert report.elbo == pytest.approx(0.0, abs=5 * report.elbo_se)
    assert report.elbo_se == pytest.approx(s / math.sqrt(400_000), rel=0.01)
    assert report.log_evidence == pytest.approx(s**2 / 2, abs=0.005)
    assert report.ess_fraction == pytest.approx(math.exp(-(s**2)), abs=0.01)
    assert report.k_hat < 0.5
    assert not report.flagged and report.verdict.startswith("No fault seen")
    assert "ELBO 0.1" in report.verdict and "effective share 0.78" in report.verdict


def test_tempered_weights_count_as_the_share_that_is_asked_for():
    """Of N(0, s²) the effective share is exp(−s²). Kills a power that is not the largest."""
    log_weight = 2.0 * torch.randn(400_000, dtype=torch.float64)
    log_weight[::1000] = -math.inf  # a draw without mass stays one

    def powers(share: float) -> Tensor:
        found = tempered(log_weight, lambda values: torch.softmax(values, 0), share)
        dead = log_weight == -math.inf
        assert (found[dead] < -1e20).all()
        return (found / log_weight)[~dead]

    # 0.7^4 is the first power with (2·power)² < −log 0.7.
    for share, power in ((0.01, 1.0), (0.2, 0.7**2), (0.7, 0.7**4)):
        torch.testing.assert_close(powers(share), torch.full((399_600,), power).double())


def test_tempered_weights_begin_at_the_base():
    """From N(0, 1) to N(3, 1), by draws of N(0, 2²): a normal between. Kills a base left out."""
    x = 2 * torch.randn(200_000, dtype=torch.float64)
    log_m, log_q, log_p = (
        Normal(m, s).log_prob(x) for m, s in ((0.0, 2.0), (0.0, 1.0), (3.0, 1.0))
    )
    found = tempered(log_p - log_m, lambda values: torch.softmax(values, 0), 0.4, log_q - log_m)
    weight = torch.softmax(found, 0)
    mean = float(weight @ x)
    assert min(abs(mean - 3 * 0.7**k) for k in (1, 2, 3)) < 0.03
    assert float(weight @ (x - mean).square()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("broken", [-math.inf, math.inf, math.nan])
def test_weights_that_say_nothing_are_not_tempered(broken):
    log_weight = torch.tensor([broken, -math.inf])
    assert tempered(log_weight, lambda values: torch.softmax(values, 0), 0.1) is None
    assert tempered(torch.zeros(5), lambda values: torch.softmax(values, 0), 1.1) is None


@pytest.mark.parametrize("shape", [0.3, 0.9])
def test_k_hat_finds_the_tail_of_pareto_weights(shape):
    """w = u^{−k} has Pareto shape k. Kills the raw weights in place of their logarithms."""
    log_weight = -shape * torch.rand(100_000).log()
    assert k_hat(log_weight) == pytest.approx(shape, abs=0.1)


def test_ess_counts_the_draws_that_matter():
    log_weight = torch.full((100,), -1e4)
    log_weight[:25] = 700.0
    assert ess_fraction(log_weight) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("log_weight", "converged", "words"),
    [
        (0.1 * torch.linspace(-2, 2, 500), False, "the run was cut"),
        (-0.95 * torch.linspace(1e-4, 1, 5000).log(), True, "do not trust the weighted numbers"),
        (torch.cat([torch.zeros(2000), torch.full((1,), 9.0)]), True, "effective share"),
        (torch.cat([torch.zeros(900), torch.full((100,), -20.0)]), True, "nats below the evidence"),
        (torch.tensor([0.0] * 99 + [-math.inf]), True, "not finite"),
        (torch.tensor([0.0] * 99 + [math.nan]), True, "not finite"),
    ],
)
def test_each_fault_is_flagged_in_words(log_weight, converged, words):
    """Kills a NaN that passes because a comparison with it is false."""
    report = diagnose(log_weight, 200, converged, "the run was cut")
    assert report.flagged and report.verdict.startswith("Flagged: ") and words in report.verdict


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_draws_without_a_finite_weight_leave_the_others_their_numbers(bad):
    """Kills a report, and weighted numbers, that one draw at which a model explodes makes NaN."""
    whole = 0.3 * torch.randn(2000)
    log_weight = torch.cat([whole[:900], torch.full((3,), bad), whole[900:]])
    one, two = (diagnose(each, 200, True, "") for each in (whole, log_weight))
    assert not one.flagged and two.flagged
    assert two.verdict == ("Flagged: weights not finite: 3 of 2,003 draws.")
    # q cut to the rest is denser there by 2003/2000, and all numbers are of the draws of q.
    less = math.log(2000 / 2003)
    assert two.elbo == pytest.approx(one.elbo + less) and two.elbo_se == pytest.approx(one.elbo_se)
    assert two.k_hat == one.k_hat
    assert two.log_evidence == pytest.approx(one.log_evidence + less)
    assert two.ess_fraction == pytest.approx(one.ess_fraction * 2000 / 2003)
    weights = psis_weights(log_weight)
    assert float(weights.sum()) == pytest.approx(1.0) and (weights[900:903] == 0).all()


def test_one_draw_with_a_weight_has_no_bound():
    """Kills an error of 0, or a warning of torch, from a sample of one."""
    assert all(map(math.isnan, bound(torch.tensor([math.nan, 1.0]))))
    value, se = bound(torch.tensor([1.0, math.nan, 3.0]))
    assert (value, se) == (pytest.approx(2.0 + math.log(2 / 3)), pytest.approx(1.0))


@pytest.mark.parametrize("count", [1, 3, 135])
def test_a_few_draws_with_all_the_mass_are_not_trusted(count):
    """Kills equal weights of a tail's length that pass for those of a perfect q."""
    log_weight = torch.full((2000,), -math.inf)
    log_weight[:count] = 0.0
    assert k_hat(log_weight) == math.inf
    assert k_hat(torch.cat([torch.zeros(1990), log_weight[-10:]])) == 0.0


def test_the_gap_that_is_allowed_grows_with_the_path():
    """ELBO 0.9 nats below: too much for 100 unknowns, not for 300. Kills a fixed limit."""
    log_weight = 1.35 * torch.randn(10_000).clamp(-3, 3)
    short, long = (diagnose(log_weight, size, True, "") for size in (100, 300))
    assert 0.8 < short.log_evidence - short.elbo < 1.0
    assert "nats below the evidence, more than 0.75" in short.verdict and short.flagged
    assert not long.flagged


def test_every_fault_is_named():
    log_weight = -1.2 * torch.rand(20_000).log()
    verdict = diagnose(log_weight, 0, False, "stopped at step 9").verdict
    for words in ("stopped at step 9;", "k-hat is 1.", "effective share", "more than 0.50."):
        assert words in verdict
    bad = diagnose(torch.tensor([0.0] * 99 + [math.inf]), 0, True, "")
    assert bad.flagged and bad.k_hat == math.inf and "not finite" in bad.verdict


def test_a_weight_of_zero_hides_its_value():
    """Kills weights that are not carried along when the values are sorted."""
    values, weights = torch.tensor([5.0, 1.0, 9.0, 3.0]), torch.tensor([0.5, 0.0, 0.0, 0.5])
    low, high = weighted_quantile(values, torch.tensor([0.25, 0.75]), weights)
    assert (float(low), float(high)) == (3.0, 5.0)


def test_a_draw_without_weight_pulls_no_quantile():
    """Kills the interpolation towards it beyond the last draw that counts."""
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, math.inf])
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    assert float(weighted_quantile(values, torch.tensor([0.95]), weights)) == 3.0


def test_weighted_quantiles_are_those_of_repeated_values():
    values = torch.randn(300)
    counts = torch.randint(1, 6, (300,))
    levels = torch.tensor([0.05, 0.5, 0.95])
    repeated = torch.quantile(values.repeat_interleave(counts), levels)
    weighted = weighted_quantile(values, levels, counts / counts.sum())
    torch.testing.assert_close(weighted, repeated, atol=0.05, rtol=0.0)
    plain = torch.as_tensor(np.quantile(values.numpy(), levels.numpy()))
    torch.testing.assert_close(weighted_quantile(values, levels), plain, atol=0.02, rtol=0.0)


def test_psis_weights_are_the_plain_ones_but_for_the_tail():
    """Kills weights that do not sum to 1, and smoothing that changes the order of the draws."""
    log_weight = -0.6 * torch.rand(4000).log() - 700.0
    plain, smooth = torch.softmax(log_weight, 0), psis_weights(log_weight)
    assert smooth.sum().item() == pytest.approx(1.0)
    body = log_weight.argsort()[: 4000 - 3 * 64]
    ratio = smooth[body] / plain[body]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert torch.equal(smooth.argsort(), plain.argsort())
    assert smooth.max() < plain.max() or plain.max() < 0.01


def test_psis_quantiles_err_less_than_plain_ones():
    """q with 0.65 of the target's sd in 3 dimensions: kills weights left unsmoothed."""
    target, q = Normal(0.0, 1.0), Normal(0.0, 0.65)
    level = torch.tensor([0.025])
    weighings = {"plain": lambda log_weight: torch.softmax(log_weight, 0), "psis": psis_weights}
    errors = dict.fromkeys(weighings, 0.0)
    for _ in range(60):
        x = q.sample((4000, 3))
        log_weight = (target.log_prob(x) - q.log_prob(x)).sum(1)
        for name, weigh in weighings.items():
            found = weighted_quantile(x[:, 0], level, weigh(log_weight))
            errors[name] += float((found - target.icdf(level)) ** 2)
    assert errors["psis"] < 0.97 * errors["plain"]


def test_marginals_side_by_side():
    """q = N(0, 1) for a target N(0.5, 0.8²). Kills raw for weighted, and rows that are mixed up."""
    vartheta = torch.randn(100_000, 2)
    target = Normal(torch.tensor([0.5, 0.0]), torch.tensor([0.8, 1.0]))
    log_weight = (target.log_prob(vartheta) - Normal(0.0, 1.0).log_prob(vartheta)).sum(1)
    table = marginals(("a", "b"), vartheta, log_weight)
    assert table.names == ("a", "b") and table.levels.tolist() == list(LEVELS)
    levels = torch.tensor(LEVELS)[:, None]
    raw = Normal(0.0, 1.0).icdf(levels.expand(-1, 2)).T.numpy()
    np.testing.assert_allclose(table.raw, raw, atol=0.03)
    np.testing.assert_allclose(table.weighted, target.icdf(levels).T.numpy(), atol=0.03)
    assert table.k_hat == k_hat(log_weight)


def look(log_p, d: int, n: int = 6000, noise: float = 0.3) -> tuple[SecondLook, Tensor]:
    """The second look at q = N(0, 1)^d, and the weights of q's draws; paths add noise to both."""

    def log_q(x):
        return Normal(0.0, 1.0).log_prob(x).sum(1)

    def with_noise(x):
        return log_p(x) + noise * torch.randn(len(x)) - noise**2 / 2

    own = torch.randn(n, d)
    value = with_noise(own)
    second = second_look(
        log_q, with_noise, torch.randn(10_000, d), own, value, torch.randn(n // 3, d)
    )
    return second, value - log_q(own)


def normal(sd: float):
    return lambda x: Normal(0.0, sd).log_prob(x).sum(1)


def two_modes(distance: float):
    """Seven tenths where q is, three tenths along the first axis."""

    def log_p(x):
        moved = x - distance * torch.eye(x.shape[1])[0]
        near, far = (Normal(0.0, 1.0).log_prob(z).sum(1) for z in (x, moved))
        return torch.logaddexp(near + math.log(0.7), far + math.log(0.3))

    return log_p


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_a_right_q_passes_the_second_look(d):
    """Over 20 seeds, and the evidence 0 is found. Kills a mixture with the shares interchanged."""
    for _ in range(20):
        second, log_weight = look(normal(1.0), d)
        report = diagnose(log_weight, 200, True, "", second)
        assert not report.flagged and report.verdict.startswith("No fault seen"), report
        assert report.unseen < 0.01 and "% of the mass beyond q(ϑ)." in report.verdict
        assert report.wide_log_evidence == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("log_p", "d"), [(normal(2.0), 1), (normal(2.0), 3), (two_modes(8.0), 2), (two_modes(8.0), 4)]
)
def test_what_q_never_visits_is_seen(log_p, d):
    """Over 20 seeds: half the sd, or a mode missed, which the weights of q's own draws hide."""
    hidden = 0
    for _ in range(20):
        second, log_weight = look(log_p, d)
        hidden += not diagnose(log_weight, 200, True, "").flagged
        report = diagnose(log_weight, 200, True, "", second)
        assert report.flagged and "of the posterior mass found lies where" in report.verdict
        assert report.wide_log_evidence == pytest.approx(0.0, abs=0.4)
    assert hidden == 20 or d in (1, 3)


def looked(inside: int, outside: Tensor, wide_inside: int = 100) -> SecondLook:
    """Weights 1 of q's draws and of wide ones inside, then wide ones outside as given."""
    log_weight = torch.cat([torch.zeros(inside + wide_inside), outside.log()])
    place = torch.arange(len(log_weight))
    return SecondLook(log_weight, place >= inside, place >= inside + wide_inside)


def judge(second: SecondLook, elbo: float = 0.0):
    return diagnose(elbo + 0.1 * torch.linspace(-2, 2, 500), 200, True, "", second)


def test_share_and_effective_draws_outside_are_counted():
    report = judge(looked(900, torch.tensor([50.0, 50.0, 0.0])))
    assert report.unseen == pytest.approx(100 / 1100) and report.unseen_ess == pytest.approx(2.0)
    assert report.wide_log_evidence == pytest.approx(math.log(1100 / 1003))


def test_few_draws_outside_are_named_but_not_flagged():
    """Nine per cent on two draws. Kills a flag raised by one lucky draw."""
    few, many = looked(900, torch.full((2,), 50.0)), looked(900, torch.full((10,), 10.0))
    assert not judge(few).flagged and "count as 2.0; look again" in judge(few).verdict
    assert judge(many).flagged and "9% of the posterior mass found lies" in judge(many).verdict
    assert "look again" not in judge(many).verdict
    little = judge(looked(900, torch.full((50,), 1.0)))
    assert not little.flagged and little.unseen == pytest.approx(50 / 1050)


def test_wide_draws_without_weight_say_so():
    """Kills silence about a second look that saw nothing."""
    second = looked(900, torch.zeros(300), wide_inside=10)
    assert not judge(second).flagged and "count as 10.0, fewer than 20" in judge(second).verdict
    second = looked(900, torch.zeros(300), wide_inside=0)
    assert not judge(second).flagged and judge(second).unseen_ess == 0.0


def test_evidence_of_the_wide_draws_is_held_against_the_elbo():
    """1.5 nats above with a limit of 1: flagged if sure, not if one draw says it."""
    sure = looked(900, torch.zeros(0))
    report = judge(sure, elbo=-1.5)
    assert (
        report.flagged and "the evidence 1.50 nats above the ELBO, more than 1.00" in report.verdict
    )
    assert not judge(sure, elbo=-0.9).flagged
    one = judge(looked(900, torch.tensor([3480.0])))
    assert 1.4 < one.wide_log_evidence < 1.6 and not one.flagged
    nan = sure._replace(log_weight=torch.full_like(sure.log_weight, torch.inf))
    assert judge(nan).flagged


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (0.0, "draws from a wider q(ϑ) put the evidence 2.00 nats above the ELBO"),
        (-0.5, "the ELBO is 1.89 nats below the evidence"),
        (-1.5, "the ELBO is 1.89 nats below the evidence"),
    ],
)
def test_the_larger_gap_is_said_once(level, words):
    """Gaps of 1.89 and of 2.00, 1.50, 0.50 with a limit of 1. Kills two sentences, or the lesser.

    Without the wider draws, and with their gap alone, see the tests above.
    """
    log_weight = torch.cat([torch.zeros(900), torch.full((100,), -20.0)])
    second = looked(900, torch.zeros(0))
    second = second._replace(log_weight=second.log_weight + level)
    report = diagnose(log_weight, 200, True, "", second)
    assert report.flagged and f"{words}, more than 1.00" in report.verdict
    assert report.verdict.count("nats") == 1


def test_no_draw_with_any_weight_is_flagged():
    """Kills a division by the effective number of draws, which is 0 here."""
    second = looked(900, torch.zeros(0))
    second = second._replace(log_weight=torch.full_like(second.log_weight, -torch.inf))
    report = diagnose(torch.full((500,), torch.nan), 200, True, "", second)
    assert report.flagged and "not finite" in report.verdict


def test_without_a_second_look_nothing_is_said_of_it():
    report = diagnose(0.1 * torch.linspace(-2, 2, 500), 200, True, "")
    assert math.isnan(report.unseen) and "beyond" not in report.verdict
    assert Diagnostics._fields[:7] == (
        *("elbo", "elbo_se", "log_evidence", "ess_fraction", "k_hat", "flagged", "verdict"),
    )


@pytest.mark.parametrize("d", [1, 3])
def test_proposal_is_a_mixture_of_normals(d):
    """Kills a factor squared once too often, a lost Jacobian, and draws of another law."""
    tril = torch.linalg.cholesky(torch.randn(10, d).T.cov().reshape(d, d))
    loc, factor = torch.tensor([[0.0], [30.0]]).expand(2, d), torch.tensor([2.0, 5.0])
    mixture = NormalMixture(loc, factor, tril)
    normals = [MultivariateNormal(m, scale_tril=f * tril) for m, f in zip(loc, factor, strict=True)]
    x = mixture(torch.randn(20_000, d))
    want = torch.logsumexp(torch.stack([q.log_prob(x) for q in normals]), 0) - math.log(2)
    torch.testing.assert_close(mixture.log_prob(x), want)
    for part in range(2):
        cov = x[part::2].T.cov().reshape(d, d) / factor[part] ** 2
        torch.testing.assert_close(cov, tril @ tril.T, rtol=0.0, atol=0.1 * float(tril.max()) ** 2)
        assert (x[part::2].mean(0) - loc[part]).abs().max() < 0.3


def test_second_look_at_a_point_far_away_that_overflows():
    """Kills nan weights: p is nan beyond 6 sds; and a first wave that is all inside or empty."""

    def log_p(x):
        return torch.where(x.abs().amax(1) > 6, torch.nan, Normal(0.0, 1.0).log_prob(x).sum(1))

    second, log_weight = look(log_p, 2)
    report = diagnose(log_weight, 200, True, "", second)
    assert not report.flagged and report.wide_log_evidence == pytest.approx(0.0, abs=0.03)
    for n in (1, 3, 6):
        second, _ = look(lambda x: log_p(20 * x), 2, n=n + 3)
        assert len(second.log_weight) == n + 3 + (n + 3) // 3


def test_k_hat_of_equal_weights_is_zero():
    """Those of a perfect q. Kills: the infinite shape of a tail without spread, a flag for it."""
    assert k_hat(torch.full((1000,), -3.0)) == 0.0
