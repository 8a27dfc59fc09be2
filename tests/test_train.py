"""The optimiser: steps that must not count, schedules, the verdict, fits with a known answer."""

import copy
import gc
import platform
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import lib
from lib import config, supply, train
from lib.machine import settled
from lib.maf import stretched
from lib.posterior import Noise, VariationalPosterior
from lib.schedule import refit_steps
from lib.smoother import Chain
from lib.start import find_start

QUICK = lib.FitConfig(num_steps=10, num_samples=4, log_every=5, refits=0)


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
    """What one training step was given, and the weights it left: its own, and all of q(ϑ)."""

    rate: float
    noise: Noise
    alpha: float
    weights: list[torch.Tensor]
    theta: list[torch.Tensor]


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """Filled with one entry for each training step."""
    made, make_step = [], train.make_step

    def recording(loss, optimizer):
        step, q = make_step(loss, optimizer), loss.func.__self__.q

        def recorded(noise, alpha):
            out = step(noise, alpha)
            weights, theta = (
                [w.detach().clone() for w in part]
                for part in (optimizer.weights, q.theta_flow.parameters())
            )
            made.append(Step(float(optimizer.rate), noise, float(alpha), weights, theta))
            return out

        return recorded

    monkeypatch.setattr(train, "make_step", recording)
    return made


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

    The first step must not depend on α, the second must; none does with the chain, where no
    gradient goes through ϑ.
    """
    model, data = ou()
    elbos = []
    for base, tempering in ((False, 1.0), (False, 10.0), (True, 1.0), (True, 10.0)):
        family = lib.Family(base=base)
        config = replace(QUICK, tempering=tempering, dtype="float64", family=family)
        elbos.append(lib.fit(model, data, config, device="cpu", progress=False).history.elbo)
    assert elbos[0][0] == pytest.approx(elbos[1][0], rel=1e-12)
    assert elbos[0][2] != pytest.approx(elbos[1][2], rel=1e-9)
    assert elbos[2] == pytest.approx(elbos[3], rel=1e-12)
    alphas = [1.0] * 10 + [10.0, 8.2, 6.4, 4.6, 2.8] + [1.0] * 5
    assert [step.alpha for step in steps] == pytest.approx(alphas * 2)
    rates = [0.01 * train.schedule(i / 10) for i in range(10)]
    assert [step.rate for step in steps] == pytest.approx(rates * 4)


def test_judge():
    """Kills a verdict that ignores the slope, its error, or a skipped step."""
    rng = np.random.default_rng(1)
    flat = rng.normal(size=1000)
    assert train.judge(flat, 0.01)[0]
    rising = flat + 0.02 * np.arange(1000)
    assert not train.judge(rising, 0.2)[0] and "still moves by +" in train.judge(rising, 0.2)[1]
    late, early = flat.copy(), flat.copy()
    late[-3], early[3] = np.nan, np.nan
    verdict = (False, "not converged: 1 steps of the last fifth were skipped")
    assert train.judge(late, 9.9) == verdict
    assert train.judge(early, 0.01)[0]
    assert train.judge(rising[::-1], 0.2)[1].startswith("not converged: the ELBO still moves by -")
    settled = flat.copy()
    settled[:800] += np.linspace(-50, 0, 800)
    assert train.judge(settled, 0.01)[0], "only the last fifth counts"
    assert train.judge(np.zeros(5), 9.9)[1] == "not converged: 5 steps are too few to judge"
    quiet = np.linspace(0.0, 1.0, 1000) + 1e-3 * flat
    assert not train.judge(quiet, 0.19)[0], "significant and large"
    assert train.judge(quiet, 0.21)[0], "significant, but small"


def test_judge_does_not_pass_what_noise_hides():
    """Kills 1e10 nats within two standard errors. Some nats a step in a short run do pass."""
    noise = np.random.default_rng(1).normal(size=100)
    assert train.judge(5 * noise, 0.2)[1].endswith("within two standard errors")
    trace = 1e10 * noise
    found, reason = train.judge(trace, 0.2)
    assert not found and reason.startswith("not converged: the ELBO is too noisy to tell, it moves")
    one = noise.copy()
    one[-4] = -1e14
    assert "too noisy to tell" in train.judge(one, 0.2)[1]


class Broken(lib.OrnsteinUhlenbeck):
    """NaN in the training steps from ``first`` to ``last``: what else is drawn has no gradient."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.calls = first, last, 0

    def drift(self, t, x, theta):
        drift = super().drift(t, x, theta)
        self.calls += torch.is_grad_enabled() and x.dtype == torch.float32
        return drift * torch.nan if self.first <= self.calls <= self.last else drift


