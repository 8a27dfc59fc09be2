"""The evidence lower bound with its named terms (eqs. 5, 14-16, slips corrected)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lib.data import Grid
from lib.guided import Guide
from lib.path_gradient import with_path_gradient
from lib.posterior import Noise, VariationalPosterior
from lib.smoother import Chain, part_of
from lib.ssm import StateSpaceModel
from lib.weights import nan_is_no_mass

# Draws of q made at a time, where there are many, and path values: a long path takes memory.
CHUNK = 500
CHUNK_VALUES = 150_000
GUIDED_CHUNK = 4000

# Graph-safe: fixed shapes, no sync with the device, no Python value that changes from step to step.


class Elbo(NamedTuple):
    """Monte Carlo estimate of the ELBO and its terms for each draw.

    ``log_q_theta`` and ``log_q_x`` are log densities, so they enter the value with a minus sign.
    ``conditional`` is the bound of log p(x, y | ϑ) over the wide draws, in the value's units of one
    draw; it is 0 without them, and no part of the value.
    """

    value: Float[Tensor, ""]
    conditional: Float[Tensor, ""]
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
    path_gradient: bool = False,
    wide: int = 0,
) -> Elbo:
    r"""ELBO :math:`E_q[\log p(\vartheta, x, y) - \alpha \log q(\vartheta) - \log q(x|\vartheta)]`.

    Args:
        model: The joint density.
        q: The variational posterior.
        grid: The data on the grid.
        noise: Standard normal noise; the estimate is a pure function of it.
        alpha: Tempering α of q(ϑ); 1 is no tempering.
        path_gradient: Differentiate log q through the draws alone; the value is the same.
        wide: How many draws, the last ones, train q(x | ϑ) alone, at ϑ further out.
    """
    if path_gradient:
        sample = with_path_gradient(q, q.trace(noise, wide))
    else:
        sample = q(noise, wide)
    joint = model.log_joint(sample.vartheta, sample.x, grid)
    value = joint.total - sample.log_q_x
    inner = len(value) - wide
    conditional = value[inner:] - joint.log_prior[inner:]
    value = value[:inner] - alpha * sample.log_q_theta[:inner]
    return Elbo(
        value.mean(),
        conditional.sum() / inner,
        *(term[:inner] for term in (*joint, sample.log_q_theta, sample.log_q_x)),
    )


def chunk_size(q: VariationalPosterior) -> int:
    """Draws made at a time: at most CHUNK, with at most CHUNK_VALUES values of their paths.

    Guided steps, one time after the other, are the faster the more draws take them together.
    """
    if q.family.guided:
        return min(GUIDED_CHUNK, q.chain_batch)
    return max(1, min(CHUNK, CHUNK_VALUES // q.loc0.numel()))


def in_chunks(
    q: VariationalPosterior, vartheta: Float[Tensor, "mc theta"]
) -> Iterator[tuple[Tensor, Chain | Guide | None]]:
    """Parts of ϑ small enough for their paths, with their chains, made for many at a time."""
    size = chunk_size(q)
    for many in vartheta.split(max(1, q.chain_batch // size) * size):
        chain = q.chain(many)
        for first in range(0, len(many), size):
            rows = slice(first, first + size)
            yield many[rows], None if chain is None else part_of(chain, rows)


@torch.no_grad()
def log_ratio(
    model: StateSpaceModel,
    q: VariationalPosterior,
    grid: Grid,
    vartheta: Float[Tensor, "mc theta"],
    generator: torch.Generator,
    common: int = 0,
) -> Float[Tensor, " mc"]:
    """log p(ϑ, x, y) − log q(x | ϑ) at any ϑ, with one path drawn for each, in chunks.

    With ``common`` it is the log mean over so many paths, of noise that all ϑ share: how it differs
    from ϑ to ϑ is then less noisy, and all are off by about the same.
    """
    shared, values = q.draw_path_noise(common, generator), []
    for part, chain in in_chunks(q, vartheta):
        noises = [z.expand(len(part), -1, -1) for z in shared]
        ratios = []
        for noise in noises or [q.draw_path_noise(len(part), generator)]:
            x, log_q_x = q.path(noise, part, chain)
            ratios.append(model.log_joint(part, x, grid).total - log_q_x)
        values.append(torch.logsumexp(nan_is_no_mass(torch.stack(ratios)), 0))
    return torch.cat(values) - math.log(max(common, 1))
