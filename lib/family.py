"""Options of the variational family, with both presets."""

import math
from dataclasses import dataclass
from numbers import Integral, Real


@dataclass(frozen=True)
class Family:
    """Options of q; the defaults are the `study` preset, ``Family.paper()`` the other one.

    Attributes:
        receptive_field: Window k of each local IAF and of the features, in grid steps.
        num_flows: Number m of local IAFs; every second one runs backwards in time.
        hidden: Width of each hidden layer.
        layers: Hidden layers of each network.
        gate: ``"unbounded"`` z·exp(s) + μ, or ``"sigmoid"`` σz + (1 − σ)μ as printed.
        features: ``"centred"`` windows with masks and clocks, or ``"past"`` as printed.
        unit: Without the chain x = unit·h(z); 1 is the paper's.
        standardise_theta: Networks see (ϑ − loc)/scale instead of ϑ.
        taps: Linear paths whose weights depend on ϑ, in each local IAF.
        coupling: Same-time lower-triangular coupling for p > 1.
        base: Gauss-Markov chain above the local IAFs, the smoother of the linearised model.
        guided: Without local IAFs, the model's own steps steered to the data in place of the chain.
        theta_flows: IAF steps of q(ϑ).
        theta_hidden: Width of the two hidden layers of each.
    """

    receptive_field: int = 10
    num_flows: int = 3
    hidden: int = 32
    layers: int = 2
    gate: str = "unbounded"
    features: str = "centred"
    unit: float = 1.0
    standardise_theta: bool = True
    taps: bool = True
    coupling: bool = True
    base: bool = True
    guided: bool = False
    theta_flows: int = 3
    theta_hidden: int = 32

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def paper(cls, unit: float = 1.0) -> "Family":
        """The family as printed, but for the slips that the README lists."""
        return cls(
            receptive_field=10,
            num_flows=5,
            hidden=20,
            layers=5,
            gate="sigmoid",
            features="past",
            unit=unit,
            standardise_theta=False,
            taps=False,
            coupling=False,
            base=False,
        )


_LEAST = {"receptive_field": 1, "hidden": 1, "layers": 1, "theta_hidden": 1}
_LEAST |= {"num_flows": 0, "theta_flows": 0}
_SWITCHES = ("standardise_theta", "taps", "coupling", "base", "guided")
_CHOICES = {
    "gate": ("unbounded", "sigmoid"),
    "features": ("centred", "past"),
}


def check_options(options: object) -> None:
    """Refuses a family that cannot be built."""
    for name, allowed in _CHOICES.items():
        if getattr(options, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}; got {getattr(options, name)!r}.")
    if options.coupling and options.gate == "sigmoid":
        raise ValueError("coupling needs gate 'unbounded'; got 'sigmoid'. Set coupling=False.")
    if options.guided and not (options.base and options.num_flows == 0):
        raise ValueError(
            f"guided needs base=True and num_flows=0; got base={options.base!r}, "
            f"num_flows={options.num_flows!r}. Take lib.FitConfig.guided()."
        )
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more; got {value!r}.")
    for name in _SWITCHES:
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False; got {getattr(options, name)!r}.")
    if not isinstance(options.unit, Real) or not 0 < options.unit < math.inf:
        raise ValueError(f"unit must be a positive number; got {options.unit!r}.")