def broken(first: int, last: int) -> tuple[lib.StateSpaceModel, lib.Observations]:
    model, data = ou()
    sde, prior = Broken(first, last), Normal(torch.zeros(3), 1.0)
    return lib.StateSpaceModel(sde, model.observation, prior, [20.0]), data


@pytest.mark.parametrize("good", [0, 60])
def test_many_broken_steps_stop_with_the_terms_name_and_the_last_good_weights(steps, good):
    """Kills weights that turn NaN, and a stop that is counted over the run or leaves no name."""
    config = lib.FitConfig(num_steps=300, num_samples=4, log_every=10, refits=0)
    fit = lib.fit(*broken(good + 1, 1000), config, device="cpu", progress=False)
    assert not fit.converged and len(fit.history.step) == good + 50
    assert fit.reason.startswith(f"stopped at step {good + 50}: 50 steps in a row")
    assert fit.reason.endswith("not finite: log_transition")
    kept, left = (
        sorted((list(w.shape), w.flatten().tolist()) for w in weights)
        for weights in (steps[max(good - 1, 0)].weights, fit.q.layers.parameters())
    )
    assert kept == left
    assert f"stopped at step {good + 50}" in fit.diagnostics(100).verdict


def test_a_skipped_step_is_counted_and_the_run_goes_on(steps):
    """Kills a skipped step that is reported as a good one, or that moves the weights."""
    config = lib.FitConfig(num_steps=60, num_samples=4, refits=0)
    fit = lib.fit(*broken(31, 33), config, device="cpu", progress=False)
    assert np.flatnonzero(~np.isfinite(fit.history.elbo)).tolist() == [30, 31, 32]
    good, last, first = (steps[i].weights for i in (29, 32, 33))
    assert all(map(torch.equal, good, last)) and not all(map(torch.equal, last, first))
    late = lib.fit(*broken(55, 55), config, device="cpu", progress=False)
    assert not late.converged and late.reason.endswith("1 steps of the last fifth were skipped")


def test_elbo_reaches_the_evidence_and_never_exceeds_it():
    """Kills a wrong sign or a missing term anywhere between the flows and the joint density.

    With fewer data or a narrower prior q(ϑ) starts far too narrow, and a short run is a lottery.
    """
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 0.5),
        x0=[2.0],
    )
    path = model.simulate(torch.tensor([[1.0, 0.0, 1.0]]), 40, 0.2, seed=3).x[0, 1:, 0]
    data = lib.Observations(0.2 * torch.arange(1, 41), path + torch.randn(40), 0.2)
    evidence = lib.ou_posterior(data.y[:, 0], 0.2, exact=False, x0=2.0, prior_sd=0.5).log_evidence
    config = lib.FitConfig(num_steps=600, family=lib.Family(num_flows=0))
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
    config = lib.FitConfig(num_steps=600, refits=0, family=lib.Family(num_flows=0))
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
    config = lib.FitConfig(num_steps=12, num_samples=4, dtype=dtype, refits=0)
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
        inside.append((torch.get_num_threads(), float(denormal * 1), gc.get_freeze_count() > 0))
        if interrupted:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(train, "schedule", schedule)
    config = lib.FitConfig(num_steps=1, num_samples=1, threads=2, refits=0)
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
    assert inside[0] == (2, 0.0, True), "two threads, denormals flushed, old objects left alone"
    assert float(denormal * 1) > 0 and gc.get_freeze_count() == 0


