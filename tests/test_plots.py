"""Figures of any fit: the axes say what they show."""

import matplotlib

matplotlib.use("Agg")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.collections import LineCollection  # noqa: E402

from lib import plots, plots_studies  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_smoothing_draws_paths_points_and_truth():
    t, x = torch.linspace(0, 1, 11), torch.randn(60, 11, 2)
    figure = plots.smoothing(
        t, x, ["a", "b (m)"], time_label="day", points={1: (t, t)}, truth=(t, t), num_paths=7
    )
    first, second = figure.axes
    assert first.get_ylabel() == "a" and second.get_ylabel() == "b (m)"
    assert first.get_xlabel() == second.get_xlabel() == "day"
    long = [[line for line in axis.lines if len(line.get_xdata()) == 11] for axis in figure.axes]
    assert [len(lines) for lines in long] == [8, 8]  # 7 paths, and the truth or the points


def test_band_holds_95_percent():
    """Kills another interval than the label says."""
    axis = plt.subplots()[1]
    x = torch.linspace(0, 1, 1001)[:, None].expand(-1, 3)
    plots.band(axis, torch.arange(3.0), x, "C0", "95 %")
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(0.025) and heights.max() == pytest.approx(0.975)


def test_fan_holds_50_and_95_percent_and_the_median():
    """Kills a wrong interval, and a median that is drawn as another quantile."""
    axis = plt.subplots()[1]
    x = torch.linspace(0, 1, 1001)[:, None].square().expand(-1, 3)
    plots.fan(axis, torch.arange(3.0), x, "C0", "new")
    ends = [0.025, 0.975], [0.25, 0.75]
    for shade, levels in zip(axis.collections, ends, strict=True):
        heights = shade.get_paths()[0].vertices[:, 1]
        expected = [level**2 for level in levels]
        assert [heights.min(), heights.max()] == pytest.approx(expected, abs=1e-6)
    assert axis.lines[0].get_ydata() == pytest.approx([0.25] * 3, abs=1e-6)
    assert axis.get_legend_handles_labels()[1] == ["new: median, 50, 95 %"]


