"""The optimiser: steps that must not count, schedules, the verdict, fits with a known answer."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import lib
from lib import train
from lib.posterior import Noise

QUICK = lib.FitConfig(num_steps=10, num_samples=4, log_every=5)


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


class Step(NamedTuple):
    """What one training step was given, and the weights it left."""

    learning_rate: float
    alpha: float
    weights: list[torch.Tensor]


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """Filled with one entry for each training step."""
    made, make_step = [], train.make_step

    def recording(*args):
        groups = [group for optimizer in args[1] for group in optimizer.param_groups]
        step = make_step(*args)

        def recorded(noise, alpha):
            (rate,) = {float(group["lr"]) for group in groups}
            out = step(noise, alpha)
            weights = [w.detach().clone() for group in groups for w in group["params"]]
            made.append(Step(rate, float(alpha), weights))
            return out

        return recorded

    monkeypatch.setattr(train, "make_step", recording)
    return made


def test_step_skips_a_non_finite_gradient_and_keeps_adams_moments():
    """Kills zeroed gradients in place of a skip: they would still move Adam's moments."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    factor = torch.tensor([1.0, 2.0])
    step = train.make_step(
        lambda noise, alpha: ((weight * factor).sum() * alpha, torch.zeros(())), [optimizer]
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
    step = train.make_step(lambda noise, alpha: (1e6 * weight.sum(), torch.zeros(())), [optimizer])
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
    assert train.temper(3.7, max(share, 0.5)) == 1 and train.temper(1.0, share) == 1


def test_tempering_trains_but_the_reported_elbo_is_without_it(steps):
    """Kills a history of the tempered bound, an α or a learning rate that never reaches a step.

    The first step must not depend on α, the second must.
    """
    model, data = ou()
    elbos = []
    for tempering in (1.0, 10.0):
        config = lib.FitConfig(num_steps=10, num_samples=4, tempering=tempering, dtype="float64")
        elbos.append(lib.fit(model, data, config, device="cpu", progress=False).history.elbo)
    assert elbos[0][0] == pytest.approx(elbos[1][0], rel=1e-12)
    assert elbos[0][2] != pytest.approx(elbos[1][2], rel=1e-9)
    alphas = [1.0] * 10 + [10.0, 8.2, 6.4, 4.6, 2.8] + [1.0] * 5
    assert [step.alpha for step in steps] == pytest.approx(alphas)
    rates = [0.01 * train.schedule(i / 10) for i in range(10)]
    assert [step.learning_rate for step in steps] == pytest.approx(rates * 2)


def test_judge():
    """Kills a verdict that ignores the slope, its error, or a skipped step."""
    rng = np.random.default_rng(1)
    flat = rng.normal(size=1000)
    assert train.judge(flat, 0.0)[0]
    rising = flat + 0.02 * np.arange(1000)
    assert not train.judge(rising, 0.2)[0] and "still moves by +" in train.judge(rising, 0.2)[1]
    late, early = flat.copy(), flat.copy()
    late[-3], early[3] = np.nan, np.nan
    verdict = (False, "not converged: 1 steps of the last fifth were skipped")
    assert train.judge(late, 9.9) == verdict
    assert train.judge(early, 0.0)[0]
    assert train.judge(rising[::-1], 0.2)[1].startswith("not converged: the ELBO still moves by -")
    settled = flat.copy()
    settled[:800] += np.linspace(-50, 0, 800)
    assert train.judge(settled, 0.0)[0], "only the last fifth counts"
    assert train.judge(np.zeros(5), 9.9)[1] == "not converged: 5 steps are too few to judge"
    quiet = np.linspace(0.0, 1.0, 1000) + 1e-3 * flat
    assert not train.judge(quiet, 0.19)[0], "significant and large"
    assert train.judge(quiet, 0.21)[0], "significant, but small"


class Broken(lib.OrnsteinUhlenbeck):
    """NaN in the training steps from ``first`` to ``last``: the probe and start see float64."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.calls = first, last, 0

    def drift(self, t, x, theta):
        drift = super().drift(t, x, theta)
        if x.dtype == torch.float32:
            self.calls += 1
            return drift * torch.nan if self.first <= self.calls <= self.last else drift
        return drift


def broken(first: int, last: int) -> tuple[lib.StateSpaceModel, lib.Observations]:
    model, data = ou()
    sde, prior = Broken(first, last), Normal(torch.zeros(3), 1.0)
    return lib.StateSpaceModel(sde, model.observation, prior, [20.0]), data


@pytest.mark.parametrize("good", [0, 60])
def test_many_broken_steps_stop_with_the_terms_name_and_the_last_good_weights(steps, good):
    """Kills weights that turn NaN, and a stop that is counted over the run or leaves no name."""
    config = lib.FitConfig(num_steps=300, num_samples=4, log_every=10)
    fit = lib.fit(*broken(good + 1, 1000), config, device="cpu", progress=False)
    assert not fit.converged and len(fit.history.step) == good + 50
    assert fit.reason.startswith(f"stopped at step {good + 50}: 50 steps in a row")
    assert fit.reason.endswith("not finite: log_transition")
    kept, left = (
        sorted((list(w.shape), w.flatten().tolist()) for w in weights)
        for weights in (steps[max(good - 1, 0)].weights, fit.q.parameters())
    )
    assert kept == left
    assert f"stopped at step {good + 50}" in fit.diagnostics(100).verdict


def test_a_skipped_step_is_counted_and_the_run_goes_on(steps):
    """Kills a skipped step that is reported as a good one, or that moves the weights."""
    config = lib.FitConfig(num_steps=60, num_samples=4)
    fit = lib.fit(*broken(31, 33), config, device="cpu", progress=False)
    assert np.flatnonzero(~np.isfinite(fit.history.elbo)).tolist() == [30, 31, 32]
    assert all(map(torch.equal, steps[29].weights, steps[32].weights))
    assert not all(map(torch.equal, steps[32].weights, steps[33].weights))
    late = lib.fit(*broken(55, 55), config, device="cpu", progress=False)
    assert not late.converged and late.reason.endswith("1 steps of the last fifth were skipped")


def test_elbo_reaches_the_evidence_and_never_exceeds_it():
    """Kills a wrong sign or a missing term anywhere between the flows and the joint density."""
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 0.3),
        x0=[2.0],
    )
    path = model.simulate(torch.tensor([[1.0, 0.0, 1.0]]), 10, 0.2, seed=3).x[0, 1:, 0]
    data = lib.Observations(0.2 * torch.arange(1, 11), path + torch.randn(10), 0.2)
    evidence = lib.ou_posterior(data.y[:, 0], 0.2, exact=False, x0=2.0, prior_sd=0.3).log_evidence
    config = lib.FitConfig(num_steps=600, learning_rate=5e-3, family=lib.Family(num_flows=0))
    fit = lib.fit(model, data, config, device="cpu", progress=False)
    report = fit.diagnostics(4000)
    assert report.elbo < evidence + 4 * report.elbo_se
    assert evidence - report.elbo < 0.25
    assert report.log_evidence == pytest.approx(evidence, abs=0.05)


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
    config = lib.FitConfig(num_steps=600, num_samples=20, family=lib.Family(num_flows=0))
    vartheta = lib.fit(model, empty, config, device="cpu", progress=False).draws(4000).vartheta
    torch.testing.assert_close(
        vartheta.mean(0), torch.tensor([-1.0, 5.0, -0.5]), atol=0.1, rtol=0.0
    )
    torch.testing.assert_close(vartheta.std(0), torch.tensor([0.3, 1.0, 0.2]), atol=0.0, rtol=0.15)


def same(one: lib.FitResult, other: lib.FitResult) -> bool:
    """Whether two fits went the same way and ended at the same weights, to the last bit."""
    weights = (fit.q.state_dict().values() for fit in (one, other))
    return bool((one.history.elbo == other.history.elbo).all()) and all(map(torch.equal, *weights))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_seed_decides(dtype):
    """Kills a hidden source of noise, and a dtype that does not reach q or the reported draws."""
    model, data = ou()
    config = lib.FitConfig(num_steps=12, num_samples=4, dtype=dtype)
    state = torch.random.get_rng_state()
    first = lib.fit(model, data, config, 1, "cpu", progress=False)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator moved"
    torch.manual_seed(5)
    assert same(first, lib.fit(model, data, config, 1, "cpu", progress=False))
    assert not same(first, lib.fit(model, data, config, 2, "cpu", progress=False))
    assert {w.dtype for w in first.q.parameters()} == {getattr(torch, dtype)}
    assert np.isfinite(first.history.elbo).all() and first.draws(3).x.dtype == torch.float64
    assert model.prior.sample(1).dtype == torch.float64, "the caller's model must not change"


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_process_is_put_back(monkeypatch, interrupted):
    """Kills threads or flushed denormals that outlive the fit, also one that Ctrl-C ends."""
    denormal = torch.tensor([1e-310])
    inside = []

    def schedule(share):
        inside.append((torch.get_num_threads(), float(denormal * 1)))
        if interrupted:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(train, "schedule", schedule)
    config = lib.FitConfig(num_steps=1, num_samples=1, threads=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        if interrupted:
            with pytest.raises(KeyboardInterrupt, match="^$"):
                lib.fit(*ou(), config, device="cpu", progress=False)
        else:
            lib.fit(*ou(), config, device="cpu", progress=False)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert inside[0] == (2, 0.0), "two threads, denormals flushed"
    assert float(denormal * 1) > 0


def test_progress_bar_shows_only_when_asked(capsys):
    model, data = ou()
    lib.fit(model, data, QUICK, device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    fit = lib.fit(model, data, QUICK, device="cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "10/10" in err
    assert f"ELBO {fit.history.elbo[5:].mean():.2f}" in err


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
        ({"num_samples": -1}, "num_samples must be a whole number, 1 or more; got -1"),
        ({"threads": 0}, "threads must be a whole number, 1 or more; got 0"),
        ({"log_every": 0}, "log_every must be a whole number, 1 or more; got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive; got nan"),
        ({"tempering": float("nan")}, "tempering must be 1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive; got 0"),
        ({"tempering": 0.5}, "tempering must be 1"),
        ({"optimizer": "sgd"}, "optimizer must be one of"),
        ({"gradient": "score"}, "gradient must be one of"),
        ({"wide_samples": -1}, "wide_samples must be a whole number, 0 or more; got -1"),
        ({"mode": "cuda_graph"}, "mode must be 'eager'; got 'cuda_graph'"),
    ],
)
def test_config_refuses(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        lib.FitConfig(**change)