def test_what_the_caller_has_set_stays_set():
    """Kills denormals switched on, and objects thawed, that the caller wanted otherwise."""
    torch.set_flush_denormal(True)
    gc.freeze()
    try:
        with settled(1):
            pass
        assert float(torch.tensor(1e-310) * 1) == 0 and gc.get_freeze_count() > 0
    finally:
        torch.set_flush_denormal(False)
        gc.unfreeze()


FAULTS = """
import resource, torch
from lib.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(400_000) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """Kills thresholds mixed up: 20 tensors of 1.6 MB meet thousands of page faults, or none."""
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before > 5_000 and after < 100


def test_refits_are_every_fifth_from_the_end_backwards():
    assert refit_steps(3, 1000) == [1000, 800, 600]
    assert refit_steps(0, 1000) == [] and refit_steps(2, 3) == [3, 2]
    assert refit_steps(8, 1000) == [1000, 800, 600, 400, 200]
    assert lib.FitConfig.paper().refits == 0


class Refit:
    """In place of ``refit_theta``: moves q(ϑ) and gives tails, unless it is to refuse.

    The first call of a new fit comes before any step.
    """

    def __init__(self, monkeypatch, steps: list[Step], *refused: int) -> None:
        self.steps, self.refused = steps, refused
        self.at, self.draws, self.found, self.left = [], [], [], []
        self.clock = 0.0
        monkeypatch.setattr(supply, "refit_theta", self)
        monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: self.clock))

    def __call__(self, flow, log_p, draws, generator, num_steps):
        self.at.append(len(self.steps))
        self.draws.append(draws)
        self.clock += 1.0
        weights = list(flow.parameters())
        refused = len(self.at) - 1 in self.refused
        if not refused:
            with torch.no_grad():
                for weight in weights:
                    weight.add_(0.01)
            noise = torch.randn(50, 3, dtype=weights[0].dtype, generator=generator)
            self.found.append(10.0 + len(self.at) + noise)
        self.left.append([w.detach().clone() for w in weights])
        return None if refused else self.found[-1]


def refitted_run(monkeypatch, steps, *refused: int, refits: int = 2, wide_samples: int = 5):
    """20 steps of which each shows what it was given; refits before the 16th and at the end."""
    refit = Refit(monkeypatch, steps, *refused)
    config = lib.FitConfig(num_steps=20, num_samples=4, wide_samples=wide_samples, refits=refits)
    return lib.fit(*ou(), config, device="cpu", progress=False), refit


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def chain_of_noise(q: VariationalPosterior, noise: Noise) -> Chain:
    """The chain that belongs to this noise of ϑ, for q(ϑ) as it is."""
    with torch.no_grad():
        return q.chain(q.theta_flow(noise.theta)[0])


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_q_of_theta_moves_in_refits_alone_and_the_path_learns(monkeypatch, steps, optimizer):
    """Kills a step that moves q(ϑ), a refit one off, one too many, or of another's draws."""
    refit = Refit(monkeypatch, steps)
    config = lib.FitConfig(num_steps=20, num_samples=4, refits=2, optimizer=optimizer)
    fit = lib.fit(*ou(), config, device="cpu", progress=False)
    assert refit.at == [0, 16, 20]
    assert refit.draws == [supply.START_DRAWS, supply.EARLY_DRAWS, supply.LAST_DRAWS]
    assert all(equal(step.theta, refit.left[0]) for step in steps[:16])
    assert all(equal(step.theta, refit.left[1]) for step in steps[16:])
    last = copy.deepcopy(fit.q.theta_flow)
    torch.nn.utils.vector_to_parameters(
        torch.cat([w.flatten() for w in refit.left[2]]), last.parameters()
    )
    last.lengthen_tails()
    assert equal(list(fit.q.theta_flow.parameters()), list(last.parameters()))
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert not equal(before.weights, after.weights)
    assert [step.rate for step in steps] == [0.01 * train.schedule(i / 20) for i in range(20)]


