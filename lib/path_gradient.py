"""Path gradient of the ELBO: log q differentiated through its draws alone."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.posterior import Noise, Sample, VariationalPosterior

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


def with_path_gradient(q: VariationalPosterior, noise: Noise, sample: Sample) -> Sample:
    r"""The same values, with log q differentiated only through ϑ and x (Roeder et al. 2017).

    The gradient of :math:`E_q[\log q]` loses its score term :math:`E_q[\nabla_\phi \log q_\phi]`,
    whose mean is 0 and whose variance stays when q reaches the posterior. What is left vanishes
    there, draw by draw. Where the score grows too much, this step keeps the plain gradient.
    """
    score = find_score(q, noise, sample.vartheta.detach())
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


def find_score(q: VariationalPosterior, noise: Noise, vartheta: Float[Tensor, "mc theta"]) -> Score:
    r"""Score of q at the draws that ``noise`` makes, without inverting a flow over time.

    Through each flow z' = f(z, ϑ) with Jacobian J (Vaitl et al. 2022, for a sum of log q):

    .. math:: \nabla_{z'} = J^{-\top}(\nabla_z - \partial_z \log|J|), \qquad
        \nabla_\vartheta \mathrel{-}= \partial_\vartheta \log|J| + (\partial_\vartheta z')^\top
        \nabla_{z'}
    """
    with torch.enable_grad():
        theta = vartheta.detach().requires_grad_()
        (by_theta,) = torch.autograd.grad(q.theta_flow.log_prob(theta).sum(), theta)
    seen = q.seen(vartheta).detach()
    z = noise.path * q.free
    g, by_seen, growth = -z, torch.zeros_like(seen), z.new_ones(())
    for flow in q.flows():
        z_in, seen_in = z.detach().requires_grad_(), seen.clone().requires_grad_()
        with torch.enable_grad():
            out, log_diag = flow(z_in, seen_in)
            out, log_det = out * q.free, (log_diag * q.free).sum()
        g = g - _gradient(log_det, z_in)
        with torch.no_grad():
            before, g = g, flow.solve_transposed(g, z_in, seen, q.free) * q.free
        if flow.flow is not q.base:
            growth = growth * g.norm() / before.norm()
        by_seen = by_seen - _gradient((out * g).sum() + log_det, seen_in)
        z = out.detach()
    return Score(by_theta, _to_theta(q, vartheta, by_seen), _to_x(q, z, g), growth)


def _gradient(value: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(value, by, retain_graph=True, materialize_grads=True)[0]


def _to_theta(q: VariationalPosterior, vartheta: Tensor, by_seen: Tensor) -> Tensor:
    """Chain rule through the standardisation of ϑ."""
    with torch.enable_grad():
        theta = vartheta.detach().requires_grad_()
        return torch.autograd.grad(q.seen(theta), theta, by_seen)[0]


def _to_x(q: VariationalPosterior, z: Tensor, g: Tensor) -> Tensor:
    """The last step, x = h(loc + scale z), which is one number at a time."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        _, log_slope = q.to_state(z)
        # + 0 z: with a constant scale and h the identity, nothing here would depend on z.
        by_z = torch.autograd.grad((log_slope + 0.0 * z).sum(), z)[0]
    return ((g - by_z) * torch.exp(-log_slope.detach())) * q.free
