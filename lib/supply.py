"""What the steps of a fit take of ϑ: q(ϑ) refitted, noise of it with its tails, chains."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lib.config import FitConfig
from lib.data import Grid
from lib.elbo import log_ratio
from lib.guided import Guide
from lib.linear_start import COMMON
from lib.maf import stretched
from lib.posterior import Noise, VariationalPosterior
from lib.refit import refit_theta
from lib.smoother import Chain, part_of
from lib.ssm import StateSpaceModel

MOST_STEPS = 20  # whose chains are made together
KEPT = 4  # part of the memory of chains that theirs may take, as they stay while steps are taken
# The last refit decides how good q(ϑ) is; those before it have only to find its tails.
LAST_DRAWS = 20_000
LAST_STEPS = 300
LAST_VALUES = 20_000_000  # of their paths, unless that is fewer than
EARLY_DRAWS = 4000
EARLY_STEPS = 100
START_DRAWS = 1000


class ThetaSupply:
    """Noise for the steps of a fit, of ϑ from q(ϑ) and from its tails, which it refits too.

    Args:
        model: The model, where and as the fit computes.
        q: The posterior whose q(ϑ) changes in place.
        grid: The data.
        config: How many draws a step takes.
        generator: Of all noise.
    """

    def __init__(
        self,
        model: StateSpaceModel,
        q: VariationalPosterior,
        grid: Grid,
        config: FitConfig,
        generator: torch.Generator,
    ) -> None:
        self.model, self.q, self.grid, self.generator = model, q, grid, generator
        # Paths come in pairs of opposite noise: both have the chain of one ϑ, and what is odd in
        # the noise cancels in the gradient.
        paths = 2 if q.family.base else 1
        inner, wide = (
            torch.arange(n, device=q.loc0.device) for n in (config.num_samples, config.wide_samples)
        )
        self.inner, self.wide = (-(-len(part) // paths) for part in (inner, wide))  # of ϑ
        self.which = torch.cat([inner // paths, self.inner + wide // paths])
        self.sign = 1 - 2 * torch.cat([inner % paths, wide % paths])[:, None, None]
        self.tails: Float[Tensor, "tails theta"] | None = None
        self.stock: list[tuple[Tensor, Chain | Guide | None]] = []

    def start(self) -> None:
        """Fit q(ϑ) before any training, by weights too rough to be used without common noise."""
        self._refit(START_DRAWS, EARLY_STEPS, COMMON)

    def refit(self, last: bool) -> None:
        """Fit q(ϑ) to the posterior, as the weights of q(x | ϑ) tell it.

        The last time its tails are left a little longer than the draws found them.
        """
        many = max(EARLY_DRAWS, min(LAST_DRAWS, LAST_VALUES // self.q.loc0.numel()))
        if not last:
            self._refit(EARLY_DRAWS, EARLY_STEPS)
        elif self._refit(many, LAST_STEPS):
            self.q.theta_flow.lengthen_tails()

    def _refit(self, draws: int, num_steps: int, common: int = 0) -> bool:
        """Whether it was refitted; where that is refused, what an earlier one found stays."""

        def log_p(vartheta: Tensor) -> Tensor:
            """log p(ϑ, y), an estimate for each ϑ."""
            return log_ratio(self.model, self.q, self.grid, vartheta, self.generator, common)

        found = refit_theta(self.q.theta_flow, log_p, draws, self.generator, num_steps)
        self.tails = self.tails if found is None else found
        self.stock.clear()
        return found is not None

    def noise(self) -> Noise:
        """Of one step: draws of q, and wider ones whose ϑ lie in its tails."""
        if not self.stock:
            self._restock()
        theta, chain = self.stock.pop()
        path = self.q.draw_path_noise(self.inner + self.wide, self.generator)
        return Noise(theta, path[self.which] * self.sign, chain)

    def _restock(self) -> None:
        """ϑ of the next steps: to make many chains at a time costs little more than to make one."""
        if not self.q.family.base:
            self.stock.append((self._theta(), None))
            return
        size = self.inner + self.wide
        count = max(1, min(MOST_STEPS, self.q.chain_batch // (KEPT * size)))
        theta = torch.cat([self._theta() for _ in range(count)])
        with torch.no_grad():
            chain = self.q.chain(self.q.theta_flow(theta)[0])
        for rows in self._sound(chain).split(size):
            own = rows[self.which]
            self.stock.append((theta[own], part_of(chain, own)))

    def _sound(self, chain: Chain | Guide) -> Int[Tensor, " mc"]:
        """Each draw of ϑ, or another in place of one at which the model explodes on this grid.

        Nothing is to be learned there: neither the smoother nor any path is finite.
        """
        lost = ~torch.stack([part.isfinite().flatten(0, -2).all(0) for part in chain]).all(0)
        rows = torch.arange(len(lost), device=lost.device).view(-1, self.inner + self.wide)
        kinds = [
            self._stand_in(kind, lost[kind]) for kind in rows.split([self.inner, self.wide], 1)
        ]
        return torch.cat(kinds, 1).flatten()

    @staticmethod
    def _stand_in(rows: Int[Tensor, "steps kind"], lost: Bool[Tensor, "steps kind"]) -> Tensor:
        """The rows, sound ones in turn in place of those lost."""
        in_turn = torch.arange(rows.numel(), device=rows.device) % (~lost).sum().clamp(min=1)
        sound_first = lost.flatten().argsort(stable=True)
        stand_in = rows.flatten()[sound_first[in_turn]].view_as(rows)
        return torch.where(lost, stand_in, rows)

    def _theta(self) -> Float[Tensor, "mc theta"]:
        """Noise of ϑ of one step, each once."""
        theta = self.q.draw_theta_noise(self.inner + self.wide, self.generator)
        if self.tails is None:
            return stretched(theta, self.wide)
        many, device = len(self.tails), self.tails.device
        chosen = torch.randint(many, (self.wide,), generator=self.generator, device=device)
        return torch.cat([theta[: self.inner], self.tails[chosen]])