def test_without_the_chain_the_bound_trains_q_of_theta(monkeypatch, steps):
    """Kills a refit before the first step, and q(ϑ) left out, where gradients go through ϑ."""
    refit = Refit(monkeypatch, steps)
    config = lib.FitConfig(num_steps=20, num_samples=4, refits=1, family=lib.Family(base=False))
    lib.fit(*ou(), config, device="cpu", progress=False)
    assert refit.at == [20] and all(step.noise.chain is None for step in steps)
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert not equal(before.theta, after.theta)


@pytest.mark.parametrize("wide", [0, 5])
@pytest.mark.parametrize("base", [True, False])
def test_wide_draws_are_stretched_first_and_then_the_tails_found(monkeypatch, steps, wide, base):
    """Kills tails that replace q's own draws, wide draws stretched twice, and stale tails.

    Also a stock of earlier q(ϑ) that outlives a refit, or is handed out twice. A step's ϑ come from
    the stock, last in first out; its path is drawn when it is taken.
    """
    refit = Refit(monkeypatch, steps, 0)
    config = lib.FitConfig(
        num_steps=20, num_samples=4, wide_samples=wide, refits=3, family=lib.Family(base=base)
    )
    monkeypatch.setattr(supply, "MOST_STEPS", 3)
    lib.fit(*ou(), config, device="cpu", progress=False)
    starts = [0] if base else []
    assert refit.at == [*starts, 12, 16, 20]
    generator, stock = torch.Generator().manual_seed(0), []
    # With the chain, paths in pairs of opposite noise share a ϑ; of five the last has none beside.
    inner, outer = ([0, 0, 1, 1], [2, 2, 3, 3, 4]) if base else ([0, 1, 2, 3], [4, 5, 6, 7, 8])
    which = inner + outer[:wide]
    size, own = len(set(which)), len(set(inner))
    sign = [1, -1, 1, -1, 1, -1, 1, -1, 1] if base else [1] * 9
    sign = torch.tensor(sign[: 4 + wide])[:, None, None]
    options = {"generator": generator, "dtype": torch.float32}
    # Without the chain the first refit that is called, and here refused, is that before step 12.
    found = {12: refit.found[0], 16: refit.found[1]} if base else {16: refit.found[0]}
    tails = None
    for i, step in enumerate(steps):
        if i in refit.at and i:
            stock.clear()
            if i in found:
                torch.randn(50, 3, **options)
                tails = found[i]
        for _ in range(0 if stock else 3 if base else 1):
            theta = torch.randn(size, 3, **options)
            if tails is None:
                stock.append(stretched(theta, size - own))
            else:
                chosen = torch.randint(50, (size - own,), generator=generator)
                stock.append(torch.cat([theta[:own], tails[chosen]]))
        assert step.noise.theta.equal(stock.pop()[which])
        assert step.noise.path.equal(torch.randn(size, 20, 1, **options)[which] * sign)


def test_chains_are_those_of_each_steps_theta(monkeypatch, steps):
    """Kills chains that change places in the stock, and those of a q(ϑ) before its refit."""
    seen, taken = [], train._Run.take_step

    def taking(run, share, noise):
        own = chain_of_noise(run.q, noise)
        pairs = zip(noise.chain, own, strict=True)
        seen.append(max(float((a - b).abs().max()) for a, b in pairs if a.numel()))
        return taken(run, share, noise)

    monkeypatch.setattr(train._Run, "take_step", taking)
    refitted_run(monkeypatch, steps)
    assert len(seen) == 20 and max(seen) < 1e-5
    assert all(step.noise.chain.mean.shape == (1, 20, 9) for step in steps)


