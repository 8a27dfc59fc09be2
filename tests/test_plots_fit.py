"""Figures of any fit: what is drawn is what they say, for p = 1, 2, 4 and d = 1, 3, 8."""

import math
from functools import cache

import matplotlib

matplotlib.use("Agg")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from scipy.stats import gaussian_kde  # noqa: E402
from torch.distributions import (  # noqa: E402
    Categorical,
    Independent,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

import lib  # noqa: E402
from lib import plots, plots_fit, plots_theta  # noqa: E402
from lib.result import Draws, FitResult, Forecast, History  # noqa: E402
from lib.weights import psis_weights, weighted_quantile  # noqa: E402

NAN = math.nan
N = 6  # grid steps of 0.5 from t = 1
TIMES = [1.5, 2.0, 3.5, 4.0]
EVERY = pytest.mark.parametrize("p, d", [(p, d) for p in (1, 2, 4) for d in (1, 3, 8)])
SOME = pytest.mark.parametrize("p, d", [(1, 1), (2, 3), (4, 8)])
# State by observed component: one state scaled; one of two; two mixed, one state read twice.
F = {
    1: [[2.0]],
    2: [[0.0], [1.0]],
    4: [[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, -0.5], [0.0, 0.0, 0.0]],
}
PANELS = {1: ["a"], 2: ["a", "b"], 4: ["a", "b", "c", "d", "F'x, y0"]}
Y = torch.tensor([[3.0, NAN, 5.0], [NAN, 4.0, NAN], [2.0, 1.0, NAN], [1.0, NAN, 7.0]])


class Decay(lib.SDE):
    """p independent states and d parameters, every second of which is positive."""

    def __init__(self, p: int, d: int) -> None:
        self.state_names = tuple("abcd"[:p])
        self.theta_names = tuple(f"k{j}" for j in range(d))
        self.positive_theta = self.theta_names[::2]

    def drift(self, t, x, theta):
        return -theta[..., :1] * x

    def diffusion(self, t, x, theta):
        return torch.diag_embed(torch.ones_like(x))


def model_of(p: int, d: int, prior: object = None) -> lib.StateSpaceModel:
    prior = prior or Normal(torch.zeros(d), torch.arange(d) + 2.0)
    return lib.StateSpaceModel(Decay(p, d), lib.GaussianObservation(F[p], 1.0), prior, [1.0] * p)


@cache
def trained() -> FitResult:
    """A real fit of two steps."""
    data = lib.Observations(TIMES, Y[:, 0], 0.5, t0=1.0)
    config = lib.FitConfig(num_steps=2, num_samples=2, wide_samples=0, refits=0, dtype="float64")
    return lib.fit(model_of(1, 3), data, config, device="cpu", progress=False)


def fit_of(p: int, d: int, prior: object = None) -> FitResult:
    """A fit whose q is another's: the figures ask only the draws."""
    obs = lib.Observations(TIMES, Y[:, : len(F[p][0])], 0.5, t0=1.0)
    model = model_of(p, d, prior)
    history = History(np.arange(1, 201), np.linspace(-90.0, -10.0, 200), np.arange(200.0))
    verdict = (True, "converged: a sentence that is long enough to need a second line", 0, "cpu")
    return FitResult(model, obs, trained().q, trained().family, history, *verdict)


def draws_of(fit: FitResult, n: int = 400, tilt: float = 0.5) -> Draws:
    """Normal draws of another mean and spread in each column; log w = tilt times the first ϑ."""
    p, d = fit.model.num_states, fit.model.num_theta
    base = torch.randn(n, d)
    vartheta = 0.1 * base * (torch.arange(d) + 1.0) - torch.arange(d)
    x = base[:, :1, None] + torch.randn(n, N + 1, p) * (torch.arange(p) + 1.0) + torch.arange(p)
    log_weight, zero = tilt * base[:, 0], torch.zeros(n)
    return Draws(fit.model.to_theta(vartheta), vartheta, x, zero, log_weight, log_weight)


def lines(axis: plt.Axes, label: str) -> list:
    return [line for line in axis.lines if line.get_label() == label]


def legend(figure: plt.Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bounds(axis: plt.Axes, shade: int) -> np.ndarray:
    """Lower and upper limit of a shaded band at each time, (2, time)."""
    vertices = axis.collections[shade].get_paths()[0].vertices
    times = np.unique(vertices[:, 0])
    ends = [vertices[vertices[:, 0] == t, 1] for t in times]
    return np.array([[e.min() for e in ends], [e.max() for e in ends]])


@pytest.fixture(autouse=True)
def closed():
    """One call, one figure; the test closes it."""
    plt.close("all")
    yield
    assert len(plt.get_fignums()) <= 1
    plt.close("all")


@EVERY
def test_paths_have_a_panel_a_state_and_a_mixture(p, d):
    """Kills a mixing component drawn in a state's panel, and time named on every panel."""
    fit = fit_of(p, d)
    figure = plots.paths(fit, draws_of(fit))
    assert [axis.get_ylabel() for axis in figure.axes] == PANELS[p]
    assert [axis.get_xlabel() for axis in figure.axes] == [""] * (len(PANELS[p]) - 1) + ["t"]
    assert {"q: median, 50, 95 %", "30 draws of q", "weighted: median, 95 %"} <= set(legend(figure))


@SOME
def test_paths_draw_the_readings_that_there_are(p, d):
    """Kills a missing reading drawn at 0, a factor that multiplies, a reading in another panel."""
    fit = fit_of(p, d)
    figure = plots.paths(fit, draws_of(fit))
    found = {
        (axis.get_ylabel(), line.get_label(), line.get_marker()): line.get_xydata().tolist()
        for axis in figure.axes
        for line in axis.lines
        if line.get_marker() != "None"
    }
    first = [[1.5, 3.0], [3.5, 2.0], [4.0, 1.0]]
    assert (
        found
        == {
            1: {("a", "observations / 2", "."): [[t, y / 2] for t, y in first]},
            2: {("b", "observations", "."): first},
            4: {
                ("F'x, y0", "observations", "."): first,
                ("c", "y1", "."): [[2.0, 4.0], [3.5, 1.0]],
                ("c", "y2 / -0.5", "^"): [[1.5, -10.0], [4.0, -14.0]],
            },
        }[p]
    )


@SOME
def test_paths_bands_and_lines_are_quantiles_of_the_panels_own_states(p, d):
    """Kills another level, bands of weighted draws, lines of unweighted ones, F for F'."""
    fit = fit_of(p, d)
    draws = draws_of(fit)
    figure = plots.paths(fit, draws, num_paths=7)
    columns = [*torch.eye(p), torch.tensor([1.0, 0.5, 0.0, 0.0])][: len(PANELS[p])]
    weights, levels = psis_weights(draws.log_weight), torch.tensor([0.025, 0.5, 0.975])
    for axis, column in zip(figure.axes, columns, strict=True):
        x = draws.x @ column
        outer, inner = np.quantile(x, [[0.025, 0.975], [0.25, 0.75]], axis=0)
        assert bounds(axis, 0) == pytest.approx(outer) and bounds(axis, 1) == pytest.approx(inner)
        dashed = [line.get_ydata() for line in axis.lines if line.get_linestyle() == "--"]
        expected = [weighted_quantile(x[:, i], levels, weights) for i in range(N + 1)]
        assert np.array(dashed) == pytest.approx(torch.stack(expected, 1).numpy())
        assert np.abs(np.array(dashed)[[0, 2]] - outer).max() > 0.1, "weights must matter here"
        thin = [line.get_ydata() for line in axis.lines if line.get_alpha() == 0.5]
        assert np.array(thin) == pytest.approx(x[:7].numpy())
    assert "7 draws of q" in legend(figure)


@pytest.mark.parametrize("tilt", [30.0, math.inf])
def test_no_weights_beyond_k_hat(tilt):
    """Kills weighted lines that k-hat forbids, a note that is missing, a crash on 1/0 weights."""
    fit = fit_of(2, 3)
    draws = draws_of(fit, tilt=tilt)
    for draw in (plots.paths, plots.parameters, plots.pairs):
        figure = draw(fit, draws)
        (note,) = [text for text in legend(figure) if "weighted" in text]
        assert note.startswith("not weighted: k-hat ") and note.endswith(" > 0.7")
        assert not [s for axis in figure.axes for s in axis.lines if s.get_linestyle() == "--"]
        plt.close("all")
    with pytest.raises(ValueError, match="weighted=True must have weights to trust; got .* > 0.7"):
        plots.pairs(fit, draws, weighted=True)
    assert not [text for text in legend(plots.pairs(fit, draws_of(fit))) if "weighted" in text]


def test_paths_show_the_truth_in_every_panel():
    """Kills a truth of the first state alone; float32 is what users simulate in."""
    fit = fit_of(4, 1)
    t, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).reshape(2, 4).float()
    figure = plots.paths(fit, draws_of(fit), truth=(t, x), num_paths=0)
    drawn = [lines(axis, "true path")[0].get_ydata().tolist() for axis in figure.axes]
    assert drawn == [[0, 4], [1, 5], [2, 6], [3, 7], [0.5, 6.5]]


@EVERY
def test_parameters_have_a_panel_each(p, d):
    """Kills a name without its log, a fourth column, and limits set by the prior."""
    fit = fit_of(p, d)
    draws = draws_of(fit)
    figure = plots.parameters(fit, draws)
    expected = [f"k{j}" if j % 2 else f"log k{j}" for j in range(d)]
    assert [axis.get_xlabel() for axis in figure.axes] == expected
    assert legend(figure) == ["prior", "q", "q, weighted"]
    assert figure.axes[0].get_gridspec().ncols == min(d, 3)
    for j, axis in enumerate(figure.axes):
        low, high = axis.get_xlim()
        values = draws.vartheta[:, j]
        assert values.min() - 0.4 * values.std() < low < np.quantile(values, 0.01)
        assert np.quantile(values, 0.99) < high < values.max() + 0.4 * values.std()
        assert axis.get_ylabel() == ("" if j % 3 else "density")


@SOME
def test_parameters_draw_the_densities_they_name(p, d):
    """Kills weights on the wrong curve, a prior of another parameter or on another scale."""
    fit = fit_of(p, d)
    draws = draws_of(fit)
    weights = psis_weights(draws.log_weight).numpy()
    for j, axis in enumerate(plots.parameters(fit, draws).axes):
        values = draws.vartheta[:, j].numpy()
        for label, w in (("q", None), ("q, weighted", weights)):
            (line,) = lines(axis, label)
            at, density = line.get_data()
            assert density == pytest.approx(gaussian_kde(values, weights=w)(at), rel=1e-6)
        (line,) = lines(axis, "prior")
        at, density = (torch.as_tensor(part) for part in line.get_data())
        torch.testing.assert_close(density, Normal(0.0, j + 2.0).log_prob(at).exp())
        assert (at[0], at[-1]) == pytest.approx(axis.get_xlim())


def test_true_parameters_are_drawn_on_the_scale_of_vartheta():
    """Kills a truth on the natural scale, and one lost beyond the axis."""
    fit = fit_of(1, 3)
    draws, truth = draws_of(fit), [2.0, -5.0, 0.1]
    expected = [math.log(2.0), -5.0, math.log(0.1)]
    figure = plots.parameters(fit, draws, truth)
    for axis, value in zip(figure.axes, expected, strict=True):
        (line,) = lines(axis, "true value")
        assert line.get_xdata() == pytest.approx([value] * 2) and line.get_linestyle() == ":"
        assert axis.get_xlim()[0] < value < axis.get_xlim()[1]
    plt.close("all")
    figure = plots.pairs(fit, draws, torch.tensor(truth))
    for axis, (i, j) in zip(figure.axes, np.argwhere(np.tri(3)), strict=True):
        dotted = [s.get_xydata().tolist() for s in axis.lines if s.get_linestyle() == ":"]
        across = [[[0, expected[i]], [1, expected[i]]]] if i != j else []
        assert dotted == [[[expected[j], 0], [expected[j], 1]], *across]
        assert axis.get_xlim()[0] < expected[j] < axis.get_xlim()[1]


PRIORS = {
    "one name": {"k0": LogNormal(0.3, 0.5), "k1": Normal(1.0, 2.0), "k2": LogNormal(-1.0, 0.7)},
    "batch": Normal(torch.tensor([0.3, 1.0, -1.0]), torch.tensor([0.5, 2.0, 0.7])),
    "event": Independent(Normal(torch.tensor([0.3, 1.0, -1.0]), torch.tensor([0.5, 2.0, 0.7])), 1),
    "joint": MultivariateNormal(
        torch.tensor([0.3, 1.0, -1.0]),
        torch.tensor([[0.25, 0.3, 0.0], [0.3, 4.0, 0.2], [0.0, 0.2, 0.49]]),
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_marginal_of_the_prior_is_exact(name):
    """Kills a missing or doubled Jacobian, a variance for a sd, another component."""
    model, at = model_of(1, 3, PRIORS[name]), torch.linspace(-3.0, 3.0, 61)
    for j, (mean, sd) in enumerate([(0.3, 0.5), (1.0, 2.0), (-1.0, 0.7)]):
        expected = Normal(mean, sd).log_prob(at).exp()
        torch.testing.assert_close(plots_theta.prior_density(model, j, at), expected)


def test_marginal_of_any_other_prior_is_that_of_its_draws():
    """10^4 draws, within what kernels of their width blur. Kills another column's draws."""
    parts = MultivariateNormal(torch.tensor([[0.0, 3.0], [4.0, -3.0]]), torch.eye(2))
    prior = MixtureSameFamily(Categorical(torch.tensor([0.5, 0.5])), parts)
    before = torch.get_rng_state()
    at = torch.linspace(-7.0, 7.0, 100)
    for j, centres in enumerate([(0.0, 4.0), (3.0, -3.0)]):
        exact = sum(0.5 * Normal(c, 1.0).log_prob(at).exp() for c in centres)
        density = plots_theta.prior_density(model_of(1, 2, prior), j, at)
        torch.testing.assert_close(density, exact, atol=0.03, rtol=0.0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("d", [1, 3, 8])
def test_pairs_are_a_lower_triangle(d):
    """Kills a square of panels, swapped axes, names on panels within, points beyond 500."""
    fit = fit_of(1, d)
    draws = draws_of(fit, n=600)
    figure = plots.pairs(fit, draws)
    assert len(figure.axes) == d * (d + 1) / 2
    names = [f"k{j}" if j % 2 else f"log k{j}" for j in range(d)]
    for axis, (i, j) in zip(figure.axes, np.argwhere(np.tri(d)), strict=True):
        assert axis.get_xlabel() == (names[j] if i == d - 1 else "")
        assert axis.get_ylabel() == ("" if j else names[i] if i else "density")
        if i == j:
            at, density = lines(axis, "q")[0].get_data()
            kde = gaussian_kde(draws.vartheta[:, j].numpy())
            assert density == pytest.approx(kde(at), rel=1e-6)
        else:
            points = next(line for line in axis.lines if line.get_alpha() == 0.3)
            assert points.get_xydata() == pytest.approx(draws.vartheta[:500, [j, i]].numpy())


def test_contours_of_pairs_hold_half_and_95_percent():
    """2·10^4 draws, kernels widen. Kills swapped levels and levels of density, not of mass."""
    fit = fit_of(1, 2)
    draws = draws_of(fit, n=20_000)
    (contours,) = plots.pairs(fit, draws).axes[1].collections
    points = draws.vartheta.numpy()
    inside = [path.contains_points(points).mean() for path in contours.get_paths()]
    assert sorted(inside) == pytest.approx([0.5, 0.95], abs=0.02)


def test_pairs_of_weighted_draws_and_of_chosen_names():
    """5 SE. Kills weights that reach only the diagonal, and names in the model's own order."""
    fit = fit_of(2, 8)
    draws = draws_of(fit, n=10_000)
    figure = plots.pairs(fit, draws, weighted=True, names=["k3", "k0"])
    first, pair, second = figure.axes
    assert (pair.get_xlabel(), pair.get_ylabel()) == ("k3", "log k0")
    weights = psis_weights(draws.log_weight)
    for axis, j in ((first, 3), (second, 0)):
        at, density = lines(axis, "q, weighted")[0].get_data()
        kde = gaussian_kde(draws.vartheta[:, j].numpy(), weights=weights.numpy())
        assert density == pytest.approx(kde(at), rel=1e-6)
    points = next(line for line in pair.lines if line.get_alpha() == 0.3).get_xydata()
    assert len(points) == 500
    # Every draw has weight exp(0.5 u) for its u = 10 ϑ_0: the mean of ϑ_0 moves from 0 to 0.05.
    assert points[:, 1].mean() == pytest.approx(0.05, abs=5 * 0.1 / math.sqrt(500))
    assert points[:, 1].mean() > 0.025 and points[:, 0].mean() == pytest.approx(-3.0, abs=0.1)


def test_pairs_refuse_what_they_cannot_show():
    fit = fit_of(1, 13)
    draws = draws_of(fit)
    with pytest.raises(ValueError, match="at most 12 parameters; got 13. Choose with names="):
        plots.pairs(fit, draws)
    for names in ([], ["k1", "k1"], ["k99"], "k1"):
        with pytest.raises(ValueError, match="names must be some of .*, each once; got"):
            plots.pairs(fit, draws, names=names)
    assert len(plots.pairs(fit, draws, names=["k12"]).axes) == 1


def test_figures_refuse_what_belongs_to_another_fit():
    fit, other = fit_of(2, 3), fit_of(1, 3)
    for draw in (plots.paths, plots.parameters, plots.pairs):
        with pytest.raises(ValueError, match=r"draws must be of this fit, x \(n, 7, 2\)"):
            draw(fit, draws_of(other))
    with pytest.raises(ValueError, match=r"truth must be \(t, x\) with x \(7, 2\)"):
        plots.paths(fit, draws_of(fit), truth=(torch.arange(7.0), torch.ones(7, 1)))
    refused = [
        ([1.0, 2.0], r"truth must be θ, one number for each of .*'k1', 'k2'\); got \[1.0, 2.0\]"),
        ([1.0, 2.0, -3.0], r"truth must be on the natural scale, k2 in \(0, inf\); got \[1"),
        ([0.0, 1.0, 1.0], "truth must be on the natural scale, k0 in"),
    ]
    for truth, words in refused:
        for draw in (plots.parameters, plots.pairs):
            with pytest.raises(ValueError, match=words):
                draw(fit, draws_of(fit), truth=truth)


def test_trace_says_what_the_fit_found():
    """Kills a verdict that runs out of the figure, and one that hides under the legend."""
    fit = fit_of(1, 1)
    figure = plots.trace(fit)
    (axis,) = figure.axes
    assert axis.get_title().split() == fit.reason.split() and "\n" in axis.get_title()
    assert axis.lines[0].get_ydata() == pytest.approx(fit.history.elbo)
    (smooth,) = lines(axis, "mean of 10 steps")
    assert smooth.get_ydata()[-1] == pytest.approx(fit.history.elbo[-10:].mean())
    figure.canvas.draw()
    box, title = figure.legends[0].get_window_extent(), axis.title.get_window_extent()
    assert box.y0 >= title.y1 and title.x0 >= 0 and title.x1 <= figure.bbox.x1


@pytest.mark.parametrize("p", [1, 2, 4])
def test_predictive_has_a_fan_of_each_component(p):
    """Kills a fan of another component, data divided by F, a forecast that starts too early."""
    fit, m = fit_of(p, 3), len(F[p][0])
    y_new = torch.randn(300, N + 1, m) * (torch.arange(m) + 1.0)
    future = Forecast(torch.tensor([4.5, 5.0]), torch.zeros(90, 2, p), y_new[:90, :2] + 9, 0.3)
    figure = plots.predictive(fit, y_new, future)
    assert [axis.get_ylabel() for axis in figure.axes] == [f"y{j}" for j in range(m)]
    assert figure.axes[-1].get_xlabel() == "t"
    assert "forecast (30% of paths): median, 50, 95 %" in legend(figure)
    for j, axis in enumerate(figure.axes):
        for first, y in ((0, y_new), (2, future.y)):
            ends = np.quantile(y[..., j], [[0.025, 0.975], [0.25, 0.75]], axis=0)
            assert [bounds(axis, first), bounds(axis, first + 1)] == pytest.approx(ends)
        (points,) = lines(axis, "observations")
        there = ~Y[:, j].isnan()
        expected = torch.stack([torch.tensor(TIMES)[there], Y[there, j]], 1)
        assert points.get_xydata() == pytest.approx(expected.numpy())
        (end,) = [line for line in axis.lines if line.get_linestyle() == ":"]
        assert end.get_xdata() == pytest.approx([4.0, 4.0])
        assert axis.collections[2].get_paths()[0].vertices[:, 0].min() == 4.5


def test_predictive_refuses_what_is_not_of_this_fit():
    fit, y_new = fit_of(2, 3), torch.randn(30, N + 1, 1)
    with pytest.raises(ValueError, match=r"y_new must be of this fit, \(n, 7, 1\); got \(0, 7, 1"):
        plots.predictive(fit, y_new[:0])
    future = Forecast(torch.tensor([4.5]), torch.zeros(9, 1, 2), torch.zeros(9, 1, 3), 1.0)
    with pytest.raises(ValueError, match=r"future must be of this fit, y \(n, steps, 1\); got \(9"):
        plots.predictive(fit, y_new, future)


def test_what_is_of_another_kind_is_refused():
    """Kills: 'Forecast' object has no attribute 'shape'."""
    fit, y_new = fit_of(1, 1), torch.randn(30, N + 1, 1)
    future = Forecast(torch.tensor([4.5]), torch.zeros(9, 1, 1), torch.zeros(9, 1, 1), 1.0)
    cases = [
        (("fit.pt", y_new, None), "fit must have type FitResult; got str. It is what lib.fit"),
        ((fit, future, None), r"y_new must have type Tensor; got Forecast. Take fit.predict\(40"),
        ((fit, y_new, y_new), r"future must have type Forecast; got Tensor. Take fit.forecast\(50"),
    ]
    for given, words in cases:
        # The check alone: the shape checks of the tests would refuse it before.
        with pytest.raises(TypeError, match=words):
            plots_fit._check_new(*given)
    for truth, words in ((y_new, "tensor"), ((np.ones(3), y_new), r"\['ndarray', 'Tensor'\]")):
        with pytest.raises(TypeError, match=f"truth must be two tensors, .t, x.; got {words}"):
            plots_fit._check_path(truth, 1)


def test_every_figure_of_a_real_fit():
    """What ``draws``, ``predict`` and ``forecast`` return is what the figures take."""
    fit = trained()
    draws = fit.draws(50)
    for figure in (plots.paths(fit, draws), plots.parameters(fit, draws), plots.pairs(fit, draws)):
        figure.canvas.draw()
        plt.close(figure)
    plots.predictive(fit, fit.predict(40), fit.forecast(3, 40)).canvas.draw()
    plt.close("all")
    plots.trace(fit).canvas.draw()


def test_trace_of_a_run_whose_steps_were_all_skipped():
    """Kills limits taken from no value: such a run has a verdict to show."""
    fit = fit_of(1, 1)
    fit.history.elbo[:] = NAN
    assert plots.trace(fit).axes[0].get_title()


def test_views_tell_picks_from_mixtures():
    """Kills a column of zeros that is taken for a state's, and a factor that is dropped."""
    matrix = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 1.0]])
    panels = plots_fit.views(matrix, ("a", "b"), ("none", "scaled", "sum"))
    assert [view.label for view in panels] == ["a", "b", "F'x, none", "F'x, sum"]
    assert [view.readings for view in panels] == [((1, 3.0),), (), ((0, 1.0),), ((2, 1.0),)]
    assert [view.weights.tolist() for view in panels[2:]] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("figure", [plots.paths, plots.parameters, plots.pairs])
def test_too_few_draws_for_a_density_are_refused(figure):
    fit = fit_of(1, 3)
    with pytest.raises(ValueError, match="draws must be 20 or more; got 3"):
        figure(fit, draws_of(fit, 3))