def test_forecast_tells_held_out_data_from_data_of_the_fit():
    """Kills a last datum of the fit that is drawn as held out, and swapped fans."""
    t = torch.arange(1, 6) / 10
    grid, x = 0.1 * torch.arange(7), torch.linspace(0, 1, 101)[:, None].expand(-1, 7)
    panels = {
        f"to {end}": ((grid[: end + 1], x[:, : end + 1]), (grid[end + 1 :], x[:, end + 1 :] + 2))
        for end in (3, 5)
    }
    figure = plots.forecast(panels, t, 10 * t, "boys", time_label="day")
    assert [axis.get_title() for axis in figure.axes] == ["to 3", "to 5"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["boys", "boys"]
    assert figure.axes[-1].get_xlabel() == "day"
    for axis, end in zip(figure.axes, (3, 5), strict=True):
        fitted, future, border, used, held = axis.lines
        assert fitted.get_xdata() == pytest.approx(grid[: end + 1].numpy())
        assert future.get_xdata() == pytest.approx(grid[end + 1 :].numpy())
        assert fitted.get_ydata()[0] == pytest.approx(0.5) and future.get_ydata()[0] > 2
        assert border.get_xdata() == pytest.approx([grid[end].item()] * 2)
        assert used.get_ydata() == pytest.approx(list(range(1, end + 1)))
        assert held.get_ydata() == pytest.approx(list(range(end + 1, 6)))
        assert len(axis.collections) == 4


def test_forecast_legend_is_above_the_panels():
    """Kills a margin that does not know the figure's height."""
    t, x = torch.arange(4.0), torch.randn(50, 4)
    for count in (1, 3):
        panels = {str(k): ((t[:3], x[:, :3]), (t[3:], x[:, 3:])) for k in range(count)}
        figure = plots.forecast(panels, t, t, "boys", time_label="day")
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        title = figure.axes[0].title.get_window_extent()
        assert 0 <= box.y0 - title.y1 < 0.4 * figure.dpi
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_marginals_have_one_panel_a_parameter():
    draws = {"q": torch.randn(200, 2), "MH": torch.randn(200, 2)}
    curve = (torch.linspace(-3, 3, 50), torch.ones(50))
    figure = plots.marginals(draws, ["a", "b"], curves={"exact": [curve, curve]}, truth=[0.0, 1.0])
    assert [axis.get_xlabel() for axis in figure.axes] == ["a", "b"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["exact", "q", "MH", "true value"]


def test_elbo_trace_shows_the_gap_where_the_evidence_is_known():
    """Kills the sign of the gap, and a skipped step that empties the figure."""
    elbo = np.linspace(-10.0, -1.0, 120)
    elbo[5] = np.nan
    (axis,) = plots.elbo_trace({"a run": elbo}).axes
    assert axis.get_ylabel() == "ELBO (nats)" and axis.get_ylim()[1] > -1
    (axis,) = plots.elbo_trace({"a run": elbo}, log_evidence=-0.5).axes
    assert axis.get_ylabel() == "log p(y) − ELBO (nats)" and axis.get_yscale() == "log"
    assert axis.lines[0].get_ydata()[-1] == pytest.approx(0.5)
    elbo[60:80:2] = -0.4, -0.4999, *[-0.1] * 8
    (axis,) = plots.elbo_trace({"a run": elbo}, log_evidence=-0.5).axes
    assert axis.get_ylim()[0] > 0.1, "single steps near or beyond log p(y) do not set the axis"


def test_long_legends_stay_inside_the_figure():
    """Kills a fixed number of columns: four long names are wider than one panel."""
    runs = {f"study preset, seed {seed}": np.linspace(-10.0, -1.0, 120) for seed in range(4)}
    figure = plots.elbo_trace(runs)
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_compare_bands():
    """Kills an interval hung upside down from its median."""
    bands = torch.tensor([[0.0, 1.0], [1.0, 2.0], [3.0, 4.0]])
    figure = plots.compare_bands([1, 2], [bands], [bands + 1], ["I"], time_label="day")
    assert figure.axes[0].get_xlabel() == "day" and len(figure.axes[0].containers) == 2
    for shift, container in enumerate(figure.axes[0].containers):
        ends = np.array([part[:, 1] for part in container.lines[2][0].get_segments()])
        assert ends == pytest.approx(bands[[0, 2]].T.numpy() + shift)


def test_robustness_rings_the_flagged_and_draws_the_limit_of_k_hat(monkeypatch):
    """Kills a limit typed by hand, a ring around another fit, a failed fit that is left out."""
    monkeypatch.setattr(plots_studies, "K_HAT_LIMIT", 0.6)
    table = {"seed": ["100", "101", "102"], "kind": ["regular", "regular", "plateau"]}
    table |= {"kl": [0.1, 0.2, np.inf], "k_hat": [0.3, 0.8, np.inf], "flagged": [False, True, True]}
    kl, k_hat = plots.robustness(table, bars=[0.5]).axes
    (limit,) = [line for line in k_hat.lines if line.get_label() == "k-hat 0.6"]
    assert limit.get_ydata() == pytest.approx([0.6, 0.6])
    for axis, column in ((kl, "kl"), (k_hat, "k_hat")):
        drawn = {line.get_label(): line for line in axis.lines}
        assert drawn["regular posterior"].get_ydata() == pytest.approx(table[column][:2])
        assert drawn["plateau posterior"].get_ydata() == pytest.approx([2.0])
        assert drawn["flagged fit"].get_xdata() == pytest.approx([1, 2])
        assert drawn["flagged fit"].get_ydata() == pytest.approx([table[column][1], 2.0])
    assert [label.get_text() for label in k_hat.get_xticklabels()] == table["seed"]


def test_growth_prints_the_slopes_and_leaves_out_what_was_missed():
    """3·N^1.5 and N^0.5; kills a slope of N or of one log, and a miss that counts or is hidden."""
    steps = np.array([100.0, 1000, 10_000])
    ours = {
        "steps": steps.tolist(),
        "seconds": [*(3 * steps[:2] ** 1.5), np.inf],
        "spent": [1, 2, 7e6],
    }
    ours["memory"] = (steps**0.5).tolist()
    once = {"steps": [100], "seconds": [5.0], "spent": [9.0], "memory": [50.0]}
    figure = plots.growth({"longer": {"ours": ours, "NUTS": once}}, "error ≤ 0.1 sd")
    upper, lower = figure.axes
    drawn = {line.get_label(): line for line in upper.lines}
    assert list(drawn) == ["ours, slope 1.50", "ours: not yet", "NUTS"]
    assert drawn["ours, slope 1.50"].get_xdata().tolist() == [100, 1000]
    assert drawn["ours: not yet"].get_ydata().tolist() == [7e6]
    assert [line.get_label() for line in lower.lines] == ["ours, slope 0.50", "NUTS"]
    assert upper.get_ylabel() == "seconds to error ≤ 0.1 sd" and upper.get_xscale() == "log"
    assert (lower.get_ylabel(), lower.get_yscale()) == ("memory (MB)", "log")


def test_numbers_on_log_axes_are_plain_and_few():
    """Kills labels such as 3 × 10² that run into each other, and a single run without its range."""
    table = {"steps": [140, 280], "seconds": [30.0, 70.0], "spent": [30.0, 70.0]}
    grown = plots.growth({"finer": {"ours": table | {"memory": [600.0, 700.0]}}}, "error ≤ 0.1 sd")
    grown.canvas.draw()
    assert [label.get_text() for label in grown.axes[1].get_xticklabels()] == ["140", "280"]
    one = {"seconds": [20.0], "error": [0.1], "low": [0.05], "high": [0.4]}
    two = {"seconds": [25, 60], "error": [1.0, 0.1], "low": [0.5, 0.05], "high": [2.0, 0.3]}
    errors = plots.error_against_seconds({"A": {"x": one, "y": two}}, bar=0.2)
    errors.canvas.draw()
    for axis in (*errors.axes, grown.axes[0]):
        for side in (axis.xaxis, axis.yaxis):
            assert not any(label.get_text() for label in side.get_ticklabels(minor=True))
            assert all(float(label.get_text()) > 0 for label in side.get_ticklabels())
    (range_of_one,) = (c for c in errors.axes[0].collections if isinstance(c, LineCollection))
    assert range_of_one.get_segments()[0][:, 1].tolist() == [0.05, 0.4]
