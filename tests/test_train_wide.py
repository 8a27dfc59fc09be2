"""A training run that the wide draws alone break: its reason names their term of the bound."""

import pytest
import torch
from torch.distributions import Normal

import lib

NARROW = 4


class Broken(lib.OrnsteinUhlenbeck):
    """NaN from the training draw ``first`` on: the probe and the start see float64."""

    def __init__(self, first: int) -> None:
        self.first = first

    def drift(self, t, x, theta):
        drift = super().drift(t, x, theta)
        if x.dtype != torch.float32:
            return drift
        place = torch.arange(len(drift)).reshape(-1, *[1] * (drift.dim() - 1))
        return torch.where(place >= self.first, torch.nan, drift)


def broken_fit(first: int) -> lib.FitResult:
    """A fit with NARROW draws and two wide ones, of which those from ``first`` on break."""
    data = lib.read_csv(lib.data_path("ou_a.csv"), dt=0.1)
    model = lib.StateSpaceModel(
        Broken(first),
        lib.GaussianObservation([[1.0]], 1.0),
        Normal(torch.zeros(3), 1.0),
        x0=[20.0],
    )
    data = lib.Observations(data.times[:20], data.y[:20], 0.1)
    config = lib.FitConfig(num_steps=100, num_samples=NARROW, wide_samples=2, log_every=10)
    return lib.fit(model, data, config, device="cpu", progress=False)


@pytest.mark.parametrize(
    ("first", "named"),
    [(NARROW, "conditional"), (NARROW + 1, "conditional"), (NARROW - 1, "log_transition")],
)
def test_what_breaks_is_named(first, named):
    """Kills a stop that the wide draws caused and that blames the gradient, or no term at all.

    Kills also their term named beside the one of q's own draws that broke it.
    """
    fit = broken_fit(first)
    assert not fit.converged and fit.reason.startswith("stopped at step 50: 50 steps in a row")
    assert fit.reason.endswith(f"not finite: {named}")


def test_without_a_broken_draw_the_run_goes_on():
    """Kills a fixture that breaks whatever it is told."""
    assert len(broken_fit(NARROW + 2).history.step) == 100
