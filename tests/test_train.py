"""The optimiser: steps that must not count, schedules, the verdict, fits with a known answer."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import lib
from lib import train
from lib.posterior import Noise

QUICK = lib.FitConfig(num_steps=40, num_samples=4, log_every=10)


def ou(num_observed: int = 20) -> tuple[lib.StateSpaceModel, lib.Observations]:
    """The study's OU model on the first observations of its data."""
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.tensor([-1.5, 5.0, 0.0]), 0.5),
        x0=[20.0],
    )
    return model, lib.Observations(data.times[:num_observed], data.y[:num_observed], 0.1)


def test_step_skips_a_non_finite_gradient_and_keeps_adams_moments():
    """Kills zeroed gradients in place of a skip: they would still move Adam's moments."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    factor = torch.tensor([1.0, 2.0])
    step = train.make_step(
        lambda noise, alpha: ((weight * factor).sum() * alpha, torch.zeros(())), [weight], optimizer
    )
    noise = Noise(torch.zeros(1, 1), torch.zeros(1, 1, 1))
    assert step(noise, torch.tensor(1.0))[1] == 0
    kept = [weight.detach().clone(), *(v.clone() for v in optimizer.state[weight].values())]
    assert step(noise, torch.tensor(torch.nan))[1] == 1
    for before, after in zip(kept, [weight, *optimizer.state[weight].values()], strict=True):
        torch.testing.assert_close(before, after.detach(), rtol=0, atol=0)
    step(noise, torch.tensor(1.0))
    assert (weight < kept[0]).all()


def test_step_clips_the_global_norm():
    """Kills a step without clipping."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([weight], lr=0.0, fused=True)
    step = train.make_step(
        lambda noise, alpha: (1e6 * weight.sum(), torch.zeros(())), [weight], optimizer
    )
    step(Noise(torch.zeros(1, 1), torch.zeros(1, 1, 1)), torch.tensor(1.0))
    assert weight.grad.norm().item() == pytest.approx(train.CLIP_NORM, rel=1e-5)


def test_schedule_warms_up_and_decays_to_nothing():
    shares = np.linspace(0, 1, 1001)
    values = np.array([train.schedule(share) for share in shares])
    peak = int(values.argmax())
    assert shares[peak] == pytest.approx(train.WARM_UP_SHARE, abs=2e-3)
    assert values.max() == pytest.approx(1.0, abs=1e-3) and values[0] < 0.05
    assert (np.diff(values[: peak + 1]) > 0).all() and (np.diff(values[peak:]) < 0).all()
    assert values[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("share", "alpha"), [(0.0, 10), (0.25, 5.5), (0.5, 1), (0.9, 1)])
def test_tempering_is_exactly_one_from_the_middle_on(share, alpha):
    assert train.temper(10.0, share) == alpha


def test_reported_elbo_has_no_tempering():
    """Kills a history of the tempered bound: the first step must not depend on α."""
    model, data = ou()
    first = []
    for tempering in (1.0, 10.0):
        config = lib.FitConfig(num_steps=10, num_samples=4, tempering=tempering, dtype="float64")
        fit = lib.fit(model, data, config, device="cpu", progress=False)
        first.append(fit.history.elbo[0])
    assert first[0] == pytest.approx(first[1], rel=1e-12)


def test_judge():
    """Kills a verdict that ignores the slope, its error, or a skipped step."""
    rng = np.random.default_rng(1)
    flat = rng.normal(size=1000)
    assert train.judge(flat)[0]
    rising = flat + 0.02 * np.arange(1000)
    assert not train.judge(rising)[0] and "still moves by +" in train.judge(rising)[1]
    late, early = flat.copy(), flat.copy()
    late[-3], early[3] = np.nan, np.nan
    assert train.judge(late) == (False, "not converged: 1 steps of the last fifth were skipped")
    assert train.judge(early)[0]
    assert not train.judge(np.zeros(5))[0]


