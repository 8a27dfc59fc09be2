"""Black-box autoregressive density estimation for state-space models (Ryder et al. 2018)."""

from lib.agreement import Agreement, compare_fits
from lib.config import FitConfig
from lib.data import Observations, data_path, read_csv
from lib.diagnostics import Diagnostics, Marginals
from lib.family import Family
from lib.independence import IndependenceMHResult, independence_mh
from lib.kalman import (
    FilterResult,
    LinearGaussian,
    forward_filter,
    ou_transition,
    simulate_linear_gaussian,
)
from lib.mh import MHResult, random_walk_mh
from lib.posterior import VariationalPosterior
from lib.quadrature import QuadraturePosterior, ou_posterior
from lib.result import Draws, FitResult, Forecast, load_fit
from lib.sde import SDE, SIR, EulerMaruyama, OrnsteinUhlenbeck
from lib.ssm import GaussianObservation, StateSpaceModel
from lib.train import fit

__version__ = "0.1.0"

__all__ = [
    "SDE",
    "SIR",
    "Agreement",
    "Diagnostics",
    "Draws",
    "EulerMaruyama",
    "Family",
    "FilterResult",
    "FitConfig",
    "FitResult",
    "Forecast",
    "GaussianObservation",
    "IndependenceMHResult",
    "LinearGaussian",
    "MHResult",
    "Marginals",
    "Observations",
    "OrnsteinUhlenbeck",
    "QuadraturePosterior",
    "StateSpaceModel",
    "VariationalPosterior",
    "compare_fits",
    "data_path",
    "fit",
    "forward_filter",
    "independence_mh",
    "load_fit",
    "ou_posterior",
    "ou_transition",
    "random_walk_mh",
    "read_csv",
    "simulate_linear_gaussian",
]
