"""Door of the state-space model: what a user hands in, refused with a sentence if it cannot fit."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from lib.bounds import Bounds
from lib.sde import SDE

LARGEST_OVERFLOW = 0.1  # share of the prior draws


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
            f"sigma must have one entry for each column of F, {num_observed}; got {len(entries)}. "
            "F has a row for each state, a column for each observed component: is it transposed?"
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


def check_declaration(sde: object, observation: object) -> None:
    """The two kinds of object, and the names and signs that an SDE declares."""
    if not hasattr(observation, "log_prob"):
        raise TypeError(f"observation must be a GaussianObservation; got {observation!r}.")
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
    """F and the names of the states; the parameters, and the signs of those that σ names."""
    if F.shape[0] != len(state_names):
        raise ValueError(
            f"F must have one row for each of state_names {state_names}, ({len(state_names)}, "
            f"{F.shape[1]}); got {tuple(F.shape)}. Is it transposed?"
        )
    if blind := (F == 0).all(0).nonzero()[:, 0].tolist():
        raise ValueError(
            f"each column of F must see a state; got zeros only in column {blind[0] + 1} of "
            f"{F.tolist()}. F has a row for each state, a column for each observed component."
        )
    if both := [name for name in state_names if name in positive]:
        raise ValueError(f"a state and a parameter must not share a name; got {both}. Rename one.")
    if not positive:
        raise ValueError("a model must have at least one parameter; got theta_names ().")
    signed = [name for name in sigma_names if not positive[name]]
    if signed:
        raise ValueError(f"sigma must name positive parameters; {signed} not in positive_theta.")


def check_size(
    role: str, distribution: Distribution, names: tuple[str, ...], names_role: str
) -> None:
    """A joint density: one entry for each name."""
    shape = tuple(distribution.batch_shape + distribution.event_shape)
    if shape != (len(names),):
        raise ValueError(
            f"{role} must have batch + event shape ({len(names)},), one entry for each of "
            f"{names_role} {names}; got {shape} from {type(distribution).__name__}."
        )


def check_keys(role: str, spec: Mapping, names: tuple[str, ...]) -> None:
    """A dict: each name, and no other."""
    if set(spec) != set(names):
        missing = [name for name in names if name not in spec]
        unknown = [name for name in spec if name not in names]
        raise ValueError(
            f"{role} must have exactly the keys {names}; got {tuple(spec)}. Missing: {missing}; "
            f"unknown: {unknown}."
        )


def check_univariate(role: str, distribution: object) -> None:
    """An entry of a dict of priors."""
    if not isinstance(distribution, Distribution):
        raise TypeError(
            f"{role} must be a torch distribution; got {distribution!r}. A known value belongs "
            "into the SDE, not into θ."
        )
    shape = tuple(distribution.batch_shape + distribution.event_shape)
    if shape != ():
        raise ValueError(f"{role} must be univariate, with shape (); got shape {shape}.")


def parse_x0(values: object, names: tuple[str, ...]) -> Float[Tensor, " state"]:
    """Fixed components of x_0 as float64."""
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"x0 must be numbers, a torch distribution, or a dict of them; got {values!r}."
        ) from err
    if tensor.shape != (len(names),):
        raise ValueError(
            f"x0 must have shape ({len(names)},), one entry for each of state_names {names}; got "
            f"{tuple(tensor.shape)}."
        )
    if not tensor.isfinite().all():
        raise ValueError(f"x0 must be finite; got {tensor.tolist()}.")
    return tensor


def check_prior(
    vartheta: Float[Tensor, "draws theta"],
    theta: Float[Tensor, "draws theta"],
    log_prior: Tensor,
    theta_names: tuple[str, ...],
) -> None:
    """Prior draws of ϑ, the same as θ, and their log densities."""
    broken = vartheta.isnan().any(0).tolist()
    if any(broken):
        names = [name for name, bad in zip(theta_names, broken, strict=True) if bad]
        raise ValueError(
            f"prior of a positive parameter must give positive values; got others for {names}. "
            "Take LogNormal or Gamma, or drop the name from positive_theta."
        )
    share = theta.isinf().double().mean(0).tolist()
    if max(share) > LARGEST_OVERFLOW:
        name = theta_names[share.index(max(share))]
        raise ValueError(
            f"prior must leave θ finite; got inf in {max(share):.0%} of the draws of '{name}'. On "
            "a logarithm a standard deviation of 10 already spans 17 powers of ten."
        )
    if log_prior.shape != vartheta.shape[:1] or not log_prior.isfinite().any():
        raise ValueError(
            f"prior must give a finite log density for each draw, shape ({len(vartheta)},); got "
            f"{tuple(log_prior.shape)}, {log_prior.flatten()[:3].tolist()}."
        )


def check_theta(theta: object, names: tuple[str, ...], bounds: Bounds) -> None:
    """θ to simulate from: a row a path, an entry a parameter, on the natural scale."""
    rule = f"theta must be a tensor (n, {len(names)}), a row for each path of {names}"
    if not isinstance(theta, Tensor):
        raise TypeError(f"{rule}; got {type(theta).__name__}.")
    if theta.ndim != 2 or theta.shape[1] != len(names):
        raise ValueError(f"{rule}; got {tuple(theta.shape)}.")
    check_bounds("theta", theta, names, bounds)


def check_count(n: object, least: int = 1, name: str = "n", hint: str = "") -> None:
    """A whole number, not too small."""
    if isinstance(n, bool) or not isinstance(n, Integral) or n < least:
        rule = f"{name} must be a whole number, {least} or more; got {n!r}. {hint}"
        raise ValueError(rule.rstrip())


def check_bounds(role: str, theta: Tensor, names: tuple[str, ...], bounds: Bounds) -> None:
    """Rows of θ: on the natural scale, each within its bounds."""
    wrong = (~bounds.contain(theta)).nonzero().tolist()
    if wrong:
        row, j = wrong[0]
        low, high = bounds.low[j].item(), bounds.high[j].item()
        raise ValueError(
            f"{role} must be on the natural scale, {names[j]} in ({low:g}, {high:g}); got "
            f"{theta[row].tolist()}."
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
        fits = broadcasts(tuple(sigma.shape), batch)
    except Exception as err:
        raise ValueError(
            f"{rule}, from named parameters {tuple(named)}; it raised {type(err).__name__}: {err}."
        ) from err
    if not fits or not (sigma > 0).any():
        raise ValueError(f"{rule}; got {tuple(sigma.shape)}, {sigma.flatten()[:3].tolist()}.")


def broadcasts(shape: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether a value of this shape can stand for a batch."""
    try:
        return tuple(torch.broadcast_shapes(shape, batch)) == batch
    except RuntimeError:
        return False