def test_a_refused_refit_takes_nothing_back(monkeypatch, steps):
    """Kills q(ϑ) that moves, or tails that are lost, when a later refit is refused."""
    refit = refitted_run(monkeypatch, steps, 1, 2, refits=3)[1]
    assert refit.at == [0, 12, 16, 20]
    assert all(equal(step.theta, refit.left[0]) for step in steps)
    for step in steps:
        assert (step.noise.theta[4:, None] == refit.found[0]).all(2).any(1).all()


def test_without_refits_none_is_made_but_the_first(monkeypatch, steps):
    fit, refit = refitted_run(monkeypatch, steps, refits=0)
    assert refit.at == [0] and fit.history.seconds.tolist() == [1.0] * 20


def test_a_run_that_broke_is_not_refitted_at_its_end(monkeypatch, steps):
    """Kills a refit of what stopped in its last step, and one of a run cut short."""
    for num_steps in (50, 300):
        refit = Refit(monkeypatch, steps)
        config = lib.FitConfig(num_steps=num_steps, num_samples=4, log_every=10, refits=1)
        fit = lib.fit(*broken(1, 1000), config, device="cpu", progress=False)
        assert fit.reason.startswith("stopped at step 50") and len(refit.at) == 1
        steps.clear()


def test_seconds_count_every_refit_and_the_last(monkeypatch, steps):
    """Kills a clock that is read before the last refit; it ticks in refits alone."""
    fit = refitted_run(monkeypatch, steps)[0]
    assert fit.history.seconds.tolist() == [1.0] * 16 + [2.0] * 3 + [3.0]


def test_the_real_refit_ends_a_run_and_leaves_the_path(monkeypatch, steps):
    """Kills a refit whose outcome does not reach the fit: same seed, same steps, another q(ϑ)."""
    monkeypatch.setattr("lib.supply.LAST_DRAWS", 500)
    monkeypatch.setattr("lib.supply.LAST_STEPS", 3)
    config = lib.FitConfig(num_steps=10, num_samples=4, refits=1)
    fit = lib.fit(*ou(), config, device="cpu", progress=False)
    pairs = zip(fit.q.theta_flow.named_parameters(), steps[-1].theta, strict=True)
    assert {name for (name, now), last in pairs if now.equal(last)} == {"shift", "stretch"}
    plain = lib.fit(*ou(), replace(config, refits=0), device="cpu", progress=False)
    assert fit.history.elbo.tolist() == plain.history.elbo.tolist()


def test_a_resumed_run_has_the_schedule_of_a_fresh_one(monkeypatch, steps):
    """Kills rates that go on from the decayed one, an α of the end, refits counted from step 1."""
    refit = Refit(monkeypatch, steps)
    config = lib.FitConfig(num_steps=20, num_samples=4, refits=2, tempering=3.0)
    fit = lib.fit(*ou(), config, device="cpu", progress=False)
    fit = lib.fit(*ou(), config, device="cpu", progress=False, resume=fit)
    assert refit.at == [0, 16, 20, 36, 40], "what a fit has learned is not refitted at its start"
    for given in ("rate", "alpha"):
        first, second = (
            [getattr(step, given) for step in part] for part in (steps[:20], steps[20:])
        )
        assert first == second
    pairs = zip(steps[:20], steps[20:], strict=True)
    assert not any(one.noise.path.equal(other.noise.path) for one, other in pairs)
    seconds = [1.0] * 16 + [2.0] * 3 + [3.0] * 17 + [4.0] * 3 + [5.0]
    assert fit.history.seconds.tolist() == seconds


