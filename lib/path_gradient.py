"""Path gradient of the ELBO: log q differentiated through its draws alone."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.gauss_markov import push_chain
from lib.posterior import Sample, Trace, VariationalPosterior

# A local IAF whose inverse is unstable (its taps have a root on the wrong side) makes the score
# grow exponentially along time. The mean of the path gradient is then right, its variance is not.
LARGEST_GROWTH = 100.0


class Score(NamedTuple):
    """Gradients at a draw, weights held: of log q(ϑ) by ϑ, of log q(x | ϑ) by ϑ and by x.

    Those by ϑ are 0 where q(ϑ) is held. ``growth`` is how much the local IAFs, all together,
    magnify the root mean square of that by x.
    """

    theta: Float[Tensor, "mc theta"]
    theta_path: Float[Tensor, "mc theta"]
    path: Float[Tensor, "mc time state"]
    growth: Float[Tensor, ""]


def with_path_gradient(q: VariationalPosterior, trace: Trace) -> Sample:
    r"""The same values, with log q differentiated only through ϑ and x (Roeder et al. 2017).

    The gradient of :math:`E_q[\log q]` loses its score term :math:`E_q[\nabla_\phi \log q_\phi]`,
    whose mean is 0 and whose variance stays when q reaches the posterior. What is left vanishes
    there, draw by draw. Where the score grows too much, this step keeps the plain gradient.
    """
    sample, score = trace.sample, find_score(q, trace)
    steady = score.growth < LARGEST_GROWTH
    score = Score(*(torch.where(steady, part, 0.0) for part in score))
    theta_moves = sample.vartheta - sample.vartheta.detach()
    x_moves = (sample.x - sample.x.detach())[:, q.first :]
    from_theta = (score.theta_path * theta_moves).sum(-1)
    from_x = (score.path * x_moves).sum((-2, -1))
    log_q_theta = sample.log_q_theta.detach() + (score.theta * theta_moves).sum(-1)
    log_q_x = sample.log_q_x.detach() + from_theta + from_x
    return sample._replace(
        log_q_theta=torch.where(steady, log_q_theta, sample.log_q_theta),
        log_q_x=torch.where(steady, log_q_x, sample.log_q_x),
    )


def find_score(q: VariationalPosterior, trace: Trace) -> Score:
    r"""Score of q at the draws of ``trace``, on its graph; no flow is run again or inverted.

    Through each flow z' = f(z, ϑ) with Jacobian J (Vaitl et al. 2022, for a sum of log q):

    .. math:: \nabla_{z'} = J^{-\top}(\nabla_z - \partial_z \log|J|), \qquad
        \nabla_\vartheta \mathrel{-}= \partial_\vartheta \log|J| + (\partial_\vartheta z')^\top
        \nabla_{z'}
    """
    vartheta, g = trace.sample.vartheta, q.masked(-trace.noise.path.permute(2, 1, 0))
    growth, outputs, weights = g.new_ones(()), [], []
    if trace.chain is not None:
        g = push_chain(trace.chain, g, q.mask)
    for flow, made in zip(q.flows(), trace.flows, strict=True):
        pushed = flow.push_score(made, g, q.mask, vartheta.requires_grad)
        g, outputs = pushed.after, outputs + pushed.outputs
        weights += [-w for w in pushed.weights]
        growth = growth * g.norm() / pushed.before.norm()
    if trace.chain is not None:
        g = g * torch.exp(-trace.chain.log_sd)
    by_theta = by_path = torch.zeros_like(vartheta)
    if vartheta.requires_grad:
        with torch.no_grad():
            by_theta = q.theta_flow.score(trace.noise.theta, trace.theta_steps)
    if outputs:  # their graph is kept
        options = {"retain_graph": True, "materialize_grads": True}
        (by_path,) = torch.autograd.grad(outputs, vartheta, weights, **options)
    return Score(by_theta, by_path, _to_x(q, trace.u, g.permute(2, 1, 0)), growth)


@torch.no_grad()
def _to_x(q: VariationalPosterior, u: Tensor, g: Tensor) -> Tensor:
    """The last step, x = h(u), which is one number at a time."""
    log_slope = q.to_range(u)[1]
    if not q.to_range.affine:
        g = g - torch.func.grad(lambda u: q.to_range(u)[1].expand_as(u).sum())(u)
    return g * torch.exp(-log_slope) * q.free
