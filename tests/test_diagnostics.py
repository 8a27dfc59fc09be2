"""The trust report against closed forms: equal weights, normal weights, a Pareto tail."""

import math

import numpy as np
import pytest
import torch

from lib.diagnostics import diagnose, ess_fraction, k_hat, normalised_weights, weighted_quantile


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


@pytest.mark.parametrize("shape", [0.3, 0.9])
def test_k_hat_finds_the_tail_of_pareto_weights(shape):
    """w = u^{−k} has Pareto shape k. Kills the raw weights in place of their logarithms."""
    log_weight = -shape * torch.rand(100_000).log()
    assert k_hat(log_weight) == pytest.approx(shape, abs=0.1)


def test_ess_counts_the_draws_that_matter():
    log_weight = torch.full((100,), -1e4)
    log_weight[:25] = 700.0
    assert ess_fraction(log_weight) == pytest.approx(0.25)
    assert normalised_weights(log_weight)[:25].sum() == pytest.approx(1.0)


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


def test_weighted_quantiles_are_those_of_repeated_values():
    values = torch.randn(300)
    counts = torch.randint(1, 6, (300,))
    levels = torch.tensor([0.05, 0.5, 0.95])
    repeated = torch.quantile(values.repeat_interleave(counts), levels)
    weighted = weighted_quantile(values, levels, counts / counts.sum())
    torch.testing.assert_close(weighted, repeated, atol=0.05, rtol=0.0)
    plain = torch.as_tensor(np.quantile(values.numpy(), levels.numpy()))
    torch.testing.assert_close(weighted_quantile(values, levels), plain, atol=0.02, rtol=0.0)
