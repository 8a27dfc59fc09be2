"""The referee of notebook 04's epidemic: filter, proposal, quantiles, the file that was made."""

import ast
import json
import math
from typing import NamedTuple

import nbformat
import numpy as np
import pytest
import torch
from run import ROOT
from scipy.stats import multivariate_normal, multivariate_t, norm
from torch.distributions import LogNormal, Normal

import lib

FILE = "reference/contact_outbreaks.json"
STEPS, DT, Y = 5, 0.1, np.array([19.0, 17.5, 18.0, 16.0])
OU_THETA, OU_SIGMA = (0.4, 5.0, 1.5), 0.3
CENTRE = (-0.77, 0.15, 0.6, -1.5, 2.0)


class OU(NamedTuple):
    """dX = θ1(θ2 − X)dt + θ3 dW with y = x + N(0, σ²), ``batch`` times the same."""

    batch: int
    x0: float = 20.0
    jumps: np.ndarray = np.ones((1, 1))
    positive: tuple[int, ...] = ()
    observed: int = 0

    @property
    def variance(self):
        return np.full((self.batch, 1), OU_SIGMA**2)

    def start(self, particles, rng):
        return np.full((1, self.batch, particles), self.x0)

    def flows(self, x):
        speed, level, spread = OU_THETA
        return speed * (level - x), np.full_like(x, spread**2)


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder of the studies, to import from as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def epidemic() -> lib.StateSpaceModel:
    """The model as notebook 04 defines it."""
    names = {"lib": lib, "torch": torch, "LogNormal": LogNormal, "Normal": Normal}
    cells = nbformat.read(ROOT / "notebooks/04_your_own_model.ipynb", as_version=4).cells
    for cell in cells:
        if "DriftingContact" in cell.source and cell.cell_type == "code":
            tree = ast.parse(cell.source).body
            kept = [
                s for s in tree if isinstance(s, ast.ClassDef) or "epidemic =" in ast.unparse(s)
            ]
            exec(compile(ast.Module(kept, []), "notebook 04", "exec"), names)
    return names["epidemic"]


@pytest.fixture(scope="module")
def stored() -> dict:
    return json.loads(lib.data_path(FILE).read_text(encoding="utf-8"))


def kalman(y: np.ndarray) -> float:
    """log p(y) of OU by lib's filter, on the Euler grid with the steps between missing."""
    rows = torch.full((STEPS * len(y),), math.nan)
    rows[STEPS - 1 :: STEPS] = torch.tensor(y)
    transition = lib.ou_transition(torch.tensor(OU_THETA), DT, exact=False)
    return float(lib.forward_filter(rows, transition, 20.0, 0.0, OU_SIGMA**2).log_likelihood)


def within_5_se(values: np.ndarray, expected: object) -> bool:
    """Of the mean over the first axis, in every entry."""
    error = values.std(0) / math.sqrt(len(values))
    return bool((abs(values.mean(0) - expected) < 5 * error).all())


def test_one_observation_of_a_linear_model_has_no_noise(benchmarks):
    """The guide is exact there. Kills: a slope, offset or variance that is one step off."""
    from guided_filter import Plan, particle_filter

    found = particle_filter(OU(3), Plan(Y[:1], STEPS, DT), 2, np.random.default_rng(0))
    np.testing.assert_allclose(found.log_likelihood, kalman(Y[:1]), atol=1e-6)


def test_likelihood_is_unbiased_for_a_linear_model(benchmarks):
    """10⁴ estimates by 8 particles. Kills: no resample, a sum for the mean of the weights."""
    from guided_filter import Plan, particle_filter

    found = particle_filter(OU(10_000), Plan(Y, STEPS, DT), 8, np.random.default_rng(0))
    assert within_5_se(np.exp(found.log_likelihood - kalman(Y)), 1.0)


