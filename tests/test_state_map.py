"""h, from the whole line to where a state can be."""

import pytest
import torch

from lib.state_map import FAR, POSITIVE_FLOOR, StateMap


def line() -> torch.Tensor:
    """Values of u, and those where formulas change."""
    return torch.cat([torch.linspace(-80, 80, 400), torch.tensor([FAR, FAR - 1e-9, 0.0, 40.0])])


def both(unit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x and log slope of a positive state, at ``line()``."""
    x, log_slope = StateMap((True,), 1, None, unit)(line()[:, None, None])
    return x.flatten(), log_slope.flatten()


@pytest.mark.parametrize("unit", [None, 1.0, 2.5])
def test_slope_is_that_of_h(unit):
    """Kills a lost factor ½ or softplus(u) in the slope, and log 0 far out."""
    u = line().requires_grad_()
    x, log_slope = StateMap((True,), 1, None, unit)(u[:, None, None])
    (slope,) = torch.autograd.grad(x.sum(), u)
    torch.testing.assert_close(log_slope.flatten().exp(), slope, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_stay_where_softplus_underflows(dtype):
    """Kills the log of an underflown softplus: of x ≈ ¼ e²ᵘ the log slope rises by 2."""
    u = torch.tensor([-40.0, -200.0, -1000.0], dtype=dtype, requires_grad=True)
    log_slope = StateMap((True,), 1, None)(u[:, None, None])[1]
    (rise,) = torch.autograd.grad(log_slope.sum(), u)
    torch.testing.assert_close(rise, torch.full_like(u, 2.0))


@pytest.mark.parametrize("unit", [None, 1.0, 2.5])
def test_inverse_of_h(unit):
    x, _ = both(unit)
    back = StateMap((True,), 1, None, unit).inverse(x[:, None, None]).flatten()
    seen = x > 1e5 * POSITIVE_FLOOR
    torch.testing.assert_close(back[seen], line()[seen], rtol=1e-9, atol=1e-4)


def test_h_by_hand():
    """Kills another map: ¼ log²(1 + eᵘ), and the paper's with a unit."""
    softplus = torch.log1p(torch.exp(line()))
    torch.testing.assert_close(both(None)[0], 0.25 * softplus.square() + POSITIVE_FLOOR)
    torch.testing.assert_close(both(2.5)[0], 2.5 * (softplus + POSITIVE_FLOOR))


def test_noise_of_counts_is_the_same_at_any_size():
    """β = c x is c in u where x is large: what softplus alone, or a logarithm, does not give."""
    x, log_slope = both(None)
    beta = x / log_slope.exp().square()
    assert (beta[x > 30] - 1).abs().max() < 1e-3


def test_other_states_are_left_alone():
    u = torch.randn(5, 3, 2)
    x, log_slope = StateMap((False, True), 3, None)(u)
    assert x[..., 0].equal(u[..., 0]) and (log_slope[..., 0] == 0).all()
    assert StateMap((False, False), 3, None).affine and not StateMap((False, True), 3, None).affine
