"""Copies of models, distributions and SDEs in another dtype or on another device."""

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint

from lib.sde import SDE


class Movable:
    """Marks a class whose tensors ``moved`` looks for."""


def moved(
    value: object,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    memo: dict | None = None,
) -> object:
    """Copy of a model, distribution or SDE with every floating tensor in it moved.

    Looks into lists, tuples, dicts, modules, torch distributions and transforms, SDEs (their class
    attributes too); anything else is shared. Distributions no longer validate their arguments.
    No gradient flows back: nothing of a model is trained, and a copy with one cannot be copied.
    """
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        dtype = dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=device, dtype=dtype, copy=True)
    if type(value) in (list, tuple):
        return type(value)(moved(item, dtype, device, memo) for item in value)
    if type(value) is dict:
        return {key: moved(item, dtype, device, memo) for key, item in value.items()}
    if not isinstance(value, Movable | Distribution | Transform | Constraint | SDE | nn.Module):
        return value
    # A transform and its inverse refer to each other, hence the memo.
    if id(value) not in memo:
        memo[id(value)] = twin = object.__new__(type(value))
        for name, item in {**_class_tensors(value), **vars(value)}.items():
            twin.__dict__[name] = moved(item, dtype, device, memo)
        if isinstance(value, Distribution):
            twin.__dict__["_validate_args"] = False
    return memo[id(value)]


def _class_tensors(value: object) -> dict[str, Tensor]:
    """Tensors that a user wrote as class attributes."""
    return {
        name: item
        for kind in reversed(type(value).__mro__)
        for name, item in vars(kind).items()
        if isinstance(item, Tensor)
    }