def test_paths_that_leave_the_positive_states_have_no_weight(benchmarks):
    """One step: N(y; m, q + σ²)·P(x > 0 | y), 10⁴ estimates. Kills: the dead that count."""
    from guided_filter import Plan, particle_filter

    process, y = OU(10_000, x0=0.3, positive=(0,)), 0.2
    (speed, level, spread), x0 = OU_THETA, process.x0
    mean, q = x0 + speed * (level - x0) * DT, spread**2 * DT
    gain = q / (q + OU_SIGMA**2)
    alive = norm.cdf((mean + gain * (y - mean)) / math.sqrt((1 - gain) * q))
    expected = norm.pdf(y, mean, math.sqrt(q + OU_SIGMA**2)) * alive
    plan = Plan(np.array([y]), 1, DT)
    found = particle_filter(process, plan, 4, np.random.default_rng(0))
    assert alive < 0.95 and within_5_se(np.exp(found.log_likelihood), expected)


def test_paths_have_the_smoothed_law_of_a_linear_model(benchmarks):
    """Moments of x at each y given all of y. Kills: a path that does not follow its
    parents, a draw given y with another spread."""
    from guided_filter import Plan, particle_filter

    found = particle_filter(OU(20_000), Plan(Y, STEPS, DT), 8, np.random.default_rng(1))
    weight = np.exp(found.log_likelihood - kalman(Y))
    speed, level, spread = OU_THETA
    phi = (1 - speed * DT) ** np.arange(0, STEPS * len(Y) + 1)
    mean = level + (20 - level) * phi[STEPS::STEPS]
    variance = spread**2 * DT * np.cumsum(phi**2)[STEPS - 1 : -1 : STEPS]
    lag = abs(np.subtract.outer(range(len(Y)), range(len(Y))))
    prior = phi[STEPS * lag] * np.minimum.outer(variance, variance)
    gain = prior @ np.linalg.inv(prior + OU_SIGMA**2 * np.eye(len(Y)))
    smoothed, covariance = mean + gain @ (Y - mean), prior - gain @ prior
    assert (found.path[:, 0, 0] == 20).all()
    away = found.path[:, 1:, 0] - smoothed
    assert within_5_se(weight[:, None] * away, 0.0)
    square = weight[:, None, None] * away[:, :, None] * away[:, None]
    assert within_5_se(square, covariance)


def test_systematic_resample_keeps_each_share_to_one_particle(benchmarks):
    """Kills: rows that take one another's particles, a first or last particle that is lost."""
    from guided_filter import systematic

    weight = np.random.default_rng(0).exponential(size=(7, 50))
    weight[2, :49], weight[3, 0] = 0.0, 0.0
    index = systematic(weight, np.random.default_rng(1))
    counts = np.stack([np.bincount(row, minlength=50) for row in index])
    share = 50 * weight / weight.sum(-1, keepdims=True)
    assert (abs(counts - share) < 1).all() and (counts.sum(-1) == 50).all()


def test_a_likelihood_of_nothing_alive_is_zero_and_its_neighbour_is_untouched(benchmarks):
    """Every other ϑ overflows. Kills: a NaN that is no weight of 0, or that
    puts the resample of the others out of order."""
    from contact_posterior import Epidemic
    from guided_filter import Plan, particle_filter

    plan, rng = Plan(np.array([3.0, 8.0, 26.0]), 20, 0.05), np.random.default_rng(0)
    alone = particle_filter(Epidemic(np.tile(CENTRE, (2_000, 1))), plan, 20, rng)
    vartheta = np.tile([(-0.77, 6.0, 300.0, 5.0, 2.0), CENTRE], (2_000, 1))
    both = particle_filter(Epidemic(vartheta), plan, 20, rng)
    assert (both.log_likelihood[::2] == -np.inf).all() and np.isfinite(both.path).all()
    one, other = (np.exp(values) for values in (alone.log_likelihood, both.log_likelihood[1::2]))
    error = math.hypot(one.std(), other.std()) / math.sqrt(2_000)
    assert abs(one.mean() - other.mean()) < 5 * error
    assert len(np.unique(both.path[1::2, 1, 1])) == 2_000


