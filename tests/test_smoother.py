"""The smoother against the dense normal that it stands for."""

import pytest
import torch
from torch import Tensor

from lib.gauss_markov import run_chain
from lib.smoother import Chain, Readings, Transitions, part_of, smooth

T, MC = 6, 3


def example(p: int, m: int, noise: float = 0.3) -> tuple[Transitions, Readings]:
    """A random model for each of a batch, with readings missing at some times."""
    g = torch.Generator().manual_seed(10 * p + m)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    root = rand(T, p, p, MC)
    Q = torch.einsum("tijn,tkjn->tikn", root, root) + 0.1 * torch.eye(p).double()[None, ..., None]
    model = Transitions(0.7 * rand(T, p, p, MC), rand(T, p, MC), Q)
    seen = [[], list(range(m)), [m - 1], [], list(range(m)), [0]]
    r = noise * (0.5 + torch.rand(m, MC, generator=g, dtype=torch.float64))
    return model, Readings(rand(T, m), rand(T, m, p), r, seen)


def dense(model: Transitions, data: Readings, k: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the whole path given the data, ϑ number k."""
    p = model.c.shape[1]
    step = torch.eye(T * p, dtype=torch.float64)
    for i in range(1, T):
        step[i * p : (i + 1) * p, (i - 1) * p : i * p] = -model.F[i, ..., k]
    inverse = torch.linalg.inv(step)
    mean = inverse @ model.c[..., k].flatten()
    cov = inverse @ torch.block_diag(*model.Q[..., k]) @ inverse.T
    for i, seen in enumerate(data.seen):
        for j in seen:
            h = torch.zeros(T * p, dtype=torch.float64)
            h[i * p : (i + 1) * p] = data.H[i, j]
            gain = cov @ h / (h @ cov @ h + data.r[j, k])
            mean = mean + gain * (data.y[i, j] - h @ mean)
            cov = cov - torch.outer(gain, h @ cov)
    return mean, cov


def law(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of u that a chain draws, from the images of unit noise."""
    p = chain.mean.shape[0]
    unit = torch.eye(T * p, dtype=torch.float64).reshape(T, p, T * p).permute(1, 0, 2)
    alone = Chain(*(part[..., k : k + 1].expand(*part.shape[:-1], T * p) for part in chain))
    v = alone.log_sd.exp() * run_chain(alone, unit)
    root = v.permute(1, 0, 2).reshape(T * p, T * p)
    return chain.mean[..., k].T.flatten(), root @ root.T


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_mean_and_covariance_are_those_of_the_dense_normal(p: int, m: int) -> None:
    model, data = example(p, m)
    chain = smooth(model, data)
    for k in range(MC):
        for found, right in zip(law(chain, k), dense(model, data, k), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_v_has_unit_variance_and_log_diag_is_the_log_determinant(p: int) -> None:
    model, data = example(p, 2)
    chain = smooth(model, data)
    for k in range(MC):
        cov = dense(model, data, k)[1]
        sd = chain.log_sd[..., k].T.flatten().exp()
        torch.testing.assert_close(sd, cov.diagonal().sqrt(), rtol=1e-9, atol=1e-12)
        half = (chain.log_diag + chain.log_sd)[..., k].sum()
        torch.testing.assert_close(half, 0.5 * torch.linalg.slogdet(cov)[1], rtol=1e-8, atol=1e-8)


def log_normal(x: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    return torch.distributions.MultivariateNormal(mean, cov).log_prob(x)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_any_path_gives_the_log_evidence(p: int) -> None:
    """log p(u) + log p(y | u) − log q(u), the terms of p one by one and q from the chain alone."""
    model, data = example(p, 2)
    chain = smooth(model, data)
    z = torch.randn(p, T, MC)
    u = (chain.mean + chain.log_sd.exp() * run_chain(chain, z)).permute(2, 1, 0)
    log_q = torch.distributions.Normal(0.0, 1.0).log_prob(z) - chain.log_diag - chain.log_sd
    none = data._replace(seen=[[]] * T)
    for k in range(MC):
        value = log_normal(u[k, 0], model.c[0, :, k], model.Q[0, ..., k]) - log_q[..., k].sum()
        for i in range(1, T):
            ahead = model.F[i, ..., k] @ u[k, i - 1] + model.c[i, :, k]
            value += log_normal(u[k, i], ahead, model.Q[i, ..., k])
        read = torch.stack([data.H[i, j] @ u[k, i] for i, j in pairs(data)])
        y, r = torch.stack([torch.stack((data.y[i, j], data.r[j, k])) for i, j in pairs(data)]).T
        value += log_normal(y, read, r.diag())
        mean, cov = dense(model, none, k)
        rows = torch.zeros(len(y), T, p)
        for row, (i, j) in zip(rows, pairs(data), strict=True):
            row[i] = data.H[i, j]
        H = rows.flatten(1)
        right = log_normal(y, H @ mean, H @ cov @ H.T + r.diag())
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-8)


def pairs(data: Readings) -> list[tuple[int, int]]:
    """(time, component) of each reading."""
    return [(i, j) for i, seen in enumerate(data.seen) for j in seen]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("noise", [1e-30, 1e-40])
def test_a_reading_without_noise_pins(p: int, m: int, noise: float) -> None:
    """Kills a factor without its floor, where what is left of a variance rounds to below 0."""
    model, data = example(p, m, noise)
    chain = smooth(model, data)
    assert all(part.isfinite().all() for part in chain)
    u = chain.mean + chain.log_sd.exp() * run_chain(chain, torch.randn(p, T, MC))
    for i, j in pairs(data):
        for path, atol in ((chain.mean, 1e-10), (u, 1e-4)):
            read = data.H[i, j] @ path[:, i]
            torch.testing.assert_close(read, data.y[i, j].expand(MC), rtol=0, atol=atol)


def test_little_noise_leaves_its_own_variance() -> None:
    """Kills the plain form of the update, which leaves what the subtraction rounds to."""
    model, data = example(1, 1, noise=1e-24)
    chain = smooth(model, data)
    for i, j in pairs(data):
        right = 0.5 * data.r[j].log() - data.H[i, j, 0].abs().log()
        torch.testing.assert_close(chain.log_sd[0, i], right, rtol=0, atol=1e-4)


def test_what_is_known_at_first_stays_known() -> None:
    model, data = example(2, 1)
    Q = model.Q.clone()
    Q[0, 0], Q[0, :, 0] = 0.0, 0.0
    chain = smooth(model._replace(Q=Q), data)
    torch.testing.assert_close(chain.mean[0, 0], model.c[0, 0])
    assert (chain.log_sd[0, 0] < -100).all() and chain.log_sd[1, 0].isfinite().all()


def test_part_of_a_chain_is_that_of_its_draws() -> None:
    model, data = example(2, 2)
    part = part_of(smooth(model, data), slice(1, 3))
    alone = smooth(Transitions(*(x[..., 1:] for x in model)), data._replace(r=data.r[:, 1:]))
    listed = part_of(smooth(model, data), torch.tensor([1, 2]))
    for found, right, other in zip(part, alone, listed, strict=True):
        torch.testing.assert_close(found, right)
        assert torch.equal(found, other)
