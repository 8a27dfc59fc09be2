"""Fits from several starts: what counts as agreement, on draws whose answer is known."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal

import lib
from lib import agreement
from lib.agreement import compare, compare_fits

NAMES, N = ("a", "b"), 4001


def draws(*moves: tuple[float, float]) -> torch.Tensor:
    """Evenly spread over [-2, 2], iqr 2, in each of two parameters; one fit per pair of moves."""
    line = torch.linspace(-2, 2, N)[:, None]
    return torch.stack([line + torch.tensor(move) for move in moves])


def weights(*elbos: float, sd: float = 0.0) -> torch.Tensor:
    spread = torch.linspace(-1, 1, N) * sd * 3**0.5
    return torch.stack([elbo + spread for elbo in elbos])


def test_fits_that_agree():
    result = compare(NAMES, weights(-10.0, -9.6, -9.8), draws((0, 0), (0.2, 0), (0, 0.4)), 200)
    assert result.elbo.tolist() == pytest.approx([-10.0, -9.6, -9.8])
    assert result.elbo_gap == pytest.approx(0.4) and result.best == 1
    assert result.shift.tolist() == pytest.approx([0.1, 0.2])
    assert not result.flagged and result.verdict == (
        "3 fits agree: ELBOs within 0.40 nats, quartiles of ϑ within 0.20 interquartile ranges. "
        "Fit 1 has the largest ELBO, -9.60."
    )


def test_one_elbo_behind_is_flagged_by_the_gap_rule():
    """1.2 nats: too much for 200 unknowns, not for 400. Kills a comparison of neighbours."""
    args = weights(-9.0, -9.6, -10.2), draws((0, 0), (0, 0), (0, 0))
    result = compare(NAMES, *args, 200)
    assert result.flagged and "ELBOs differ by 1.20 nats, more than 1.00" in result.verdict
    assert result.best == 0 and not compare(NAMES, *args, 400).flagged


def test_noise_of_the_elbos_is_allowed_for():
    """Kills a flag raised by too few draws: 1.5 nats apart, standard errors of 0.32 each."""
    assert not compare(NAMES, weights(0.0, 1.5, sd=20.0), draws((0, 0), (0, 0)), 200).flagged
    assert compare(NAMES, weights(0.0, 1.5, sd=2.0), draws((0, 0), (0, 0)), 200).flagged


def test_elbos_too_noisy_to_compare_do_not_agree():
    """Kills a limit that grows with the noise for ever: two ELBOs 1e14 nats apart, within it."""
    lost = weights(0.0, 0.0)
    lost[1, 0] = -1e18
    result = compare(NAMES, lost, draws((0, 0), (0, 0)), 200)
    assert result.elbo_gap > 1e14 and result.flagged
    words = "too noisy to compare: four standard errors are 1e+15 nats, more than 10. Fit 0"
    assert words in result.verdict


def test_another_mode_is_flagged_and_named():
    """Kills a pooled range that grows with the distance, and the mean of the shifts."""
    result = compare(NAMES, weights(0.0, 0.0), draws((0, 0), (0, 20.0)), 200)
    assert result.shift.tolist() == pytest.approx([0.0, 10.0]) and result.flagged
    assert "the quartiles of b differ by 10.00 interquartile ranges" in result.verdict


def test_another_width_is_flagged():
    """Same medians: kills a comparison of medians only."""
    both = draws((0, 0), (0, 0))
    both[1] *= 2
    result = compare(NAMES, weights(0.0, 0.0), both, 200)
    assert result.flagged and result.shift.tolist() == pytest.approx([1 / 3, 1 / 3])


def test_a_broken_fit_is_flagged_and_never_the_best():
    result = compare(NAMES, weights(torch.nan, -5.0), draws((0, 0), (0, 0)), 200)
    assert result.flagged and result.best == 1
    few = weights(-5.0, -5.0)
    few[0, :3] = torch.nan
    result = compare(NAMES, few, draws((0, 0), (0, 0)), 200)
    assert result.flagged and result.elbo_gap < 0.1
    assert f"fit 0: weights not finite: 3 of {few.shape[1]:,} draws" in result.verdict


def test_compare_fits_draws_from_each_and_refuses_strangers():
    data = lib.Observations([0.2, 0.4], [[19.0], [18.7]], 0.1)
    prior = Normal(torch.tensor([-1.5, 5.0, 0.0]), 0.5)
    observation = lib.GaussianObservation([[1.0]], 1.0)
    model = lib.StateSpaceModel(lib.OrnsteinUhlenbeck(), observation, prior, [20.0])
    config = lib.FitConfig(num_steps=20, num_samples=8)
    fits = [lib.fit(model, data, config, seed, "cpu", False) for seed in (0, 1)]
    result = compare_fits(fits, n=800, seed=3)
    assert result.elbo[1] == pytest.approx(fits[1].draws(800, 4).log_weight.mean().item())
    assert result.shift.shape == (3,) and result.verdict.startswith("2 fits ")
    other = replace(fits[1], observations=lib.Observations(data.times, data.y + 1, 0.1))
    with pytest.raises(ValueError, match="one model and data; fit 1 has another y"):
        compare_fits([fits[0], other])
    with pytest.raises(ValueError, match="two or more of one model and data; got 1"):
        compare_fits(fits[:1])
    with pytest.raises(ValueError, match="n must be a whole number, 2 or more; got 1"):
        compare_fits(fits, n=1)
    # Twice the same says nothing, be it the object, a copy or a fit loaded again.
    again = replace(fits[0], q=copy.deepcopy(fits[0].q), seed=5)
    for group, places in (([fits[0]] * 2, "0 and 1"), ([*fits, again], "0 and 2")):
        with pytest.raises(ValueError, match=f"starts; fits {places} are one and the same"):
            compare_fits(group, 800)


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        ("ab", "fits must be a list of fits; got str"),
        ({"a": 1}, "fits must be a list of fits; got dict"),
        (["fit.pt", "b"], "fit 0 must have type FitResult; got str"),
    ],
)
def test_what_is_no_list_of_fits_is_refused(fits, words):
    with pytest.raises(TypeError, match=words):
        agreement._check_fits(fits)