def test_moves_are_those_of_the_notebook(benchmarks, epidemic):
    """Drift and β of a random state. Kills: a sign, a rate or a parameter out of place."""
    from contact_posterior import NAMES, Epidemic

    assert NAMES == tuple(
        ("log_" if name in (*epidemic.sde.positive_theta, "sigma") else "") + name
        for name in epidemic.theta_names
    )
    vartheta = torch.randn(6, 5)
    x = torch.stack([700 * torch.rand(6), 300 * torch.rand(6), torch.randn(6)], -1)
    theta, t = epidemic.to_theta(vartheta), torch.zeros(6, 1)
    process = Epidemic(vartheta.numpy())
    drift, rates = process.flows(x.T.numpy()[..., None])
    np.testing.assert_allclose(drift[..., 0].T, epidemic.sde.drift(t, x, theta[:, :4]))
    beta = np.einsum("ks,kb,kr->bsr", process.jumps, rates[..., 0], process.jumps)
    np.testing.assert_allclose(beta, epidemic.sde.diffusion(t, x, theta[:, :4]))
    np.testing.assert_allclose(process.variance, theta[:, 4:].square())


def test_prior_is_that_of_the_notebook(benchmarks, epidemic):
    from contact_posterior import log_prior

    vartheta = 3 * torch.randn(6, 5)
    np.testing.assert_allclose(log_prior(vartheta.numpy()), epidemic.log_prior(vartheta))


def test_likelihood_is_that_of_paths_that_the_notebooks_model_makes(benchmarks, epidemic):
    """p(y_1, y_2, y_3 | ϑ) by plain Monte Carlo, 4·10⁴ paths. Kills: dead particles that count,
    x_0 without its spread, a step too many between two counts."""
    from contact_posterior import Epidemic
    from guided_filter import Plan, particle_filter

    y = np.array([3.0, 8.0, 26.0])
    theta = epidemic.to_theta(torch.tensor([CENTRE])).expand(40_000, 5)
    paths = epidemic.simulate(theta, 60, 0.05, seed=1)
    seen = paths.x[:, 20::20, 1].numpy()
    each = np.exp(-0.5 * ((y - seen) / math.exp(CENTRE[4])) ** 2)
    each = np.where(paths.alive, (each / math.sqrt(2 * math.pi) / math.exp(CENTRE[4])).prod(-1), 0)
    process = Epidemic(np.tile(CENTRE, (1_000, 1)))
    found = particle_filter(process, Plan(y, 20, 0.05), 20, np.random.default_rng(0))
    ours = np.exp(found.log_likelihood)
    error = math.hypot(each.std() / 200, ours.std() / math.sqrt(1000))
    assert error < 0.05 * ours.mean() and abs(each.mean() - ours.mean()) < 5 * error


def test_proposal_has_the_density_that_it_draws_from(benchmarks):
    """Exact against scipy; then E[f/q] = 1 for the kernels' and the prior's f, 10⁴ draws."""
    import contact_posterior as c

    rng = np.random.default_rng(0)
    root = np.tril(np.ones((5, 5)), -1) + np.diag([0.5, 0.4, 1, 0.3, 2])
    near = c.Kernels(rng.standard_normal((3, 5)), 0.5 * root)
    proposal = c.Proposal(near, c.Kernels(c.GUESS, root))
    vartheta = proposal.sample(10_000, rng)
    parts = [multivariate_t(m, near.tril @ near.tril.T, c.FREEDOM).pdf for m in near.centres]
    expected = np.mean([part(vartheta[:50]) for part in parts], axis=0)
    np.testing.assert_allclose(np.exp(near.log_prob(vartheta[:50])), expected)
    for other in (c.log_prior, proposal.near.log_prob, proposal.wide.log_prob):
        assert within_5_se(np.exp(other(vartheta) - proposal.log_prob(vartheta)), 1.0)


