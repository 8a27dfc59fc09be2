"""What a fit returns: draws and their densities, predictions, files."""

import copy
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Normal

import lib
from lib.probe import check_count
from lib.result import check_kind, check_seed
from lib.weights import psis_weights

CONFIG = lib.FitConfig(num_steps=60, num_samples=8)
CONFIGS = {"ou": CONFIG, "sir": CONFIG, "random": replace(CONFIG, dtype="float64")}
EVERY = pytest.mark.parametrize("name", ["ou", "sir", "random"])


@pytest.fixture(scope="module")
def fits() -> dict[str, lib.FitResult]:
    """Short fits of the study's two models, and one whose x_0 has a density, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ou = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 10.0),
        x0=[20.0],
    )
    sir = lib.StateSpaceModel(
        lib.SIR(),
        lib.GaussianObservation([[0.0], [1.0]], "sigma"),
        Normal(torch.zeros(3), 3.0),
        x0=[762.0, 1.0],
    )
    counts = lib.read_csv(
        lib.data_path("boarding_school_1978.csv"), dt=0.1, time="day", observed=["in_bed"]
    )
    data = {"ou": lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1), "sir": counts}
    models = {"ou": ou, "sir": sir}
    models["random"] = lib.StateSpaceModel(
        ou.sde, ou.observation, Normal(torch.zeros(3), 1.0), {"x": Normal(20.0, 1.0)}
    )
    blank = data["ou"].y[:10].clone()
    blank[4] = torch.nan
    data["random"] = lib.Observations(data["ou"].times[:10], blank, 0.1)
    made = {
        name: lib.fit(models[name], data[name], CONFIGS[name], device="cpu", progress=False)
        for name in models
    }
    torch.set_default_dtype(before)
    return made


@EVERY
def test_draws_carry_their_own_densities(fits, name):
    """Kills a weight of the wrong sign and a log q that is not that of the draw."""
    fit = fits[name]
    n, p = 700, fit.model.num_states
    draws = fit.draws(n, seed=1)
    assert draws.x.shape == (n, fit.observations.num_steps + 1, p)
    assert draws.theta.shape == draws.vartheta.shape == (n, 3)
    assert all(part.dtype == torch.float64 and not part.requires_grad for part in draws)
    if name == "random":
        assert len(draws.x[:, 0].unique()) == n
    else:
        torch.testing.assert_close(draws.x[:, 0], fit.model.x0_value.expand(n, p))
    assert len(draws.x[:, -1, 0].unique()) == len(draws.theta[:, 0].unique()) == n
    torch.testing.assert_close(draws.log_weight, draws.log_joint - draws.log_q)
    joint = fit.model.log_joint(draws.vartheta, draws.x, fit.observations.grid()).total
    torch.testing.assert_close(draws.log_joint, joint)
    torch.testing.assert_close(fit.model.to_theta(draws.vartheta), draws.theta)
    again, other = fit.draws(n, seed=1), fit.draws(n, seed=2)
    assert torch.equal(again.x, draws.x) and not torch.equal(other.x, draws.x)


@pytest.mark.parametrize("name", ["ou", "random"])
def test_log_joint_of_ou_is_a_sum_of_normals(fits, name):
    """log p(ϑ, x, y) written out. Kills a term lost, counted twice, or taken at another time."""
    fit, obs = fits[name], fits[name].observations
    draws = fit.draws(20, seed=1)
    theta1, theta2, theta3 = draws.theta[:, :, None].unbind(1)
    x = draws.x[..., 0]
    prior = Normal(0.0, {"ou": 10.0, "random": 1.0}[name]).log_prob(draws.vartheta).sum(-1)
    mean = x[:, :-1] + theta1 * (theta2 - x[:, :-1]) * 0.1
    path = Normal(mean, theta3 * 0.1**0.5).log_prob(x[:, 1:]).sum(-1)
    if name == "random":
        path = path + Normal(20.0, 1.0).log_prob(x[:, 0])
    seen = ~obs.y[:, 0].isnan()
    data = Normal(x[:, obs.index[seen]], 1.0).log_prob(obs.y[seen, 0]).sum(-1)
    torch.testing.assert_close(draws.log_joint, prior + path + data)


def test_chunks_do_not_change_the_law_of_the_draws(fits, monkeypatch):
    """Kills a generator that starts anew in each chunk, and a last chunk that is dropped."""
    fit = fits["random"]
    whole = fit.draws(3000, seed=3)
    monkeypatch.setattr(sys.modules["lib.elbo"], "CHUNK", 17)  # `lib.elbo` is the function
    small = fit.draws(3000, seed=4)
    assert len(small.x) == 3000 == len(small.x[:, 0, 0].unique())
    for one, other in ((whole.vartheta, small.vartheta), (whole.x[..., 0], small.x[..., 0])):
        se = (one.var(0) / 1500).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() < 5 * se).all()
        assert ((one.std(0) / other.std(0)).log().abs() < 0.15).all()


def test_elbo_is_below_the_evidence_which_the_weights_find(fits):
    """Kills a joint density and a log q that differ by a constant: the ELBO is at most log p(y).

    Of a poor fit too. The chain is exact for OU, so a short fit is a good one.
    """
    reference = json.loads(lib.data_path("reference/ou_a.json").read_text())
    evidence = reference["euler"]["log_evidence"]
    report = fits["ou"].diagnostics(2000)
    assert report.elbo < evidence + 4 * report.elbo_se
    assert report.log_evidence == pytest.approx(evidence, abs=0.02)
    poor = narrowed(fits["ou"], 0.1).diagnostics(2000)
    assert poor.elbo < report.elbo - 10 * poor.elbo_se
    assert poor.flagged and "effective share" in poor.verdict


def test_diagnostics_are_those_of_the_draws(fits):
    """Kills a report from other draws than the seed's, or one that forgets the verdict."""
    fit = replace(fits["random"], converged=False, reason="it was cut short")
    weight = fit.draws(1200, seed=8).log_weight
    report = fit.diagnostics(1200, seed=8)
    assert report.elbo == pytest.approx(weight.mean().item(), rel=1e-12)
    assert report.log_evidence == pytest.approx(weight.exp().mean().log().item(), rel=1e-9)
    assert report.flagged and report.verdict.startswith("Flagged: it was cut short")
    assert fit.diagnostics(1200, seed=9).elbo != report.elbo


