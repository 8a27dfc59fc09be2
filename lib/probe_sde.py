"""Door of the SDE: its drift a(t, x, θ) and diffusion β(t, x, θ) tried on prior draws."""

import inspect

import torch
from jaxtyping import Float
from torch import Tensor

from lib.probe import broadcasts
from lib.sde import SDE

TOLERANCE, SINGULAR = 1e-8, 1e-14  # relative to the largest entry of β
LOG_ORDINARY = 3.0  # |log θ| up to which nothing overflows
CONSTANTS = "make constants with x.new_tensor, and change no argument in place."
ARGUMENTS = ("t", "x", "theta")
HINTS = {
    "drift": f"Index as x[..., 0], join with torch.stack([a1, a2], -1), {CONSTANTS}",
    "diffusion": "Index as x[..., 0], join rows with torch.stack([b11, b12], -1) and the matrix "
    f"with torch.stack([row1, row2], -2), {CONSTANTS}",
    "diffusion_tril": "It is the lower Cholesky factor of diffusion.",
}
POSITIVE_HINT = "Is a name missing from positive_theta or positive_state?"


def check_sde(
    sde: SDE, theta: Float[Tensor, "draws theta"], x0: Float[Tensor, "draws state"]
) -> None:
    """Shapes as in a simulation, (mc, p), and as in training, (mc, time, p); then the values."""
    for name in ("drift", "diffusion"):
        _check_written(sde, name)
    p, d = sde.num_states, sde.num_theta
    t = torch.linspace(0.0, 1.0, p + d + 2, dtype=torch.float64)[:, None]
    x = _nudged(x0, torch.tensor(sde.positive_states))
    full = sde.aligned(t, x[:, None], theta[:, None])
    # The first draw is left out: what looks at a draw's place, or at other draws, gives it away.
    flat = sde.aligned(t[-1], x[1:], theta[1:])
    tails = {"drift": (p,), "diffusion": (p, p), "diffusion_tril": (p, p)}
    alone = {name: _call(sde, name, flat, tail) for name, tail in tails.items()}
    values = {name: _call(sde, name, full, tail) for name, tail in tails.items()}
    for name, value in values.items():
        _check_alone(name, alone[name], value[1:, -1])
    # At one time, away from t = 0, where a drift may be infinite.
    ordinary = (theta[:, :d].abs().log().abs() < LOG_ORDINARY).all(-1)[:, None] & (t[:, 0] == 1)
    usable = _finite(sde.alive(full[1]), ordinary, values, full)
    chosen = tuple(part[usable] for part in full)
    _check_beta(sde, values["diffusion"][usable], values["diffusion_tril"][usable], chosen)


def _check_written(sde: SDE, name: str) -> None:
    """The user's own function, with its arguments in order: another order may fit every shape."""
    function, title = getattr(sde, name), type(sde).__name__
    if getattr(function, "__func__", None) is getattr(SDE, name):
        tail = "(..., p)" if name == "drift" else "(..., p, p)"
        raise ValueError(
            f"{name} of {title} must be written; got none. {title} must define {name}(self, t, x, "
            f"theta) -> {tail}."
        )
    try:
        order = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no function of Python, or no function: calling it will tell
        return
    if set(order) == set(ARGUMENTS) and order != list(ARGUMENTS):
        raise ValueError(
            f"{name} of {title} must take (t, x, theta) in that order; got ({', '.join(order)})."
        )


def _finite(
    usable: Tensor, ordinary: Tensor, values: dict[str, Tensor], arguments: tuple[Tensor, ...]
) -> Tensor:
    """Cases where drift and β are finite: all with ordinary θ, and at least one of the rest."""
    for name in ("drift", "diffusion"):
        value = values[name]
        finite = value.isfinite().flatten(2).all(-1)
        rule = "finite at x0 for every θ of ordinary size"
        _require(finite | ~(usable & ordinary), name, rule, value, arguments, POSITIVE_HINT)
        usable = usable & finite
        rule = "finite at x0 for at least one prior draw"
        _require(usable.any(), name, rule, value, arguments)
    return usable


