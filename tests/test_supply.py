"""What the steps of a fit take: q(ϑ) refitted, noise of it with its tails, chains (lib.supply)."""

import copy
from functools import cache

import pytest
import torch
from torch.distributions import Normal

import lib
from lib import supply as module
from lib.linear_start import COMMON, linear_start
from lib.maf import STRETCH
from lib.posterior import VariationalPosterior
from lib.start import find_start
from lib.supply import (
    EARLY_DRAWS,
    EARLY_STEPS,
    LAST_DRAWS,
    LAST_STEPS,
    MOST_STEPS,
    START_DRAWS,
    ThetaSupply,
)

X0, SIGMA2, DT, SD = 2.0, 0.25, 0.1, 0.7
INNER, WIDE = 6, 3
SIZE = INNER + WIDE
PAIR = [0, 0, 1, 1, 2, 2, 3, 3, 4]  # of ϑ, of each path: the last wide path has none beside it
ALONE = [0, 2, 4, 6, 8]


def ou() -> tuple[lib.StateSpaceModel, lib.Observations]:
    """OU under a prior that leaves no long tail; a reading is missing."""
    model = lib.StateSpaceModel(
        lib.OrnsteinUhlenbeck(),
        lib.GaussianObservation([[1.0]], SIGMA2**0.5),
        Normal(torch.zeros(3).double(), SD),
        x0=[X0],
    )
    path = model.simulate(torch.tensor([[1.0, 0.0, 1.0]]).double(), 30, DT, seed=3).x[0, 1:]
    noise = torch.randn(30, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = path + SIGMA2**0.5 * noise
    y[4] = torch.nan
    return model, lib.Observations(DT * torch.arange(1, 31).double(), y, DT)


def made(family: lib.Family, start: bool = False) -> ThetaSupply:
    model, data = ou()
    grid = data.grid()
    first = find_start(model, grid, 0)
    first = linear_start(model, grid, first, 0) if family.base else first
    q = VariationalPosterior(model, grid, family, first, 0)
    config = lib.FitConfig(num_samples=INNER, wide_samples=WIDE, family=family)
    supply = ThetaSupply(model, q, grid, config, torch.Generator().manual_seed(0))
    if start:
        supply.start()
    return supply


@cache
def started() -> ThetaSupply:
    return made(lib.Family(num_flows=1, hidden=8), start=True)


@pytest.fixture
def supply() -> ThetaSupply:
    """A copy that a test may change."""
    own = copy.copy(started())
    own.stock, own.generator = [], torch.Generator().manual_seed(7)
    return own


def test_start_fits_q_of_theta_to_the_posterior() -> None:
    """KL(q‖p) of the ϑ-marginals by the filter, 10⁴ draws: kills a q(ϑ) left as it started.

    Over six seeds KL was 0.03 to 0.05 and the effective share 0.71 to 0.94; 1.3 and 0.4 to 0.5
    where nothing is fitted.
    """
    model, q, grid = started().model, started().q, started().grid
    y = torch.where(grid.observed[1:, 0] > 0, grid.y[1:, 0], torch.nan)
    noise = q.draw_theta_noise(10_000, torch.Generator().manual_seed(1))
    with torch.no_grad():
        vartheta, log_q = q.theta_flow(noise)
    transition = lib.ou_transition(model.to_theta(vartheta), DT, exact=False)
    log_p = model.log_prior(vartheta)
    log_p = log_p + lib.forward_filter(y, transition, X0, 0.0, SIGMA2).log_likelihood
    log_weight = log_p - log_q
    log_evidence = torch.logsumexp(log_weight, 0) - torch.log(torch.tensor(1e4))
    assert log_evidence - log_weight.mean() < 0.1
    share = torch.softmax(log_weight, 0).square().sum() ** -1 / 1e4
    assert share > 0.55


def test_noise_is_of_q_then_of_the_tails(supply: ThetaSupply) -> None:
    """Kills tails that come first, tails instead of draws, and noise used for two pairs."""
    steps = [supply.noise() for _ in range(2 * MOST_STEPS)]
    for step in steps:
        assert step.theta.shape == (SIZE, 3) and step.path.shape == (SIZE, 30, 1)
        match = (step.theta[:, None] == supply.tails).all(-1).any(1)
        assert match.tolist() == [False] * INNER + [True] * WIDE
    inner = torch.cat([step.theta[:INNER:2] for step in steps]).flatten()
    paths = torch.stack([step.path[ALONE] for step in steps]).flatten()
    for drawn in (inner, paths):
        assert len(drawn.unique()) == len(drawn)
        assert abs(drawn.mean()) < 5 * len(drawn) ** -0.5
        assert abs(drawn.var() - 1) < 5 * (2 / len(drawn)) ** 0.5


def test_paths_come_in_pairs_of_one_theta_and_opposite_noise(supply: ThetaSupply) -> None:
    """Kills a pair across draws and wide draws, one of equal noise, and a ϑ for each path."""
    step = supply.noise()
    assert torch.equal(step.theta, step.theta[ALONE][PAIR])
    assert len(step.theta.unique(dim=0)) == len(ALONE)
    assert torch.equal(step.path[:-1:2], -step.path[1::2])


def test_a_theta_whose_chain_is_not_finite_gives_way_to_one_of_its_kind(
    supply: ThetaSupply,
) -> None:
    """Kills a step lost to one exploding ϑ, and tails in place of a draw of q."""
    num_inner, size = INNER // 2, len(ALONE)
    chain = supply.q.chain(torch.zeros(3 * size, 3, dtype=supply.q.loc0.dtype))
    right = torch.arange(3 * size)
    assert torch.equal(supply._sound(chain), right)
    lost = [1, 4, size + 2, 2 * size + 3]
    for k, row in enumerate(lost):
        chain[k + (k > 0)][..., row] = (torch.nan, torch.inf)[k % 2]  # OU's chain has no entries
    found = supply._sound(chain)
    kept = torch.ones(3 * size, dtype=torch.bool)
    kept[lost] = False
    assert torch.equal(found[kept], right[kept])
    assert kept[found].all()
    assert torch.equal(found % size < num_inner, right % size < num_inner)
    chain.mean.fill_(torch.nan)
    none = supply._sound(chain)  # to stand in, but it passes, each kind in its place
    assert torch.equal(none % size < num_inner, right % size < num_inner)


def test_each_step_has_the_chain_of_its_own_theta(supply: ThetaSupply) -> None:
    """Kills the chain of another step's ϑ, or of the noise in ϑ's place."""
    for _ in range(MOST_STEPS + 1):
        step = supply.noise()
        right = supply.q.chain(supply.q.theta_flow(step.theta)[0].detach())
        for found, part in zip(step.chain, right, strict=True):
            torch.testing.assert_close(found, part, rtol=1e-9, atol=1e-9)
            assert not found.requires_grad
    one, other = supply.q(step), supply.q(step._replace(chain=None))
    torch.testing.assert_close(one.log_q_x, other.log_q_x, rtol=1e-9, atol=1e-9)


def test_the_stock_is_as_large_as_the_memory_of_chains_allows(
    supply: ThetaSupply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills one chain at a time, and more at a time than a batch holds."""
    for batch, left in ((1, 0), (16, 0), (59, 1), (64, 2), (10**6, MOST_STEPS - 1)):
        monkeypatch.setattr(VariationalPosterior, "chain_batch", batch)
        supply.stock.clear()
        supply.noise()
        assert len(supply.stock) == left


def test_before_the_first_refit_the_wide_draws_are_stretched(supply: ThetaSupply) -> None:
    supply.tails = None
    drawn = torch.cat([supply.noise().theta for _ in range(2000)]).unflatten(0, (2000, SIZE))
    se = 5 * (2 / 2000) ** 0.5
    assert abs(drawn[:, :INNER].var(0) - 1).max() < se
    wide = drawn[:, INNER:].square().mean(0)
    right = torch.ones(WIDE, 3) + (STRETCH**2 - 1) * torch.eye(3)[[0, 0, 1]]
    assert (abs(wide / right - 1) < se).all()


def test_without_a_chain_there_is_none_and_no_stock() -> None:
    supply = made(lib.Family.paper())
    step = supply.noise()
    assert step.chain is None and step.theta.shape == (SIZE, 3) and not supply.stock
    assert len(step.path.abs().flatten().unique()) == step.path.numel()  # nor are there pairs


class Refits:
    """In place of ``refit_theta``: what it was asked, and the tails it finds, or None."""

    def __init__(self, found: torch.Tensor | None) -> None:
        self.found, self.asked = found, []

    def __call__(self, flow, log_p, draws, generator, num_steps):
        self.asked.append((draws, num_steps))
        log_p(torch.zeros(2, 3))
        return self.found


def test_a_refit_clears_the_stock_and_a_refused_one_keeps_the_tails(
    supply: ThetaSupply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills chains of an outdated q(ϑ), and tails forgotten by a refusal."""
    for found in (None, torch.ones(10, 3)):
        supply.noise()
        tails, stale = supply.tails, len(supply.stock)
        monkeypatch.setattr(module, "refit_theta", Refits(found))
        supply.refit(last=False)
        assert stale and not supply.stock
        assert supply.tails is (tails if found is None else found)
    assert (supply.noise().theta[INNER:] == 1).all()


def test_start_has_common_noise_and_the_last_refit_most_draws_and_steps(
    supply: ThetaSupply, monkeypatch: pytest.MonkeyPatch
) -> None:
    refits, common = Refits(None), []

    def log_ratio(*args):
        common.append(args[5])
        return args[3].sum(1)

    monkeypatch.setattr(module, "refit_theta", refits)
    monkeypatch.setattr(module, "log_ratio", log_ratio)
    supply.start()
    supply.refit(last=False)
    supply.refit(last=True)
    rough = [(START_DRAWS, EARLY_STEPS), (EARLY_DRAWS, EARLY_STEPS)]
    assert refits.asked == [*rough, (LAST_DRAWS, LAST_STEPS)]
    assert common == [COMMON, 0, 0]


@pytest.mark.parametrize("last, found", [(True, True), (True, False), (False, True)])
def test_tails_are_longer_after_a_last_refit_that_was_not_refused(
    supply: ThetaSupply, monkeypatch: pytest.MonkeyPatch, last: bool, found: bool
) -> None:
    """Kills tails that grow where no refit takes them back: in the steps, and with each resume."""
    supply.q = copy.deepcopy(supply.q)
    monkeypatch.setattr(module, "refit_theta", Refits(torch.ones(10, 3) if found else None))
    before = supply.q.theta_flow.tails.log_slope.clone()
    supply.refit(last)
    longer = supply.q.theta_flow.tails.log_slope - before
    assert (longer != 0).any() == (last and found)


def test_a_last_refit_without_a_map_of_tails_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = made(lib.Family.paper())
    monkeypatch.setattr(module, "refit_theta", Refits(torch.ones(10, 3)))
    supply.refit(last=True)
    assert supply.tails is not None


def test_it_repeats_from_its_generator_and_leaves_the_global_one() -> None:
    first, state = started(), torch.get_rng_state()
    again = made(first.q.family, start=True)
    again.noise()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.tails, first.tails)
    for one, other in zip(again.q.parameters(), first.q.parameters(), strict=True):
        assert torch.equal(one, other)
