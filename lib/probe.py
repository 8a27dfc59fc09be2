"""Door of the state-space model: tries a user's pieces on prior draws, and says what is wrong."""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from lib.sde import SDE

TOLERANCE, SINGULAR = 1e-8, 1e-14  # relative to the largest entry of β
HINTS = {
    "drift": "Index as x[..., 0], join with torch.stack([a1, a2], -1).",
    "diffusion": "Index as x[..., 0], join rows with torch.stack([b11, b12], -1) and the matrix "
    "with torch.stack([row1, row2], -2).",
    "diffusion_tril": "It is the lower Cholesky factor of diffusion.",
}


def parse_matrix(F: object) -> Tensor:
    """F as a float64 matrix."""
    try:
        matrix = torch.as_tensor(F, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(f"F must be a matrix of numbers; got {F!r}.") from err
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(
            f"F must have shape (p, m), states by observed components; got {tuple(matrix.shape)}."
        )
    if not matrix.isfinite().all():
        raise ValueError(f"F must be finite; got {matrix.tolist()}.")
    return matrix


def parse_sigma(sigma: object, num_observed: int) -> Callable | tuple[str | float, ...]:
    """sigma as a function, or as a tuple of 1 or m names and positive numbers."""
    if callable(sigma):
        return sigma
    several = isinstance(sigma, tuple | list)
    entries = tuple(sigma) if several else (sigma,)
    if several and len(entries) != num_observed:
        raise ValueError(
            f"sigma must have one entry for each column of F, {num_observed}; got {len(entries)}."
        )
    return tuple(entry if isinstance(entry, str) else _positive(entry) for entry in entries)


def _positive(value: object) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"sigma must be a number, a parameter name, a tuple of these or a function; got "
            f"{value!r}."
        ) from err
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"sigma must be positive and finite; got {number}.")
    return number


def check_declaration(sde: object) -> None:
    """Names and signs that an SDE declares."""
    if not isinstance(sde, SDE):
        raise TypeError(f"sde must be an instance of a subclass of SDE; got {sde!r}.")
    title = type(sde).__name__
    for role in ("state_names", "theta_names", "positive_theta", "positive_state"):
        names = getattr(sde, role)
        if role == "positive_state" and isinstance(names, bool):
            continue
        if not isinstance(names, tuple | list) or not all(isinstance(s, str) for s in names):
            raise ValueError(
                f"{role} of {title} must be a tuple of names; got {names!r}. One name needs a "
                'comma: ("a",).'
            )
        if len(set(names)) < len(names):
            raise ValueError(f"{role} of {title} must not repeat a name; got {names}.")
    if not sde.state_names:
        raise ValueError(f"state_names of {title} must name at least one state; got ().")
    for role, all_names in (("positive_theta", "theta_names"), ("positive_state", "state_names")):
        names = getattr(sde, role)
        unknown = () if isinstance(names, bool) else set(names) - set(getattr(sde, all_names))
        if unknown:
            raise ValueError(
                f"{role} of {title} must be among {all_names} {getattr(sde, all_names)}; got "
                f"{sorted(unknown)}."
            )


def check_names(
    F: Float[Tensor, "rows observed"],
    state_names: tuple[str, ...],
    sigma_names: tuple[str, ...],
    positive: Mapping[str, bool],
) -> None:
    """F against the states, and the parameters that σ names against their signs."""
    if F.shape[0] != len(state_names):
        raise ValueError(
            f"F must have one row for each of state_names {state_names}, ({len(state_names)}, "
            f"{F.shape[1]}); got {tuple(F.shape)}."
        )
    if not positive:
        raise ValueError("a model must have at least one parameter; got theta_names ().")
    signed = [name for name in sigma_names if not positive[name]]
    if signed:
        raise ValueError(f"sigma must name positive parameters; {signed} not in positive_theta.")


def check_prior(
    vartheta: Float[Tensor, "draws theta"], log_prior: Tensor, theta_names: tuple[str, ...]
) -> None:
    """Prior draws and their log densities."""
    broken = vartheta.isnan().any(0).tolist()
    if any(broken):
        names = [name for name, bad in zip(theta_names, broken, strict=True) if bad]
        raise ValueError(
            f"prior of a positive parameter must give positive values; got others for {names}. "
            "Take LogNormal or Gamma, or drop the name from positive_theta."
        )
    if log_prior.shape != vartheta.shape[:1] or not log_prior.isfinite().any():
        raise ValueError(
            f"prior must give a finite log density for each draw, shape ({len(vartheta)},); got "
            f"{tuple(log_prior.shape)}, {log_prior.flatten()[:3].tolist()}."
        )


def check_x0(sde: SDE, x0: Float[Tensor, "draws state"]) -> None:
    """Draws of x_0: some must be alive."""
    if not sde.alive(x0).any():
        positive = [s for s, flag in zip(sde.state_names, sde.positive_states, strict=True) if flag]
        raise ValueError(
            f"x0 must be above 0 for the positive states {positive}; got {x0[0].tolist()} for "
            f"state_names {sde.state_names}."
        )


