"""What a fit returns: draws and their densities, predictions, files."""

import copy

import pytest
import torch
from torch.distributions import Normal

import lib
from lib import result

CONFIG = lib.FitConfig(num_steps=60, num_samples=8)


@pytest.fixture(scope="module")
def fits() -> dict[str, lib.FitResult]:
    """Short fits of the study's two models."""
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
    made = {
        name: lib.fit(models[name], data[name], CONFIG, device="cpu", progress=False)
        for name in models
    }
    torch.set_default_dtype(before)
    return made


@pytest.mark.parametrize("name", ["ou", "sir"])
def test_draws_carry_their_own_densities(fits, name):
    """Kills a weight of the wrong sign and a log q that is not that of the draw."""
    fit = fits[name]
    n, p = 700, fit.model.num_states
    draws = fit.draws(n, seed=1)
    assert draws.x.shape == (n, fit.observations.num_steps + 1, p)
    assert draws.theta.shape == draws.vartheta.shape == (n, 3)
    assert all(part.dtype == torch.float64 and not part.requires_grad for part in draws)
    torch.testing.assert_close(draws.x[:, 0], fit.model.x0_value.expand(n, p))
    torch.testing.assert_close(draws.log_weight, draws.log_joint - draws.log_q)
    joint = fit.model.log_joint(draws.vartheta, draws.x, fit.observations.grid()).total
    torch.testing.assert_close(draws.log_joint, joint)
    torch.testing.assert_close(fit.model.to_theta(draws.vartheta), draws.theta)
    again, other = fit.draws(n, seed=1), fit.draws(n, seed=2)
    assert torch.equal(again.x, draws.x) and not torch.equal(other.x, draws.x)
    assert draws.x[: result.CHUNK].std(0).sum() > 0
    assert not torch.equal(draws.x[: n - result.CHUNK], draws.x[result.CHUNK :])


def test_weighted_evidence_is_near_the_quadrature(fits):
    """Kills a joint density and a log q that differ by a constant: the ELBO is at most log p(y)."""
    fit = fits["ou"]
    exact = lib.ou_posterior(fit.observations.y[:, 0], 0.1, exact=False)
    report = fit.diagnostics(2000)
    assert report.elbo < exact.log_evidence + 4 * report.elbo_se
    assert report.flagged and "effective share" in report.verdict


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


def test_arviz_names_parameters_states_and_times(fits):
    fit = fits["sir"]
    data = fit.to_arviz(50, seed=3)
    draws = fit.draws(50, seed=3)
    assert set(data.posterior) == {"theta1", "theta2", "sigma", "S", "I"}
    assert data.posterior["S"].dims == ("chain", "draw", "time")
    torch.testing.assert_close(torch.tensor(data.posterior["I"].values[0]), draws.x[..., 1])
    torch.testing.assert_close(torch.tensor(data.sample_stats["lp"].values[0]), draws.log_joint)
    assert data.observed_data["in_bed"].values.tolist() == fit.observations.y[:, 0].tolist()


@pytest.mark.parametrize("name", ["ou", "sir"])
def test_a_saved_fit_draws_the_same(fits, name, tmp_path):
    fit = fits[name]
    fit.save(tmp_path / "fit.pt")
    loaded = lib.load_fit(tmp_path / "fit.pt", fit.model, fit.observations)
    assert torch.equal(loaded.draws(20).x, fit.draws(20).x)
    assert (loaded.converged, loaded.reason, loaded.seed) == (fit.converged, fit.reason, fit.seed)
    assert (loaded.history.elbo == fit.history.elbo).all() and loaded.family == fit.family


def test_a_fit_of_another_model_or_of_other_data_is_refused(fits, tmp_path):
    ou, sir = fits["ou"], fits["sir"]
    ou.save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match="has another theta_names"):
        lib.load_fit(tmp_path / "fit.pt", sir.model, sir.observations)
    other = copy.deepcopy(ou.observations)
    other.y[3] += 1
    with pytest.raises(ValueError, match="has another y"):
        lib.load_fit(tmp_path / "fit.pt", ou.model, other)


def test_counts_are_checked(fits):
    for bad in (0, -3):
        with pytest.raises(ValueError, match="a whole number, 1 or more"):
            fits["ou"].draws(bad)
