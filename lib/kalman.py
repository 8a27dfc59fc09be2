"""Forward filter of the linear-Gaussian OU model (appendix C): log p(y | θ), exact and Euler."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Number = float | int | Float[Tensor, "..."]
LOG_2PI = math.log(2 * math.pi)
SERIES_BELOW = 1e-5  # where expm1(u)/u loses its derivative to rounding and three terms do not


class LinearGaussian(NamedTuple):
    """Transition x_i | x_{i-1} ~ N(φ x_{i-1} + b, q); time is 1 if all steps are alike."""

    phi: Float[Tensor, "*batch time"]
    b: Float[Tensor, "*batch time"]  # unit of x
    q: Float[Tensor, "*batch time"]  # unit of x squared


class FilterResult(NamedTuple):
    """log p(y | θ), and the laws N(a_i, c_i) of x_i given y up to t_i, for i = 1..N."""

    log_likelihood: Float[Tensor, "*batch"]
    means: Float[Tensor, "*batch time"]
    variances: Float[Tensor, "*batch time"]


def ou_transition(
    theta: Float[Tensor, "*batch theta"],
    dt: Number,
    exact: bool = True,
) -> LinearGaussian:
    r"""Transition of dX = θ1(θ2 − X)dt + θ3 dW over a step dt (section 3).

    Exact: :math:`\varphi = e^{-\theta_1 dt},\ b = \theta_2 (1 - \varphi),\
    q = \theta_3^2 (1 - \varphi^2) / (2 \theta_1)`, with the limit θ3²·dt as θ1 → 0.
    Euler-Maruyama (eq. 8): φ = 1 − θ1·dt, b = θ1θ2·dt, q = θ3²·dt.

    Args:
        theta: θ = (θ1, θ2, θ3) on the natural scale; units 1/time, x, x/√time.
        dt: One step, or the N steps t_i − t_{i-1} of an irregular grid (time,).
        exact: False gives the Euler-Maruyama transition.

    Raises:
        ValueError: If θ does not have 3 components, or a step is not positive.

    >>> ou_transition(torch.tensor([0.2, 5.0, 1.0]), 0.1).phi.shape
    torch.Size([1])
    """
    if theta.shape[-1] != 3:
        raise ValueError(
            f"theta must have 3 components (theta1, theta2, theta3); got size {theta.shape[-1]}."
        )
    theta1, theta2, theta3 = theta.double().split(1, dim=-1)
    step = _steps(dt).to(theta.device)
    rate = theta1 * step
    if not exact:
        return LinearGaussian(1 - rate, theta2 * rate, theta3.square() * step)
    decay = -torch.expm1(-rate)
    return LinearGaussian(
        torch.exp(-rate), theta2 * decay, theta3.square() * step * _mean_decay(2 * rate)
    )


def forward_filter(
    y: Float[Tensor, "..."],
    transition: LinearGaussian,
    a: Number,
    c: Number,
    sigma2: Number,
    y0: Number | None = None,
) -> FilterResult:
    r"""Log-likelihood and filtered laws for y_i = x_i + N(0, σ²), i = 1..N (appendix C).

    Forecast :math:`m = \varphi a + b,\ P = \varphi^2 c + q,\ y_i \sim N(m, P + \sigma^2)`;
    update :math:`K = P / (P + \sigma^2),\ a \leftarrow m + K (y_i - m),\ c \leftarrow (1 - K) P`.
    A missing y_i (NaN) is skipped: a = m, c = P. Runs in float64; batches of θ broadcast.

    Args:
        y: Observations at t_1..t_N, shape (time,); NaN = missing.
        transition: From :func:`ou_transition`; (..., 1) or (..., time).
        a: Mean of x_0; a number, or a tensor that broadcasts against the batch.
        c: Variance of x_0; 0 when x_0 is known.
        sigma2: Observation variance σ². 0 is allowed where the forecast has a variance itself.
        y0: Observation at t_0; it updates (a, c) and enters the likelihood. NaN = missing.

    Raises:
        ValueError: On sizes that do not fit, a negative variance, an infinite y, or σ² = 0 where
            the forecast of an observation would have variance 0.
    """
    y, a, c, sigma2 = (torch.as_tensor(v, dtype=torch.float64) for v in (y, a, c, sigma2))
    y0 = torch.as_tensor(math.nan if y0 is None else y0, dtype=torch.float64)
    transition = LinearGaussian(*(torch.as_tensor(v, dtype=torch.float64) for v in transition))
    _check_observations(y, y0)
    _check_steps(transition, len(y))
    _check_variances(transition, c, sigma2, y0)
    a, c = _spread(transition, a, c, sigma2, y0)
    phi, b, q = transition
    parts = (phi, phi.square(), b, q)
    phi, phi2, b, q = (part.expand(*part.shape[:-1], len(y)).unbind(-1) for part in parts)
    innovations, totals, means, variances = [], [], [], []
    # Whether y_i is there is read once: no masked arithmetic, and no gradient meets a NaN.
    present = [not bool(y0.isnan().all()), *(~y.isnan()).tolist()]
    for i, y_i in enumerate((y0, *y.unbind())):
        if i > 0:
            a = torch.addcmul(b[i - 1], phi[i - 1], a)
            # ff1: the printed state prior variance includes σ²; only the forecast of y has it.
            c = torch.addcmul(q[i - 1], phi2[i - 1], c)
        if present[i]:
            innovations.append(y_i - a)
            totals.append(c + sigma2)
            # ff3: the printed gain's numerator includes σ², so the gain is 1; K = P/(P + σ²).
            # Through 1 - K = σ²/(P + σ²) both lines stay exact where K rounds to 1.
            rest = sigma2 / totals[-1]
            a = torch.addcmul(y_i, rest, innovations[-1], value=-1)
            c = rest * c
        means.append(a)
        variances.append(c)
    log_likelihood = _log_normal(innovations, totals) if innovations else torch.zeros_like(a)
    # Stacked in front, then moved: contiguous copies, several times faster.
    means, variances = (torch.stack(v[1:]).movedim(0, -1) for v in (means, variances))
    return FilterResult(log_likelihood, means, variances.expand_as(means))


def simulate_linear_gaussian(
    transition: LinearGaussian,
    x0: Number,
    noise: Float[Tensor, "*batch time"],
) -> Float[Tensor, "..."]:
    """Path x_0..x_N, shape (..., N+1), from standard normal noise (..., N).

    x_i = φ x_{i-1} + b + √q·noise_i. With the exact transition this is the law of the SDE on the
    grid. x_0, the transition and the noise broadcast over their leading dimensions.

    Raises:
        ValueError: If the transition has neither 1 nor N steps.
    """
    num_steps = noise.shape[-1]
    _check_steps(transition, num_steps)
    x0 = torch.as_tensor(x0, dtype=noise.dtype, device=noise.device)
    phi, b, q = (part.expand(*part.shape[:-1], num_steps).unbind(-1) for part in transition)
    path = [x0]
    for i, noise_i in enumerate(noise.unbind(-1)):
        path.append(phi[i] * path[-1] + b[i] + q[i].sqrt() * noise_i)
    return torch.stack(torch.broadcast_tensors(*path), dim=-1)


def _mean_decay(u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """(1 − e^{−u})/u, the mean of e^{−us} over 0 < s < 1; 1 at u = 0."""
    near = u.abs() < SERIES_BELOW
    safe = torch.where(near, 1.0, u)
    return torch.where(near, 1 - u / 2 + u.square() / 6, -torch.expm1(-safe) / safe)


def _log_normal(innovations: list[Tensor], totals: list[Tensor]) -> Float[Tensor, "..."]:
    """Σ log N(innovation; 0, total), summed over the list."""
    total = torch.stack(totals)
    square = (torch.stack(innovations).square() / total).sum(0)
    return -0.5 * (square + total.log().sum(0) + len(totals) * LOG_2PI)


def _spread(
    transition: LinearGaussian, a: Tensor, c: Tensor, sigma2: Tensor, y0: Tensor
) -> tuple[Tensor, Tensor]:
    """(a, c) in the shape that they keep from the first step to the last."""
    shapes = [part.shape[:-1] for part in transition]
    try:
        # The variance does not depend on b, a or y0: a batch over those alone costs one recursion.
        spread_c = torch.broadcast_shapes(shapes[0], shapes[2], c.shape, sigma2.shape)
        return a.expand(torch.broadcast_shapes(shapes[1], a.shape, y0.shape, spread_c)), c.expand(
            spread_c
        )
    except RuntimeError as err:
        raise ValueError(
            f"batch sizes must broadcast; got phi, b, q {[tuple(s) for s in shapes]}, a "
            f"{tuple(a.shape)}, c {tuple(c.shape)}, sigma2 {tuple(sigma2.shape)} and y0 "
            f"{tuple(y0.shape)}."
        ) from err


def _steps(dt: Number) -> Float[Tensor, " time"]:
    step = torch.as_tensor(dt, dtype=torch.float64)
    if step.ndim > 1:
        raise ValueError(f"dt must be one step or (N,) steps; got shape {tuple(step.shape)}.")
    if not ((step > 0) & step.isfinite()).all():
        raise ValueError(f"dt must be positive and finite; got {dt}. It is t_i - t_(i-1).")
    return step.reshape(-1)


def _check_steps(transition: LinearGaussian, num_steps: int) -> None:
    for name, part in transition._asdict().items():
        if part.ndim == 0 or part.shape[-1] not in (1, num_steps):
            raise ValueError(
                f"transition.{name} must end in 1 or N = {num_steps} steps; got shape "
                f"{tuple(part.shape)}. Give ou_transition one dt, or one per step."
            )


def _check_observations(y: Tensor, y0: Tensor) -> None:
    if y.ndim != 1 or len(y) == 0:
        raise ValueError(f"y must be (N,) with N >= 1, from t_1 on; got shape {tuple(y.shape)}.")
    if y.isinf().any():
        raise ValueError(f"y must be finite, or NaN where missing; got {y[y.isinf()][0]:g}.")
    if not (y0.isfinite().all() or y0.isnan().all()):
        raise ValueError(f"y0 must be finite, or NaN (all of it) when missing; got {y0}.")


def _check_variances(transition: LinearGaussian, c: Tensor, sigma2: Tensor, y0: Tensor) -> None:
    for name, value in (("c", c), ("sigma2", sigma2)):
        if not (value >= 0).all():
            raise ValueError(f"{name} must not be negative; got {value.min():g}. It is a variance.")
    if (sigma2 == 0).any():
        if (transition.q == 0).any():
            raise ValueError("sigma2 must be positive where q = 0; got 0. y would have no density.")
        if (c == 0).any() and not y0.isnan().all():
            raise ValueError("sigma2 must be positive where c = 0 and y0 is given; got 0.")