def test_a_resumed_run_that_stops_says_at_which_step_of_all():
    config = lib.FitConfig(num_steps=10, num_samples=4, log_every=10, refits=0)
    fit = lib.fit(*broken(11, 1000), config, device="cpu", progress=False)
    assert len(fit.history.step) == 10 and np.isfinite(fit.history.elbo).all()
    config = replace(config, num_steps=300)
    fit = lib.fit(*broken(11, 1000), config, device="cpu", progress=False, resume=fit)
    assert fit.reason.startswith("stopped at step 70: 50 steps in a row")
    assert fit.history.step[-1] == 70 and not fit.converged


def test_progress_bar_shows_only_when_asked(capsys):
    model, data = ou()
    lib.fit(model, data, QUICK, device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    fit = lib.fit(model, data, QUICK, device="cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "10/10" in err
    assert f"ELBO {fit.history.elbo[5:].mean():.2f}" in err
    lib.fit(model, data, QUICK, device="cpu", progress=False, resume=fit)
    assert capsys.readouterr() == ("", "")


def test_one_progress_bar_tells_of_the_start_the_steps_and_the_refits(monkeypatch, capsys):
    """Kills a bar that comes after the start, is silent at a refit, or is one of several."""
    seen = []

    def watched(stage):
        def watching(*args):
            seen.append(capsys.readouterr().err)
            return stage(*args)

        return watching

    monkeypatch.setattr(train, "find_start", watched(find_start))
    monkeypatch.setattr(supply, "refit_theta", watched(lambda *_: None))
    config = replace(QUICK, refits=2)
    lib.fit(*ou(), config, device="cpu", progress=True)
    end = capsys.readouterr().err
    start, first, middle, last = seen
    assert first == "", "the refit before the first step is a part of the start"
    assert re.fullmatch(r"\rfit: start: +0%[^\r]*0/10[^\r]*", start)
    assert re.search(
        r"\rfit: +50%[^\r]*5/10 \[\d\d:\d\d<\d\d:\d\d, [^\r]*ELBO -\d+\.\d\d\]", middle
    )
    assert re.search(r"\rfit: refit: +50%[^\r]*5/10[^\r]*$", middle)
    assert re.match(r" *\rfit: +50%", last) and re.search(r"\rfit: refit: 100%[^\r]*$", last)
    assert re.search(r"\rfit: 100%[^\r]*10/10 \[[^\r]*ELBO -\d+\.\d\d\] *\n$", end)
    assert (start + first + middle + last + end).count("\n") == 1


def test_refusals():
    model, data = ou()
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda'; got 'tpu'"):
        lib.fit(model, data, QUICK, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' was asked for, but no CUDA GPU is available"):
            lib.fit(model, data, QUICK, device="cuda")
    with pytest.raises(ValueError, match="mode 'cuda_graph' needs a CUDA GPU; got device 'cpu'. U"):
        lib.fit(model, data, replace(QUICK, mode="cuda_graph"), device="cpu")
    with pytest.raises(ValueError, match="F has 1 columns.*got 2: y0, y1"):
        lib.fit(model, lib.Observations([0.1], [[1.0, 2.0]], 0.1), QUICK)
    with pytest.raises(ValueError, match="seed must be a whole number of 64 bits"):
        lib.fit(model, data, QUICK, seed=2**64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"num_steps": 0}, "num_steps must be a whole number, 1 or more; got 0"),
        ({"num_samples": -1}, "num_samples must be a whole number, 1 or more; got -1"),
        ({"threads": 0}, "threads must be a whole number, 1 or more; got 0"),
        ({"log_every": 0}, "log_every must be a whole number, 1 or more; got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive and at most 1; got nan"),
        ({"tempering": float("nan")}, "tempering must be 1"),
        ({"tempering": float("inf")}, r"tempering must be 1 \(none\) or more, finite; got inf"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and at most 1; got 0"),
        ({"learning_rate": 1000.0}, "learning_rate must be .* at most 1; got 1000.0. Try 0.01"),
        ({"tempering": 0.5}, "tempering must be 1"),
        ({"optimizer": "sgd"}, "optimizer must be one of"),
        ({"gradient": "score"}, "gradient must be one of"),
        ({"refits": -1}, "refits must be a whole number, 0 or more; got -1"),
        ({"refits": 6}, "refits must be 5 at most; got 6"),
        ({"wide_samples": -1}, "wide_samples must be a whole number, 0 or more; got -1"),
        ({"mode": "compiled"}, "mode must be one of .*cuda_graph.*; got 'compiled'"),
    ],
)
def test_config_refuses(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        lib.FitConfig(**change)


def test_the_ends_of_the_options_are_allowed():
    """Kills a bound that leaves out its end, and a sixth refit for which there is no time."""
    assert lib.FitConfig(learning_rate=1.0, tempering=1.0, refits=5).refits == 5
    assert len(refit_steps(5, 1000)) == 5 == len(refit_steps(6, 1000))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": "0.1"}, "learning_rate must be a number; got '0.1'"),
        ({"tempering": None}, "tempering must be a number; got None"),
        ({"family": {"hidden": 3}}, "family must be a Family; got {'hidden': 3}. Write lib.Famil"),
        ({"family": lib.Family}, "family must be a Family; got <class"),
    ],
)
def test_config_refuses_what_is_of_another_kind(change, words):
    given = {"learning_rate": 0.1, "tempering": 1.0, "family": lib.Family()}
    with pytest.raises(TypeError, match=words):
        config._check_kinds(**given | change)


