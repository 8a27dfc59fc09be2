"""A fit that goes on from another: its weights and history, and never another model's."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import lib
from lib import train
from lib.elbo import elbo
from lib.posterior import Noise, VariationalPosterior
from lib.supply import ThetaSupply

FIRST = lib.FitConfig(num_steps=60, num_samples=8, dtype="float64", refits=0)
FURTHER = lib.FitConfig(num_steps=12, num_samples=8, dtype="float64", wide_samples=0, refits=0)


def ou(dt: float = 0.1, shift: float = 0.0) -> tuple[lib.StateSpaceModel, lib.Observations]:
    """The study's OU model on the first ten observations of its data."""
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.tensor([-1.5, 5.0, shift]), 0.5),
        x0=[20.0],
    )
    return model, lib.Observations(data.times[:10], data.y[:10], dt)


@pytest.fixture(scope="module")
def first() -> lib.FitResult:
    return lib.fit(*ou(), FIRST, device="cpu", progress=False)


def resumed(fit: lib.FitResult, config: lib.FitConfig = FURTHER, **others) -> lib.FitResult:
    return lib.fit(*ou(), config, device="cpu", progress=False, resume=fit, **others)


def weights(fit: lib.FitResult) -> list[torch.Tensor]:
    return [w.clone() for w in fit.q.state_dict().values()]


def first_noise(q: VariationalPosterior, fit: lib.FitResult, seed: int) -> Noise:
    """That of the first step of a run with this seed."""
    generator, grid = torch.Generator().manual_seed(seed), fit.observations.grid()
    return ThetaSupply(fit.model, q, grid, FURTHER, generator).noise()


def test_resume_starts_from_the_weights_of_the_fit(first, monkeypatch):
    """Its first ELBO is that of the fit's own q at that step's noise; no new start is looked for.

    Kills a restart from scratch, weights of another q, and a fit that is changed.
    """
    kept, history = weights(first), copy.deepcopy(first.history)
    monkeypatch.setattr(train, "find_start", None)
    fit = resumed(first, seed=5)
    noise = first_noise(first.q, first, 5 + 60 * train.SEED_STRIDE)
    want = elbo(first.model, first.q, first.observations.grid(), noise).value
    assert fit.history.elbo[60] == pytest.approx(want.item(), rel=1e-12)
    assert fit.history.elbo[60:63].mean() == pytest.approx(first.history.elbo[-10:].mean(), abs=0.3)
    assert all(map(torch.equal, weights(first), kept))
    assert not all(map(torch.equal, weights(fit), kept))
    assert not any(w.requires_grad for f in (first, fit) for w in f.q.parameters())
    assert all(map(np.array_equal, first.history, history))


def test_the_history_goes_on(first):
    """Kills steps that start from 1 again, and seconds that do."""
    fit = resumed(first)
    assert fit.history.step.tolist() == list(range(1, 73))
    assert fit.history.elbo[:60].tolist() == first.history.elbo.tolist()
    assert fit.history.seconds[:60].tolist() == first.history.seconds.tolist()
    assert (np.diff(fit.history.seconds[59:]) > 0).all() and np.isfinite(fit.history.elbo).all()
    twice = resumed(fit)
    assert twice.history.step.tolist() == list(range(1, 85))
    assert (fit.seed, fit.device, fit.family) == (0, "cpu", first.family)


def test_the_verdict_is_of_the_new_steps_alone(first, monkeypatch):
    """Kills a verdict on the joined history, whose last fifth would reach into the old one."""
    seen = []
    monkeypatch.setattr(
        train, "judge", lambda trace, tolerance, before: (seen.append(trace), (True, ""))[1]
    )
    fit = resumed(replace(first, converged=False, reason="it was cut short"))
    assert len(seen) == 1 and seen[0].tolist() == fit.history.elbo[60:].tolist()
    assert fit.converged and fit.reason == ""


def test_a_loaded_fit_resumes_as_the_one_in_memory(first, tmp_path):
    """To the last bit. Kills a file without the weights' own dtype, and noise that differs."""
    first.save(tmp_path / "fit.pt")
    loaded = lib.load_fit(tmp_path / "fit.pt", first.model, first.observations)
    one, other = resumed(first), resumed(loaded)
    assert all(map(torch.equal, weights(one), weights(other)))
    assert one.history.elbo.tolist() == other.history.elbo.tolist()


def test_the_noise_is_new_at_the_same_seed(first):
    """Kills a run that sees the noise of the one before again, and a seed without effect."""
    noise = []
    take_step = train._Run.take_step

    def taking(self, share, given):
        noise.append(given)
        return take_step(self, share, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train._Run, "take_step", taking)
        config = replace(FURTHER, num_steps=1)
        fit = lib.fit(*ou(), config, device="cpu", progress=False)
        fit = resumed(fit, config)
        resumed(fit, config)
        resumed(fit, config, seed=1)
    for starts in (
        [float(made.theta[0, 0]) for made in noise],
        [made.path[0].sum() for made in noise],
    ):
        assert len(starts) == 4 == len(set(map(float, starts)))


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("float64", "float32")])
def test_the_dtype_may_change(first, before, after):
    fit = lib.fit(*ou(), replace(FURTHER, dtype=before), device="cpu", progress=False)
    further = resumed(fit, replace(FURTHER, dtype=after))
    assert {w.dtype for w in further.q.parameters()} == {getattr(torch, after)}
    assert {w.dtype for w in fit.q.parameters()} == {getattr(torch, before)}
    q = copy.deepcopy(fit.q).to(getattr(torch, after))
    noise = first_noise(q, fit, 12 * train.SEED_STRIDE)
    grid = fit.observations.grid(getattr(torch, after))
    want = elbo(fit.model.to(getattr(torch, after)), q, grid, noise).value.item()
    assert further.history.elbo[12] == pytest.approx(want, rel=1e-6)


def test_without_a_config_the_family_is_the_fits(monkeypatch):
    """Kills the default family, and another unit of the states."""
    family = lib.Family(num_flows=1, theta_flows=1, base=False, unit=2.0)
    fit = lib.fit(*ou(), replace(FURTHER, family=family), device="cpu", progress=False)
    made = []
    monkeypatch.setattr(train, "FitConfig", lambda family: made.append(family) or replace(
        FURTHER, family=family
    ))  # fmt: skip
    further = lib.fit(*ou(), device="cpu", progress=False, resume=fit)
    assert made == [family] and further.family == family
    assert further.q.to_range.unit == 2.0
    assert further.q.theta_flow.shift.ne(fit.q.theta_flow.shift).all()


def test_refusals(first):
    model, data = ou()
    strangers = {
        r"prior density \(log p of .*\); got .*, the fit has .*, in entry 1": (
            ou(shift=1.0)[0],
            data,
        ),
        r"dt; got 0.05, the fit has 0.1": (model, ou(dt=0.05)[1]),
        r"y; got .*, the fit has .*, in entry 4": (
            model,
            lib.Observations(data.times, data.y + (torch.arange(10) == 3)[:, None], 0.1),
        ),
    }
    for what, pair in strangers.items():
        rule = f"resume must be a fit of this model and of these observations; .* another {what}"
        with pytest.raises(ValueError, match=rule):
            lib.fit(*pair, FURTHER, device="cpu", progress=False, resume=first)
    config = replace(FURTHER, family=lib.Family(hidden=30, layers=1))
    with pytest.raises(
        ValueError,
        match=r"got hidden 30, the fit has 32; layers 1, the fit has 2\. Leave .*family=fit.family",
    ):
        resumed(first, config)