def _check_alone(name: str, alone: Tensor, together: Tensor) -> None:
    """A draw's value does not depend on other draws; most must agree, some may cancel to 0."""
    differs = (alone - together).abs() > 1e-6 * (alone.abs() + together.abs())
    if differs.flatten(1).any(1).double().mean() > 0.5:
        raise ValueError(
            f"{name} must be a function of each draw alone; got other values when the first of the "
            f"draws was left out. Index from the right, as theta[..., 0], and draw no noise in it."
        )


def _check_beta(sde: SDE, beta: Tensor, tril: Tensor, arguments: tuple[Tensor, ...]) -> None:
    """Symmetric and positive definite, and the factor is that of β."""
    size = beta.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(beta.dtype).tiny)
    unit = beta / size
    skew = (unit - unit.mT).abs().amax((-2, -1))
    _require(skew < TOLERANCE, "diffusion", "a symmetric matrix β", beta, arguments)
    lowest = torch.linalg.eigvalsh(unit)[..., 0]
    rule = "a positive definite matrix β (a covariance per unit time, not its square root)"
    _require(lowest > -TOLERANCE, "diffusion", rule, beta, arguments, POSITIVE_HINT)
    # Vague priors make β singular to rounding in some draws; a valid model has others.
    factored = tril.isfinite().all((-2, -1)) & (tril.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    definite = factored & (lowest > SINGULAR)
    _require(definite.any(), "diffusion", rule, beta, arguments, _noise_free(sde, unit))
    error = (tril @ tril.mT - beta).abs() / size + tril.triu(1).abs()
    wrong = factored & (error.amax((-2, -1)) > 1e-6)
    rule = "the lower Cholesky factor of diffusion"
    _require(~wrong, "diffusion_tril", rule, tril, arguments)


def _noise_free(sde: SDE, unit: Tensor) -> str:
    """Names the first state without noise of its own, given β scaled to largest entry 1."""
    sizes = range(1, sde.num_states + 1)
    lowest = [torch.linalg.eigvalsh(unit[..., :k, :k])[..., 0].amax() for k in sizes]
    k = next((k for k, value in enumerate(lowest) if value <= SINGULAR), sde.num_states - 1)
    beside = f" beside that of {sde.state_names[:k]}" if k else ""
    return (
        f"State '{sde.state_names[k]}' has no noise of its own{beside}: add a small variance to "
        "its diagonal entry, or leave it out of the state; F can observe sums of states."
    )


def _require(
    passed: Tensor,
    name: str,
    rule: str,
    value: Tensor,
    arguments: tuple[Tensor, ...],
    hint: str = "",
) -> None:
    """Refuses with the first case that did not pass."""
    if passed.all():
        return
    flat = passed.expand(arguments[1].shape[:-1]).flatten()
    case = int((~flat).nonzero()[0])
    t, x, theta = (part.flatten(0, -2)[case].tolist() for part in arguments)
    got = value.flatten(0, arguments[1].ndim - 2)[case].tolist()
    place = f"t = {t}, x = {x}, theta = {theta}"
    raise ValueError(f"{name} must be {rule}; got {got} at {place}. {hint}".rstrip())


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
            f"{str(err).rstrip('.')}. {HINTS[name]}"
        ) from err
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must return a tensor; got {type(value).__name__}. {HINTS[name]}")
    if not value.is_floating_point():
        raise ValueError(f"{name} must return real numbers; got {value.dtype}. Write 1.0 for 1.")
    shape = tuple(value.shape)
    fits = shape[len(shape) - len(tail) :] == tail and broadcasts(shape[: -len(tail)], batch)
    if not fits:
        raise ValueError(
            f"{name} must return shape (..., {', '.join(map(str, tail))}), here {batch + tail} for "
            f"{sizes}; got {shape}. {HINTS[name]}"
        )
    if not value.requires_grad and _differs(value, batch, tail):
        raise ValueError(
            f"{name} must be differentiable by x and theta; got values without a gradient that "
            "differ between draws. Leave out detach, no_grad, item and numpy."
        )
    return value.detach().to(x.dtype).expand(batch + tail)


def _differs(value: Tensor, batch: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    """Whether two draws have different values: then it depends on x or θ, and not on t alone."""
    whole = value.detach().nan_to_num().expand(batch + tail)
    return bool((whole != whole[:1]).any())