def check_sigma(scale: Callable, named: Mapping[str, Tensor], num_observed: int) -> None:
    """σ on prior draws, named[name] of shape (mc, 1, 1)."""
    batch = (*next(iter(named.values())).shape[:-1], num_observed)
    rule = f"sigma must be positive and broadcast with (..., {num_observed}), here {batch}"
    try:
        sigma = scale(named)
        fits = _broadcasts(tuple(sigma.shape), batch)
    except Exception as err:
        raise ValueError(
            f"{rule}, from named parameters {tuple(named)}; it raised {type(err).__name__}: {err}."
        ) from err
    if not fits or not (sigma > 0).any():
        raise ValueError(f"{rule}; got {tuple(sigma.shape)}, {sigma.flatten()[:3].tolist()}.")


def check_sde(
    sde: SDE, theta: Float[Tensor, "draws theta"], x0: Float[Tensor, "draws state"]
) -> None:
    """Shapes as in training, (mc, time, p), and as in a simulation, (mc, p); then the values."""
    time = sde.num_states + sde.num_theta + 2
    t = torch.linspace(0.0, 1.0, time, dtype=torch.float64)[:, None]
    x = _nudged(x0, torch.tensor(sde.positive_states))
    flat = sde.aligned(t[-1], x, theta)
    full = sde.aligned(t, x[:, None], theta[:, None])
    p = sde.num_states
    for arguments in (flat, full):
        drift = _call(sde, "drift", arguments, (p,))
        beta = _call(sde, "diffusion", arguments, (p, p))
        tril = _call(sde, "diffusion_tril", arguments, (p, p))
    usable = sde.alive(full[1]) & drift.isfinite().all(-1)
    _require(usable.any(), "drift", "finite at x0 for at least one prior draw", drift, full)
    usable = usable & beta.isfinite().all((-2, -1))
    _require(usable.any(), "diffusion", "finite at x0 for at least one prior draw", beta, full)
    _check_beta(beta[usable], tril[usable], tuple(part[usable] for part in full))


def _check_beta(beta: Tensor, tril: Tensor, arguments: tuple[Tensor, ...]) -> None:
    """Symmetric and positive definite, and the factor is that of β."""
    size = beta.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(beta.dtype).tiny)
    unit = beta / size
    skew = (unit - unit.mT).abs().amax((-2, -1))
    _require(skew < TOLERANCE, "diffusion", "a symmetric matrix β", beta, arguments)
    lowest = torch.linalg.eigvalsh(unit)[..., 0]
    rule = "a positive definite matrix β (a covariance per unit time, not its square root)"
    _require(lowest > -TOLERANCE, "diffusion", rule, beta, arguments)
    # Vague priors make β singular to rounding in some draws; a valid model has others.
    factored = tril.isfinite().all((-2, -1)) & (tril.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    definite = factored & (lowest > SINGULAR)
    _require(definite.any(), "diffusion", rule, beta, arguments)
    error = (tril @ tril.mT - beta).abs() / size + tril.triu(1).abs()
    wrong = factored & (error.amax((-2, -1)) > 1e-6)
    rule = "the lower Cholesky factor of diffusion"
    _require(~wrong, "diffusion_tril", rule, tril, arguments)


def _require(
    passed: Tensor, name: str, rule: str, value: Tensor, arguments: tuple[Tensor, ...]
) -> None:
    """Refuses with the first case that did not pass."""
    if passed.all():
        return
    flat = passed.expand(arguments[1].shape[:-1]).flatten()
    case = int((~flat).nonzero()[0])
    t, x, theta = (part.flatten(0, -2)[case].tolist() for part in arguments)
    got = value.flatten(0, arguments[1].ndim - 2)[case].tolist()
    raise ValueError(f"{name} must be {rule}; got {got} at t = {t}, x = {x}, theta = {theta}.")


def _nudged(x0: Tensor, positive: Tensor) -> Tensor:
    """Points a percent around x_0, so that a mistake that vanishes at x_0 shows."""
    p = x0.shape[-1]
    shift = torch.linspace(-0.01, 0.01, len(x0), dtype=x0.dtype)[:, None]
    shift = shift * (1 + torch.arange(p, dtype=x0.dtype)) / p
    return torch.where(positive, x0 * shift.exp(), x0 + shift * (1 + x0.abs()))


def _call(sde: SDE, name: str, arguments: tuple[Tensor, ...], tail: tuple[int, ...]) -> Tensor:
    """Value of a user's function, detached and with the full batch."""
    sizes = ", ".join(
        f"{s} {tuple(part.shape)}" for s, part in zip(("t", "x", "theta"), arguments, strict=True)
    )
    batch = tuple(arguments[1].shape[:-1])
    # With gradients, as in training: a detour through numpy fails here and not an hour later.
    t, x, theta = arguments[0], *(part.detach().requires_grad_() for part in arguments[1:])
    try:
        value = getattr(sde, name)(t, x, theta)
    except Exception as err:
        raise ValueError(
            f"{name} of {type(sde).__name__} must accept {sizes}; it raised {type(err).__name__}: "
            f"{err}. {HINTS[name]}"
        ) from err
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must return a tensor; got {type(value).__name__}. {HINTS[name]}")
    shape = tuple(value.shape)
    fits = shape[len(shape) - len(tail) :] == tail and _broadcasts(shape[: -len(tail)], batch)
    if not fits:
        raise ValueError(
            f"{name} must return shape (..., {', '.join(map(str, tail))}), here {batch + tail} for "
            f"{sizes}; got {shape}. {HINTS[name]}"
        )
    return value.detach().to(x.dtype).expand(batch + tail)


def _broadcasts(shape: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    try:
        return tuple(torch.broadcast_shapes(shape, batch)) == batch
    except RuntimeError:
        return False