def test_second_look_weighs_by_the_mixture_that_it_draws_from(fits):
    """Σ over q's own and the wider draws; kills wide paths weighted by another ϑ's density."""
    fit, n = fits["random"], 600
    draws = fit.draws(n, seed=8)
    second = fit._second_look(draws, 200, seed=8)
    assert second.wide.tolist() == [False] * n + [True] * 200 and second.outside[n:].sum() > 100
    log_q = fit._exact_q.theta_flow.log_prob(draws.vartheta)
    # log p − log q(x | ϑ) − log m(ϑ), with m at least 3/4 of q(ϑ), and near that in its middle.
    excess = second.log_weight[:n] - draws.log_weight
    assert (excess < math.log(4 / 3) + 1e-9).all()
    assert excess[log_q > log_q.median()].min() > math.log(4 / 3) - 0.3
    report = fit.diagnostics(n, seed=8)
    want = torch.logsumexp(second.log_weight, 0) - math.log(800)
    assert report.wide_log_evidence == pytest.approx(want.item())
    assert 0 <= report.unseen <= 1 and report.unseen_ess > 0


@pytest.fixture(scope="module")
def good() -> lib.FitResult:
    """A fit as good as they come: two observations, four steps of dt; 99 % of its draws count.

    In four seeds k-hat was at most 0.3.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.tensor([-1.5, 5.0, 0.0]), 0.5),
        x0=[20.0],
    )
    data = lib.Observations([0.2, 0.4], [[19.0], [18.7]], 0.1)
    config = lib.FitConfig(num_steps=600, num_samples=20)
    made = lib.fit(model, data, config, seed=2, device="cpu", progress=False)
    torch.set_default_dtype(before)
    return replace(made, converged=True)


def narrowed(fit: lib.FitResult, factor: float, shift: float = 0.0) -> lib.FitResult:
    """The fit with sds of q(ϑ) about so many times the old, moved by about so many old sds.

    Inside the last IAF step: the outer scale is also that in which q(x | ϑ) sees ϑ.
    """
    q = copy.deepcopy(fit.q)
    mu, s = q.theta_flow.steps[-1].network[-1].bias.data.chunk(2)
    mu += shift
    s += math.log(factor)
    return replace(fit, q=q)


def test_second_look_trusts_a_good_fit_and_sees_through_a_narrow_one(good):
    """Kills a second look that follows q(ϑ): half the sd, or a seventh of it aside."""
    fine = good.diagnostics(4000)
    assert not fine.flagged and fine.unseen < 0.02, fine
    assert fine.wide_log_evidence == pytest.approx(fine.log_evidence, abs=0.05)
    for factor, shift in ((0.5, 0.0), (0.15, 0.7)):
        report = narrowed(good, factor, shift).diagnostics(4000)
        assert report.flagged and "next to none" in report.verdict and report.unseen > 0.15
        # The evidence is that of the data, whatever q is.
        assert report.wide_log_evidence == pytest.approx(fine.log_evidence, abs=0.15)


def test_marginals_are_those_of_the_draws(good):
    draws, table = good.draws(2000, seed=5), good.marginals(2000, seed=5)
    assert table.names == good.model.theta_names and table.raw.shape == (3, 7)
    want = torch.quantile(draws.vartheta, torch.tensor(table.levels), 0).T
    np.testing.assert_allclose(table.raw, want.numpy(), atol=0.02)
    assert (np.diff(table.weighted) > 0).all() and table.k_hat < 0.7
    # Half the sd: the weights widen the raw quartiles again.
    table = narrowed(good, 0.6).marginals(4000)
    raw, weighted = (t[:, 4] - t[:, 2] for t in (table.raw, table.weighted))
    assert (weighted > 1.2 * raw).all()


def test_summaries_are_of_the_natural_scale_and_of_the_seeds_draws(fits):
    """Kills ϑ in the place of θ, other draws, and states or times out of order."""
    fit = fits["sir"]
    draws, table = fit.draws(300, seed=6), fit.summary(300, seed=6)
    assert table.index.tolist() == ["theta1", "theta2", "sigma"] and table.index.name == "parameter"
    np.testing.assert_allclose(table["mean"], draws.theta.mean(0))
    np.testing.assert_allclose(table["sd"], draws.theta.std(0, correction=0))
    weights = psis_weights(draws.log_weight)
    np.testing.assert_allclose(table["weighted_mean"], weights @ draws.theta)
    paths = fit.path_summary(300, seed=6)
    assert paths.columns.tolist()[:2] == ["t", "state"] and len(paths) == 2 * 141
    for j, state in enumerate("SI"):
        rows = paths[paths["state"] == state]
        np.testing.assert_array_equal(rows["t"], fit.observations.grid().t)
        np.testing.assert_allclose(rows["mean"], draws.x[..., j].mean(0))
        np.testing.assert_allclose(rows["weighted_mean"], weights @ draws.x[..., j])


def test_csv_files_hold_the_tables_of_one_set_of_draws(fits, tmp_path):
    """Kills a file of other draws, a verdict that its commas cut, a column lost on the way."""
    fit = replace(fits["sir"], converged=False, reason="it was cut short, twice", seed=7)
    paths = fit.to_csv(tmp_path / "new" / "folder", 200, seed=6)
    names = ["parameters.csv", "paths.csv", "draws.csv", "diagnostics.csv"]
    assert paths == [tmp_path / "new" / "folder" / name for name in names]
    parameters, states, draws, report = map(pd.read_csv, paths)
    close = {"rtol": 1e-9, "check_exact": False}
    pd.testing.assert_frame_equal(parameters.set_index("parameter"), fit.summary(200, 6), **close)
    pd.testing.assert_frame_equal(states, fit.path_summary(200, 6), **close)
    drawn = fit.draws(200, 6)
    assert draws.columns.tolist() == [*fit.model.theta_names, "log_q", "log_joint", "log_weight"]
    want = [*drawn.theta.T, drawn.log_q, drawn.log_joint, drawn.log_weight]
    np.testing.assert_allclose(draws.to_numpy().T, torch.stack(want), rtol=1e-9)
    want = fit.diagnostics(200, 6)._asdict()
    want |= {"converged": False, "reason": fit.reason, "seed": 7, "draws": 200}
    assert len(report) == 1 and report.columns.tolist() == list(want)
    for name, value in want.items():
        got = report[name][0]
        assert got == pytest.approx(value, rel=1e-9) if isinstance(value, float) else got == value
    assert fit.to_csv(tmp_path / "new" / "folder", 100) == paths, "a folder that is there will do"


def test_history_is_one_entry_a_step(fits):
    step, elbo, seconds = fits["ou"].history
    assert step.tolist() == list(range(1, 61)) and len(elbo) == len(seconds) == 60
    assert (seconds[1:] >= seconds[:-1]).all()


def test_replicates_scatter_around_the_paths(fits):
    """Kills noise of the wrong size: y − x has variance σ² = 1."""
    fit = fits["ou"]
    y, x = fit.predict(500, seed=4), fit.draws(500, seed=4).x
    assert y.shape == (500, 201, 1)
    residual = y - x
    assert residual.std().item() == pytest.approx(1.0, abs=0.01)
    assert residual.mean().item() == pytest.approx(0.0, abs=0.02)
    assert torch.equal(fit.predict(500, seed=4), y)


def test_replicates_take_the_state_and_the_sigma_of_their_own_draw(fits):
    """Kills S in the place of I, and one σ for all."""
    fit = fits["sir"]
    y, draws = fit.predict(400, seed=4), fit.draws(400, seed=4)
    white = (y[..., 0] - draws.x[..., 1]) / draws.theta[:, 2:]
    assert white.std().item() == pytest.approx(1.0, abs=0.02)
    # 141 values a draw: 5 standard errors of the log of a standard deviation.
    assert (white.std(1).log().abs() < 5 / (2 * 140) ** 0.5).all()


def test_forecast_goes_on_from_the_last_state(fits):
    """Kills a forecast from t_0, and a dead path that is kept."""
    fit = fits["sir"]
    forecast = fit.forecast(30, 400, seed=2)
    torch.testing.assert_close(forecast.t, 14.0 + 0.1 * torch.arange(1, 31))
    assert 0 < forecast.alive <= 1 and len(forecast.x) == round(400 * forecast.alive)
    assert (forecast.x > 0).all() and forecast.y.shape == (*forecast.x.shape[:2], 1)
    last = fit.draws(400, seed=2).x[:, -1]
    first = forecast.x[:, 0]
    assert first[:, 0].mean() == pytest.approx(last[:, 0].mean().item(), rel=0.05)
    assert (forecast.x[:, -1, 0] <= first[:, 0] + 5).all(), "S may not come back"


class Clock(lib.OrnsteinUhlenbeck):
    """Drifts with the time of day: a forecast from the wrong time shows."""

    def drift(self, t, x, theta):
        return 1000 * t.expand_as(x)


def test_forecast_steps_are_the_models(fits):
    """Kills another clock, dt, noise or θ: (x − x_N − 1000·t_N·dt)/(θ3·sqrt(dt)) ~ N(0, 1)."""
    fit, n = fits["ou"], 2000
    obs = fit.observations
    later = lib.Observations(obs.times + 5, obs.y, 0.1, t0=5.0)
    model = lib.StateSpaceModel(Clock(), fit.model.observation, Normal(torch.zeros(3), 1.0), [20.0])
    fit = replace(fit, model=model, observations=later)
    forecast, draws = fit.forecast(2, n, seed=6), fit.draws(n, seed=6)
    assert forecast.alive == 1.0
    torch.testing.assert_close(forecast.t, torch.tensor([25.1, 25.2]))
    path = torch.cat([draws.x[:, -1:], forecast.x], 1)[..., 0]
    moves = path.diff(dim=1) - 100 * torch.tensor([25.0, 25.1])
    white = moves / (draws.theta[:, 2:] * 0.1**0.5)
    for values in (*white.T, (forecast.y - forecast.x).flatten()):
        assert values.mean().item() == pytest.approx(0.0, abs=5 / len(values) ** 0.5)
        assert values.std().item() == pytest.approx(1.0, abs=4 / len(values) ** 0.5)
    noises = torch.stack([*white.T, *(forecast.y - forecast.x)[..., 0].T])
    assert (torch.corrcoef(noises) - torch.eye(4)).abs().max() < 0.12


class Explosive(lib.OrnsteinUhlenbeck):
    def drift(self, t, x, theta):
        return 1e3 * x**3


def test_forecast_drops_paths_that_blow_up(fits):
    fit = fits["ou"]
    prior = Normal(torch.zeros(3), 1.0)
    model = lib.StateSpaceModel(Explosive(), fit.model.observation, prior, [20.0])
    forecast = replace(fit, model=model).forecast(20, 30)
    assert forecast.alive == 0.0 and len(forecast.x) == len(forecast.y) == 0


def test_arviz_keeps_a_state_and_a_column_of_one_name_apart(fits):
    """A count named after its state. Kills dimensions that both groups share."""
    fit, obs = fits["sir"], fits["sir"].observations
    named = lib.Observations(obs.times, obs.y, obs.dt, names=["I"])
    data = replace(fit, observations=named).to_arviz(20)
    assert data.posterior["I"].dims == ("chain", "draw", "time")
    assert data.posterior["I"].shape == (1, 20, 141)
    assert data.observed_data["I"].dims == ("observation_time",)
    assert data.observed_data["I"].values.tolist() == obs.y[:, 0].tolist()


def test_arviz_names_parameters_states_and_times(fits):
    fit = fits["sir"]
    data = fit.to_arviz(50, seed=3)
    draws = fit.draws(50, seed=3)
    assert set(data.posterior) == {"theta1", "theta2", "sigma", "S", "I"}
    assert data.posterior["S"].dims == ("chain", "draw", "time")
    torch.testing.assert_close(torch.tensor(data.posterior["I"].values[0]), draws.x[..., 1])
    torch.testing.assert_close(torch.tensor(data.sample_stats["lp"].values[0]), draws.log_joint)
    torch.testing.assert_close(torch.tensor(data.sample_stats["log_q"].values[0]), draws.log_q)
    for j, name in enumerate(("theta1", "theta2", "sigma")):
        assert data.posterior[name].values[0].tolist() == draws.theta[:, j].tolist()
    assert data.posterior["time"].values == pytest.approx(np.arange(141) * 0.1)
    weight = torch.tensor(data.sample_stats["log_weight"].values[0])
    torch.testing.assert_close(weight, draws.log_joint - draws.log_q)
    observed = data.observed_data["in_bed"]
    assert observed.dims == ("observation_time",)
    assert observed["observation_time"].values.tolist() == list(range(1, 15))
    assert observed.values.tolist() == fit.observations.y[:, 0].tolist()


def test_a_fit_of_another_model_or_of_other_data_is_refused(fits, tmp_path):
    ou, sir = fits["ou"], fits["sir"]
    ou.save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match="has another theta_names"):
        lib.load_fit(tmp_path / "fit.pt", sir.model, sir.observations)
    other = copy.deepcopy(ou.observations)
    other.y[3] += 1
    with pytest.raises(ValueError, match="has another y"):
        lib.load_fit(tmp_path / "fit.pt", ou.model, other)
    finer = lib.Observations(ou.observations.times, ou.observations.y, 0.05)
    with pytest.raises(ValueError, match="has another dt; got 0.05, the fit has 0.1"):
        lib.load_fit(tmp_path / "fit.pt", ou.model, finer)


@pytest.mark.parametrize("what", ["x0", "random x0", "prior", "F", "sigma", "t0"])
def test_a_fit_of_a_model_with_the_same_names_is_refused(fits, tmp_path, what):
    fit = fits["ou"]
    fit.save(tmp_path / "fit.pt")
    F, sigma = [[2.0 if what == "F" else 1.0]], 3.0 if what == "sigma" else 1.0
    x0 = {"x0": [3.0], "random x0": {"x": Normal(20.0, 1.0)}}.get(what, [20.0])
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation(F, sigma),
        Normal(torch.zeros(3), 1.0 if what == "prior" else 10.0),
        x0=x0,
    )
    obs = fit.observations
    moved = lib.Observations(obs.times, obs.y, 0.1, t0=-1.0 if what == "t0" else 0.0)
    with pytest.raises(ValueError, match="has another"):
        lib.load_fit(tmp_path / "fit.pt", model, moved)


def test_counts_are_checked(fits):
    for bad in (0, -3):
        for call in (fits["ou"].draws, lambda n: fits["ou"].forecast(n, 5)):
            with pytest.raises(ValueError, match=f"a whole number, 1 or more; got {bad}"):
                call(bad)
    fit = fits["ou"]
    # Weights of one draw have no tail to be smoothed.
    for call in (fit.diagnostics, fit.marginals, fit.summary, fit.path_summary):
        with pytest.raises(ValueError, match="a whole number, 2 or more; got 1"):
            call(1)
    with pytest.raises(ValueError, match="a whole number, 2 or more; got 1"):
        fit.to_csv("nowhere", 1)
    with pytest.raises(ValueError, match="n must be a whole number, 1 or more; got True"):
        fit.draws(True)


@pytest.mark.parametrize("n", [2, 3])
def test_the_fewest_draws_make_a_report(fits, n, tmp_path):
    """Kills: an error of torch where the second wave of wider draws is empty."""
    report = fits["ou"].diagnostics(n)
    assert math.isfinite(report.wide_log_evidence) and report.flagged
    assert len(fits["ou"].to_csv(tmp_path, n)) == 4


def test_a_ruined_q_gets_a_verdict(good):
    """Kills: an error of LAPACK in place of the report, where q(ϑ) has no covariance left."""
    ruined = replace(good, q=copy.deepcopy(good.q))
    ruined.q.theta_flow.loc0.fill_(torch.nan)
    report = ruined.diagnostics(200)
    assert report.flagged and report.k_hat == math.inf and math.isnan(report.unseen)
    assert "weights not finite: " in report.verdict


def test_a_fit_and_its_data_say_in_a_line_what_they_are(good):
    assert repr(good) == f"FitResult(theta1, theta2, theta3; 600 steps, seed 2; {good.reason})"
    assert repr(good.observations) == "Observations(y0; 2 rows to t = 0.4, 4 steps of 0.1 from 0)"


def test_whole_numbers_of_numpy_are_taken():
    """Kills an error of torch's generator, and 'got np.int64(3)' for a whole number."""
    check_count(np.int64(3))
    assert type(check_seed(np.int64(3))) is int and check_seed(-(2**63)) == -(2**63)


@pytest.mark.parametrize("seed", [1.5, "1", None, torch.tensor(1)])
def test_a_seed_of_another_kind_is_refused(seed):
    with pytest.raises(TypeError, match=r"seed must be a whole number; got ('1'|1.5|None|tensor)"):
        check_seed(seed)


@pytest.mark.parametrize("call", ["draws", "diagnostics", "predict", "summary"])
def test_a_seed_too_large_for_the_generator_is_refused(fits, call):
    """Kills torch's 'Overflow when unpacking long long'."""
    with pytest.raises(ValueError, match=f"seed must be a whole number of 64 bits; got {2**64}"):
        getattr(fits["ou"], call)(20, seed=2**64)
    with pytest.raises(ValueError, match="seed must be a whole number of 64 bits"):
        lib.compare_fits([fits["ou"], fits["ou"]], seed=-(2**70))


def test_what_is_of_another_kind_is_named():
    with pytest.raises(TypeError, match="model must have type StateSpaceModel; got SIR. Do so"):
        check_kind("model", lib.SIR(), lib.StateSpaceModel, "Do so.")
    check_kind("model", lib.SIR(), lib.SDE)
