"""Path gradient of the ELBO: log q differentiated through its draws alone."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.network import pull_theta
from lib.posterior import Sample, Trace, VariationalPosterior

# A local IAF whose inverse is unstable (its taps have a root on the wrong side) makes the score
# grow exponentially along time. The mean of the path gradient is then right, its variance is not.
LARGEST_GROWTH = 100.0


class Score(NamedTuple):
    """Gradients at a draw, weights held: of log q(ϑ) by ϑ, of log q(x | ϑ) by ϑ and by x.

    ``growth`` is how much the local IAFs, all together, magnify the root mean square of the latter.
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
    with torch.no_grad():
        by_theta = q.theta_flow.score(trace.noise.theta, trace.theta_steps)
        g, by_seen = -trace.noise.path * q.free, torch.zeros_like(trace.seen)
    growth = g.new_ones(())
    for flow, made in zip(q.flows(), trace.flows, strict=True):
        pushed = flow.push_score(made, g, q.free)
        g, by_seen = pushed.after, by_seen - pushed.by_theta
        if flow.flow is not q.base:
            growth = growth * g.norm() / pushed.before.norm()
    # Chain rule through the standardisation of ϑ.
    by_path = pull_theta(trace.sample.vartheta, [trace.seen], [by_seen])
    return Score(by_theta, by_path, _to_x(q, trace.z, g), growth)


def _to_x(q: VariationalPosterior, z: Tensor, g: Tensor) -> Tensor:
    """The last step, x = h(loc + scale z), which is one number at a time."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        _, log_slope = q.to_state(z)
        # + 0 z: with a constant scale and h the identity, nothing here would depend on z.
        by_z = torch.autograd.grad((log_slope + 0.0 * z).sum(), z)[0]
    return ((g - by_z) * torch.exp(-log_slope.detach())) * q.free