def test_evidence_and_weights_of_a_gaussian_in_closed_form(benchmarks):
    """A likelihood N(ϑ; m, 0.5²) in place of the filter's. Kills: the prior left out of w, a sum
    for the mean, an error that is not that of 50 repeats, quantiles of the unweighted draws."""
    import contact_posterior as c
    from contact_reference import quantiles

    centre = c.GUESS[0]
    likelihood = multivariate_normal(centre, 0.25 * np.eye(5)).logpdf
    expected = multivariate_normal(c.PRIOR_MEAN, np.diag(c.PRIOR_SD**2 + 0.25)).logpdf(centre)
    proposal, rng = (
        c.Proposal(*(c.Kernels(c.GUESS, s * np.eye(5)) for s in (0.6, 1.5))),
        (np.random.default_rng(0)),
    )
    runs = []
    for _ in range(50):
        vartheta = proposal.sample(2_000, rng)
        ratio = c.log_prior(vartheta) - proposal.log_prob(vartheta)
        runs.append(c.Weighted(vartheta, np.zeros((2_000, 15, 3)), likelihood(vartheta), ratio))
    values, errors = np.transpose([run.log_evidence for run in runs])
    assert within_5_se(np.exp(values - expected), 1.0)
    assert values.std(ddof=1) == pytest.approx(errors.mean(), rel=0.5)
    shrink = 1 / (1 + 0.25 / c.PRIOR_SD[4] ** 2)
    found = [quantiles(run.vartheta[:, 4], run.weight(), [0.1587, 0.5, 0.8413]) for run in runs]
    exact = shrink * centre[4] + np.sqrt(0.25 * shrink) * np.array([-1, 0, 1])
    np.testing.assert_allclose(np.mean(found, 0), exact, atol=0.03)


def test_quantiles_are_weighted(benchmarks):
    from contact_reference import quantiles

    x, weight = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])
    np.testing.assert_allclose(quantiles(x, weight, [0.25, 0.625, 0.75, 0.9]), [1, 2, 2.5, 3])


def test_stored_reference_is_precise(stored):
    """Kills: a file of a trial with few draws, or whose two runs do not agree."""
    for run in (stored, stored["check"]):
        assert run["sampler"]["ess"] > 2_000 and run["sampler"]["largest_weight"] < 0.01
        assert run["log_evidence"]["error"] < 0.03
    assert stored["sampler"]["seed"] != stored["check"]["sampler"]["seed"]
    assert stored["sampler"]["particles"] != stored["check"]["sampler"]["particles"]
    both = [run["log_evidence"] for run in (stored, stored["check"])]
    error = math.hypot(*(one["error"] for one in both))
    assert abs(both[0]["value"] - both[1]["value"]) < 4 * error
    for name, away in stored["check"]["quantiles_apart_sds"].items():
        # The tail of level is thin: 0.36 sd is the check's own standard error there.
        assert away < (0.3 if name == "level" else 0.1), name


def test_stored_quantiles_increase_and_fit_their_moments(stored, benchmarks):
    from contact_reference import LEVELS, NAMES, STATES

    for run in (stored, stored["check"]):
        for name in NAMES:
            each = run[name]
            assert list(each["q"]) == list(each["q_error"]) == [str(level) for level in LEVELS]
            q = np.array(list(each["q"].values()))
            assert (np.diff(q) > 0).all() and q[0] < each["mean"] < q[-1]
            assert abs(q[3] - each["mean"]) < each["sd"]  # Cantelli: for every law
        corr = np.array(run["corr"])
        assert np.allclose(np.diag(corr), 1) and (corr == corr.T).all() and (abs(corr) <= 1).all()
        assert [row["day"] for row in run["daily"]] == list(range(15))
        bands = np.array([[list(row[s].values()) for s in STATES] for row in run["daily"]])
        assert (np.diff(bands[1:], axis=-1) > 0).all() and (bands[:, :2] > 0).all()
        assert (bands[0, :2].T == (762, 1)).all() and (np.diff(bands[:, 0, 1]) < 0).all()


def test_script_writes_what_is_stored(benchmarks, monkeypatch, stored, tmp_path):
    """A trial of few draws has the file's keys at every depth."""
    import contact_posterior
    import contact_reference

    def shape(value):
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    monkeypatch.setattr(contact_posterior, "ROUNDS", (60,))
    monkeypatch.setattr(contact_reference, "noise", lambda *_: np.array([0.1, 0.2]))
    contact_reference.main(["--draws", "100", "--save-to", str(tmp_path)])
    made = json.loads((tmp_path / "contact_outbreaks.json").read_text(encoding="utf-8"))
    assert shape(made) == shape(stored) and made["model"] == stored["model"]
