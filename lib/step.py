"""One optimiser step (algorithm 1): gradient, clipping to a global norm, update of the weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from lib.muon import Muon
from lib.network import Conditioner, ThetaTaps
from lib.posterior import Noise, VariationalPosterior

BETAS = (0.9, 0.99)
CLIP_NORM = 10.0


def make_optimizers(q: VariationalPosterior, kind: str) -> list[torch.optim.Optimizer]:
    """Adam for every weight; or Muon for the matrices of the path's networks, Adam for the rest.

    The weights of q(ϑ) are the first group of the first optimiser.
    """
    of_theta = list(q.theta_flow.parameters())
    networks = [m for m in q.modules() if isinstance(m, Conditioner | ThetaTaps)]
    matrices = [w for m in networks for w in m.matrices()] if kind == "muon" else []
    apart = {id(w) for w in of_theta + matrices}
    others = [w for w in q.parameters() if w.requires_grad and id(w) not in apart]
    groups = [{"params": of_theta}, {"params": others}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(groups, lr=0.0, betas=BETAS, fused=True)
    ]
    if matrices:
        optimizers.append(Muon(matrices))
    return optimizers


def set_rates(optimizers: list[torch.optim.Optimizer], rate: float, held: bool) -> None:
    """One learning rate for all; that of q(ϑ) is 0 where it is held."""
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] = rate
    if held:
        optimizers[0].param_groups[0]["lr"] = 0.0


def make_step(
    loss: Callable[[Noise, Tensor], tuple[Tensor, Tensor]],
    optimizers: list[torch.optim.Optimizer],
) -> Callable[[Noise, Tensor], tuple[Tensor, Tensor]]:
    """One step as a function of (noise, α): gradient, clipping, update; no sync with the device.

    Returns the reported ELBO and 1.0 if the gradient was not finite, when nothing is updated.
    """

    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights = [w for group in groups for w in group["params"]]

    def step(noise: Noise, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Take the step; see above."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        value, reported = loss(noise, alpha)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        bad = (~norm.isfinite()).float()
        for optimizer in optimizers:
            # The hook that gradient scalers use: the fused update does nothing where this is 1.
            optimizer.found_inf = bad
            optimizer.step()
        return reported, bad

    return step