def test_a_grid_of_millions_of_steps_is_warned_of(monkeypatch):
    """2 000 000 steps; 100 000 are silent. Kills a warning that ``fit`` does not give."""
    sentence = r"2000000 steps of dt = 1e-05 from t0 = 0: a fit takes about 150 GB .* Is dt too"
    with pytest.warns(UserWarning, match=sentence):
        train._warn_of_length(lib.Observations([20.0], [1.0], dt=1e-5))
    train._warn_of_length(lib.Observations([20.0], [1.0], dt=2e-4))
    monkeypatch.setattr(train, "LONG_GRID", 3)
    with pytest.warns(UserWarning, match="the grid has 4 steps of dt = 0.1"):
        lib.fit(*ou(4), replace(QUICK, num_steps=1), device="cpu", progress=False)


def test_judge_compares_with_the_fit_it_went_on_from():
    """Kills: a run that settled below what it started from, and counts as converged."""
    flat = np.zeros(100) + 1e-3 * np.sin(np.arange(100))
    assert train.judge(flat, 0.2, flat + 0.1)[0]
    found, reason = train.judge(flat, 0.2, flat + 5.0)
    assert not found and reason.startswith("not converged: the ELBO is 5.00 nats below")
    assert train.judge(flat, 0.2, flat - 5.0)[0]
    assert train.judge(flat, 0.2, np.full(100, np.nan))[0], "the earlier run had no number"
    # Only the end of the earlier run counts, and a step that it skipped is no number.
    before = np.concatenate([flat + 50.0, flat])
    before[-3] = np.nan
    assert train.judge(flat, 0.2, before)[0]
    better = flat + 5.0
    better[-3] = np.nan
    assert not train.judge(flat, 0.2, better)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "x"}, "model must have type StateSpaceModel; got str"),
        ({"observations": "counts.csv"}, "observations must have type Observations; got str. Read"),
        ({"config": {"num_steps": 5}}, "config must have type FitConfig; got dict. Write lib.Fit"),
        ({"resume": "fit.pt"}, "resume must have type FitResult; got str. Read one with load_fit"),
    ],
)
def test_fit_refuses_what_is_of_another_kind(change, words):
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        torch.distributions.Normal(torch.zeros(3), 1.0),
        [20.0],
    )
    given = {"model": model, "observations": lib.Observations([0.1], [20.0], dt=0.1)}
    with pytest.raises(TypeError, match=words):
        # The door alone: the shape checks of the tests would refuse it before.
        train._check_kinds(**given | {"config": None, "resume": None} | change)