class Broken(lib.OrnsteinUhlenbeck):
    """Turns NaN in training: the probe and the start see float64."""

    def drift(self, t, x, theta):
        drift = super().drift(t, x, theta)
        return drift * torch.nan if x.dtype == torch.float32 else drift


def test_many_broken_steps_stop_with_the_terms_name_and_the_first_weights():
    model, data = ou()
    broken = lib.StateSpaceModel(Broken(), model.observation, Normal(torch.zeros(3), 1.0), [20.0])
    config = lib.FitConfig(num_steps=300, num_samples=4)
    fit = lib.fit(broken, data, config, device="cpu", progress=False)
    assert not fit.converged and len(fit.history.step) < 300
    assert fit.reason.startswith("stopped at step 50: 50 steps in a row")
    assert fit.reason.endswith("not finite: log_transition")
    assert all(weight.isfinite().all() for weight in fit.q.state_dict().values())
    assert "stopped at step 50" in fit.diagnostics(100).verdict


def test_elbo_reaches_the_evidence_and_never_exceeds_it():
    """Kills a wrong sign or a missing term anywhere between the flows and the joint density."""
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    short = lib.Observations(data.times[:30], data.y[:30], 0.1)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 0.5),
        x0=[20.0],
    )
    evidence = lib.ou_posterior(short.y[:, 0], 0.1, exact=False, prior_sd=0.5).log_evidence
    config = lib.FitConfig(num_steps=700, num_samples=20)
    fit = lib.fit(model, short, config, device="cpu", progress=False)
    report = fit.diagnostics(4000)
    assert report.elbo < evidence + 4 * report.elbo_se
    assert evidence - report.elbo < 0.3
    assert report.log_evidence == pytest.approx(evidence, abs=0.1)


def test_fit_without_data_returns_the_prior():
    """Kills a prior whose Jacobian or scale is lost on the way."""
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.tensor([-1.0, 5.0, -0.5]), torch.tensor([0.3, 1.0, 0.2])),
        x0=[5.0],
    )
    empty = lib.Observations([0.1, 0.5], [[5.0], [torch.nan]], 0.1)
    empty.y[:] = torch.nan
    config = lib.FitConfig(num_steps=800, num_samples=20)
    vartheta = lib.fit(model, empty, config, device="cpu", progress=False).draws(4000).vartheta
    torch.testing.assert_close(
        vartheta.mean(0), torch.tensor([-1.0, 5.0, -0.5]), atol=0.1, rtol=0.0
    )
    torch.testing.assert_close(vartheta.std(0), torch.tensor([0.3, 1.0, 0.2]), atol=0.0, rtol=0.15)


def test_seed_decides_and_the_process_is_put_back():
    model, data = ou()
    torch.manual_seed(5)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    runs = [lib.fit(model, data, QUICK, seed, "cpu", progress=False) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert (runs[0].history.elbo == runs[1].history.elbo).all()
    assert (runs[0].history.elbo != runs[2].history.elbo).any()


def test_progress_bar_shows_only_when_asked(capsys):
    model, data = ou()
    lib.fit(model, data, QUICK, device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    lib.fit(model, data, QUICK, device="cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "40/40" in err and "ELBO" in err


def test_refusals():
    model, data = ou()
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda'; got 'tpu'"):
        lib.fit(model, data, QUICK, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' was asked for, but no CUDA GPU is available"):
            lib.fit(model, data, QUICK, device="cuda")
    with pytest.raises(ValueError, match="F has 1 columns.*got 2"):
        lib.fit(model, lib.Observations([0.1], [[1.0, 2.0]], 0.1), QUICK)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"num_steps": 0}, "num_steps must be a whole number, 1 or more; got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive; got 0"),
        ({"tempering": 0.5}, "tempering must be 1"),
        ({"mode": "cuda_graph"}, "mode must be 'eager'; got 'cuda_graph'"),
    ],
)
def test_config_refuses(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        lib.FitConfig(**change)
