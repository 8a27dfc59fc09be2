"""Options of the variational family, with both presets."""

from dataclasses import dataclass


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
        scaling: ``"learned"`` loc and scale per time, or ``"constant"``: one unit for all.
        unit: That unit: x = unit·h(z); 1 is the paper's.
        standardise_theta: Networks see (ϑ − loc)/scale instead of ϑ.
        taps: Linear paths whose weights depend on ϑ, in the base and in each local IAF.
        coupling: Same-time lower-triangular coupling for p > 1.
        base: Gauss-Markov base below the local IAFs.
        theta_flows: IAF steps of q(ϑ).
        theta_hidden: Width of the two hidden layers of each.
    """

    receptive_field: int = 10
    num_flows: int = 3
    hidden: int = 20
    layers: int = 2
    gate: str = "unbounded"
    features: str = "centred"
    scaling: str = "learned"
    unit: float = 1.0
    standardise_theta: bool = True
    taps: bool = True
    coupling: bool = True
    base: bool = True
    theta_flows: int = 3
    theta_hidden: int = 32

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        if self.coupling and self.gate == "sigmoid":
            raise ValueError("coupling needs gate 'unbounded'; got 'sigmoid'. Set coupling=False.")
        for name in ("receptive_field", "hidden", "layers", "theta_hidden", "unit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        for name in ("num_flows", "theta_flows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}.")

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
            scaling="constant",
            unit=unit,
            standardise_theta=False,
            taps=False,
            coupling=False,
            base=False,
        )


_CHOICES = {
    "gate": ("unbounded", "sigmoid"),
    "features": ("centred", "past"),
    "scaling": ("learned", "constant"),
}
