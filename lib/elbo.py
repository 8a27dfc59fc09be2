"""The evidence lower bound with its named terms (eqs. 5, 14-16, slips corrected)."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from lib.data import Grid
from lib.posterior import Noise, VariationalPosterior
from lib.ssm import StateSpaceModel

# Graph-safe: fixed shapes, no sync with the device, no Python value that changes from step to step.


class Elbo(NamedTuple):
    """Monte Carlo estimate of the ELBO and its terms for each draw.

    ``log_q_theta`` and ``log_q_x`` are log densities, so they enter the value with a minus sign.
    """

    value: Float[Tensor, ""]
    log_prior: Float[Tensor, " mc"]
    log_x0: Float[Tensor, " mc"]
    log_transition: Float[Tensor, " mc"]
    log_observation: Float[Tensor, " mc"]
    log_q_theta: Float[Tensor, " mc"]
    log_q_x: Float[Tensor, " mc"]


def elbo(
    model: StateSpaceModel,
    q: VariationalPosterior,
    grid: Grid,
    noise: Noise,
    alpha: Float[Tensor, ""] | float = 1.0,
) -> Elbo:
    r"""ELBO :math:`E_q[\log p(\vartheta, x, y) - \alpha \log q(\vartheta) - \log q(x|\vartheta)]`.

    Args:
        model: The joint density.
        q: The variational posterior.
        grid: The data on the grid.
        noise: Standard normal noise; the estimate is a pure function of it.
        alpha: Tempering α of q(ϑ); 1 is no tempering.
    """
    sample = q(noise)
    joint = model.log_joint(sample.vartheta, sample.x, grid)
    value = joint.total - alpha * sample.log_q_theta - sample.log_q_x
    return Elbo(value.mean(), *joint, sample.log_q_theta, sample.log_q_x)
