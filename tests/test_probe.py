"""The door of the state-space model: each piece that does not fit is refused with a sentence."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Gamma,
    Independent,
    LogNormal,
    MultivariateNormal,
    Normal,
    Poisson,
    TransformedDistribution,
    Uniform,
)

from lib.bounds import Bounds
from lib.probe import check_count, check_declaration, check_theta
from lib.sde import SDE, SIR, OrnsteinUhlenbeck
from lib.ssm import GaussianObservation, StateSpaceModel

NAN = math.nan


class Pair(SDE):
    """A user's SDE with two states and two parameters, one of each positive."""

    state_names, theta_names = ("level", "size"), ("pull", "noise")
    positive_theta, positive_state = ("noise",), ("size",)

    def drift(self, t, x, theta):
        return theta[..., :1] * x

    def diffusion(self, t, x, theta):
        return theta[..., 1:, None] * (torch.diag_embed(x.square()) + 0.5)


def ou_model(prior=None, sigma=1.0):
    prior = prior or Normal(torch.zeros(3), 10 * torch.ones(3))
    return StateSpaceModel(OrnsteinUhlenbeck(), GaussianObservation([[1.0]], sigma), prior, [20.0])


def sir_model(F=((0.0,), (1.0,)), x0=(762.0, 1.0)):
    prior = Normal(torch.zeros(2), torch.ones(2))
    return StateSpaceModel(SIR(), GaussianObservation(F, 1.0), prior, x0)


def with_sde(**changes):
    """A two-state model with some attributes of its SDE replaced."""
    sde = type("Mine", (Pair,), changes)()
    d = sde.num_theta
    return StateSpaceModel(
        sde, GaussianObservation([[1.0], [0.0]], 1.0), Normal(torch.zeros(d), torch.ones(d)),
        [1.0, 2.0],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (Normal(torch.zeros(2), torch.ones(2)),
         r"prior must have .*shape \(3,\).*theta_names \('theta1', 'theta2', 'theta3'\); got \(2,\)"
         r" from Normal"),
        (Normal(0.0, 1.0), r"prior must have .*shape \(3,\).*got \(\) from Normal"),
        (MultivariateNormal(torch.zeros(4), torch.eye(4)), r"prior .*\(3,\).*got \(4,\)"),
        (Independent(Normal(torch.zeros(5, 3), 1.0), 1), r"prior .*\(3,\).*got \(5, 3\)"),
        ({"theta1": Gamma(1.0, 1.0)}, r"prior must have exactly the keys .*got \('theta1',\)"),
        (dict.fromkeys(("theta1", "theta2", "theta3", "sd"), Gamma(1.0, 1.0)),
         r"prior must have exactly the keys .*'theta3'\); got .*'sd'\)"),
        (dict.fromkeys(("theta1", "theta2", "theta3"), Normal(-5.0, 1.0)),
         r"prior of a positive parameter must give positive values; got others for \['theta1', "
         r"'theta3'\]. Take LogNormal or Gamma"),
        ({"theta1": Gamma(1.0, 1.0), "theta2": Normal(torch.zeros(2), 1.0),
          "theta3": Gamma(1.0, 1.0)}, r"prior\['theta2'\] must be univariate.*got shape \(2,\)"),
    ],
)  # fmt: skip
def test_prior_that_does_not_fit_is_refused(prior, message):
    with pytest.raises(ValueError, match=message):
        ou_model(prior)


@pytest.mark.parametrize(
    ("name", "prior", "message"),
    [
        ("noise", Uniform(-2.0, -1.0), r"prior\['noise'\] must have mass in \(0, inf\); got \(-2"),
        ("noise", Poisson(3.0), r"prior\['noise'\] must have a density on an interval"),
        ("noise", Uniform(-1.0, 1.0), r"positive values; got others for \['noise'\]"),
        ("noise", Normal(3.0, 1.0), r"positive values; got others for \['noise'\]"),
    ],
)  # fmt: skip
def test_prior_without_mass_where_the_parameter_can_be_is_refused(name, prior, message):
    priors = {"pull": Normal(0.0, 1.0), "noise": LogNormal(0.0, 1.0), name: prior}
    with pytest.raises(ValueError, match=message):
        StateSpaceModel(Pair(), GaussianObservation([[1.0], [0.0]], 1.0), priors, [1.0, 2.0])


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (LogNormal(torch.zeros(3), 1.0), r"prior of ϑ must reach .*got \(0, inf\).*ϑ is the log"),
        (Independent(Uniform(torch.zeros(3), 1.0), 1), r"prior of ϑ must .*got \(0, 1\)"),
        (Normal(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 1000.0])),
         r"prior must leave θ finite; got inf in 2\d% of the draws of 'theta3'. On a logarithm"),
    ],
)  # fmt: skip
def test_prior_on_the_wrong_scale_is_refused(prior, message):
    """A prior of θ in place of one of ϑ; and one of log θ so wide that exp overflows."""
    with pytest.raises(ValueError, match=message):
        ou_model(prior)


def test_prior_of_which_torch_does_not_know_the_support_is_tried_on_draws():
    """A scaled log-normal, whose support torch takes for the whole line, and a user's own law."""

    class Mine(Gamma):
        @property
        def support(self):
            raise NotImplementedError

    scaled = TransformedDistribution(LogNormal(0.0, 1.0), AffineTransform(0.0, 2.0))
    ou_model({"theta1": scaled, "theta2": Normal(0.0, 1.0), "theta3": Mine(2.0, 1.0)})


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([1.0, 2.0, 3.0], r"prior must be a torch distribution over ϑ, or a dict.*got list"),
        ({"theta1": 0.2, "theta2": Normal(0.0, 1.0), "theta3": Gamma(1.0, 1.0)},
         r"prior\['theta1'\] must be a torch distribution; got 0.2. A known value belongs"),
    ],
)  # fmt: skip
def test_prior_of_another_type_is_refused(prior, message):
    with pytest.raises(TypeError, match=message):
        ou_model(prior)


@pytest.mark.parametrize(
    ("x0", "message"),
    [
        ((762.0,), r"x0 must have shape \(2,\).*state_names \('S', 'I'\); got \(1,\)"),
        (torch.ones(2, 2), r"x0 must have shape \(2,\).*got \(2, 2\)"),
        ((762.0, NAN), r"x0 must be finite; got \[762.0, nan\]"),
        ((763.0, 0.0), r"x0 must be above 0 for the positive states \['S', 'I'\]; got \[763.0, 0"),
        (Normal(torch.zeros(3), 1.0), r"x0 must have .*shape \(2,\).*state_names.*got \(3,\)"),
        (Normal(torch.tensor([-9.0, -9.0]), 1.0), r"x0 must be above 0 for the positive states"),
        (Uniform(torch.tensor([-9.0, -9.0]), 0.0), r"x0 must have mass in \(0, inf\); got \(-9, 0"),
        ({"S": 762.0, "I": Uniform(-9.0, -1.0)}, r"x0\['I'\] must have mass in .*got \(-9, -1\)"),
        ({"S": 762.0}, r"x0 must have exactly the keys \('S', 'I'\); got .*Missing: \['I'\]"),
        ({"S": 762.0, "I": -1.0}, r"x0 must be above 0 for the positive states"),
        ({"S": 762.0, "I": Normal(torch.ones(2), 1.0)}, r"x0\['I'\] must be univariate.*\(2,\)"),
    ],
)  # fmt: skip
def test_x0_that_does_not_fit_is_refused(x0, message):
    with pytest.raises(ValueError, match=message):
        sir_model(x0=x0)


@pytest.mark.parametrize("x0", [None, "one", {"S": 762.0, "I": "one"}])
def test_x0_of_another_type_is_refused(x0):
    with pytest.raises(TypeError, match=r"x0 must be numbers, a torch distribution, or a dict"):
        sir_model(x0=x0)


@pytest.mark.parametrize(
    ("F", "error", "message"),
    [
        ([[1.0]], ValueError,
         r"F must have one row for each of state_names \('S', 'I'\), \(2, 1\); got \(1, 1\)"),
        ([[0.0, 1.0]], ValueError, r"F must have one row .* \(2, 2\); got \(1, 2\)"),
        ([0.0, 1.0], ValueError, r"F must have shape \(p, m\).*got \(2,\)"),
        ([[0.0], [NAN]], ValueError, r"F must be finite; got"),
        ("I", TypeError, r"F must be a matrix of numbers; got 'I'"),
    ],
)  # fmt: skip
def test_F_that_does_not_fit_is_refused(F, error, message):
    with pytest.raises(error, match=message):
        sir_model(F)


@pytest.mark.parametrize(
    ("sigma", "error", "message"),
    [
        (0.0, ValueError, r"sigma must be positive and finite; got 0.0"),
        (-1, ValueError, r"sigma must be positive and finite; got -1"),
        (math.inf, ValueError, r"sigma must be positive and finite; got inf"),
        ((1.0, "s"), ValueError, r"sigma must have one entry for each column of F, 1; got 2"),
        (None, TypeError, r"sigma must be a number, a parameter name.*got None"),
        ("theta2", ValueError, r"sigma must name positive parameters; \['theta2'\] not in posit"),
        (lambda named: named["theta9"], ValueError, r"sigma .*theta3'\); it raised KeyError"),
        (lambda named: -named["theta1"], ValueError, r"sigma must be positive.*got \(72, 1, 1\)"),
        (lambda named: torch.ones(2), ValueError, r"broadcast with \(..., 1\).*got \(2,\)"),
        (lambda named: 1.0, ValueError, r"sigma must be positive .*; it raised "),
    ],
)
def test_sigma_that_does_not_fit_is_refused(sigma, error, message):
    with pytest.raises(error, match=message):
        ou_model(sigma=sigma)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_names": "ab"}, r"state_names of Mine must be a tuple of names; got 'ab'. One"),
        ({"state_names": ("a", "a")}, r"state_names of Mine must not repeat a name"),
        ({"state_names": (), "positive_state": False}, r"state_names of Mine must name at least"),
        ({"positive_theta": "noise"}, r"positive_theta of Mine must be a tuple of names; got 'noi"),
        ({"positive_theta": ("noice",)},
         r"positive_theta of Mine must be among theta_names \('pull', 'noise'\); got \['noice'\]"),
        ({"positive_state": ("weight",)},
         r"positive_state of Mine must be among state_names \('level', 'size'\); got \['weight'\]"),
        ({"theta_names": (), "positive_theta": ()}, r"at least one parameter"),
        ({"theta_names": ("size", "noise")}, r"must not share a name; got \['size'\]. Rename one"),
    ],
)  # fmt: skip
def test_declaration_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        with_sde(**changes)


def test_a_matrix_in_place_of_an_observation_is_refused():
    with pytest.raises(TypeError, match=r"observation must be a GaussianObservation; got \[\["):
        check_declaration(SIR(), [[0.0], [1.0]])


def test_a_class_in_place_of_an_sde_is_refused():
    with pytest.raises(TypeError, match=r"sde"):
        prior = Normal(torch.zeros(2), torch.ones(2))
        StateSpaceModel(SIR, GaussianObservation([[0.0], [1.0]], 1.0), prior, [1.0, 1.0])


BAD_DRIFTS = {
    "one component, p = 2": (lambda t, x, theta: x[..., :1],
                             r"drift must return shape \(..., 2\), here \(71, 2\).*got \(71, 1\)"),
    "indexed from the left": (lambda t, x, theta: torch.stack([x[0], x[1]], -1),
                              r"drift must return shape .*got \(2, 2\). Index as x\[..., 0\]"),
    "stacked in front": (lambda t, x, theta: torch.stack([x[..., 0], x[..., 1]]),
                         r"drift must return shape \(..., 2\), here .*got \(2, 71\)"),
    "for one simulation only": (lambda t, x, theta: torch.stack([x[:, 0], x[:, 1]], 1),
                                r"drift must return shape .*\(72, 6, 2\).*x \(72, 6, 2\).*got"),
    "a list": (lambda t, x, theta: [x[..., 0], x[..., 1]], r"drift must return a tensor; got list"),
    "nothing": (lambda t, x, theta: None, r"drift must return a tensor; got NoneType"),
    "an error": (lambda t, x, theta: x @ torch.ones(3, 2),
                 r"drift of Mine must accept t \(71, 1\), x \(71, 2\), theta \(71, 2\); it raised "
                 r"RuntimeError"),
    "a detour": (lambda t, x, theta: torch.tensor(x.numpy()),
                 r"drift of Mine must accept .*it raised RuntimeError: Can't call numpy"),
    "never finite": (lambda t, x, theta: x / 0.0, r"drift must be finite at x0 .*got \[inf, inf\]"),
    "an array": (lambda t, x, theta: x.detach().numpy(), r"drift must return a tensor; got nda"),
    "columns": (lambda t, x, theta: x[..., None], r"drift must return shape .*got \(71, 2, 1\)"),
    "single precision": (lambda t, x, theta: x @ torch.eye(2, dtype=torch.float32),
                         r"drift of Mine .*same dtype.*make constants with x.new_tensor"),
    "in place": (lambda t, x, theta: x.mul_(2.0),
                 r"drift of Mine .*in-place operation. Index .*change no argument in place."),
    "t as a state": (lambda t, x, theta: torch.stack([t, x[..., 0]], -1),
                     r"drift of Mine .*got \[71, 1\] at entry 0 and \[71\] at entry 1. Index as x"),
    "a parameter too many": (lambda t, x, theta: theta[..., 2] * x,
                             r"drift of Mine .*theta \(71, 2\); it raised IndexError: index 2 is"),
    "the first draw's θ": (lambda t, x, theta: theta[0] * x,
                           r"drift must be a function of each draw alone.*Index from the right"),
    "a mean over draws": (lambda t, x, theta: x - x.mean(0), r"drift must be a function of each"),
    "noise": (lambda t, x, theta: x + torch.randn_like(x), r"drift must be .*draw no noise in it"),
    "finite for some θ": (lambda t, x, theta: theta[..., :1].sqrt() * x,
                          r"drift must be finite at x0 for every θ of ordinary size; got \[nan, "
                          r"nan\].*theta = \[-.*Is a name missing from positive_theta or positive"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DRIFTS)
def test_drift_that_does_not_fit_is_refused(name):
    drift, message = BAD_DRIFTS[name]
    with pytest.raises(ValueError, match=message):
        with_sde(drift=lambda self, t, x, theta: drift(t, x, theta))


def test_the_error_of_a_user_is_kept_as_the_cause():
    def drift(self, t, x, theta):
        raise KeyError("rate")

    with pytest.raises(ValueError, match=r"drift of Mine .*it raised KeyError: 'rate'") as caught:
        with_sde(drift=drift)
    assert isinstance(caught.value.__cause__, KeyError)


def matrix(b11, b12, b21, b22):
    return torch.stack([torch.stack([b11, b12], -1), torch.stack([b21, b22], -1)], -2)


BAD_DIFFUSIONS = {
    "a vector": (lambda x: x.square(),
                 r"diffusion must return shape \(..., 2, 2\), here \(71, 2, 2\).*got \(71, 2\)"),
    "axes in front": (lambda x: torch.stack([torch.stack([x[..., 0]] * 2)] * 2),
                      r"diffusion must return shape \(..., 2, 2\), here .*got \(2, 2, 71\). Index"),
    "not symmetric": (lambda x: matrix(x[..., 0], 0 * x[..., 0], x[..., 0] * 0.1, x[..., 1]),
                      r"diffusion must be a symmetric matrix β; got \[\["),
    "wrong sign": (lambda x: -torch.diag_embed(x),
                   r"diffusion must be a positive definite matrix β .*got \[\[-.*at t = \[0.0\]"),
    "a bad correlation": (lambda x: matrix(*[x[..., 0]] * 3, 0.5 * x[..., 0]),
                          r"diffusion must be a positive definite matrix β"),
    "rank one": (lambda x: matrix(*[x[..., 0]] * 4), r"diffusion must be a positive definite"),
    "zero": (lambda x: 0 * torch.diag_embed(x), r"diffusion must be a positive definite"),
    "whole numbers": (lambda x: torch.tensor([[2, 1], [1, 2]]),
                      r"diffusion must return real numbers; got torch.int64. Write 1.0 for 1."),
    "never finite": (lambda x: torch.diag_embed(x) / 0.0, r"diffusion must be finite at x0"),
    "an error": (lambda x: x @ x, r"diffusion of Mine must accept .*it raised RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DIFFUSIONS)
def test_diffusion_that_does_not_fit_is_refused(name):
    diffusion, message = BAD_DIFFUSIONS[name]
    with pytest.raises(ValueError, match=message):
        with_sde(diffusion=lambda self, t, x, theta: diffusion(x))


def test_diffusion_that_fails_for_some_parameters_only_is_refused():
    def diffusion(self, t, x, theta):
        one = torch.ones_like(x[..., 0])
        return matrix(one, theta[..., 0], theta[..., 0], one)

    with pytest.raises(ValueError, match=r"diffusion must be a positive definite matrix β"):
        with_sde(diffusion=diffusion)


@pytest.mark.parametrize(
    "factor",
    [
        lambda beta: beta,
        lambda beta: torch.linalg.cholesky(beta).mT,
        lambda beta: torch.linalg.cholesky(beta) * torch.tensor([1.0, 1.1]),
    ],
)
def test_factor_that_is_not_that_of_the_diffusion_is_refused(factor):
    with pytest.raises(ValueError, match=r"diffusion_tril must be the lower Cholesky factor of di"):
        with_sde(diffusion_tril=lambda self, t, x, theta: factor(self.diffusion(t, x, theta)))


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ((0.0, 1.0), r"State 'level' has no noise of its own: add a small variance"),
        ((1.0, 0.0), r"State 'size' has no noise of its own beside that of \('level',\): add a sm"),
    ],
)
def test_a_state_without_noise_is_named(free, message):
    def diffusion(self, t, x, theta):
        return theta[..., 1:, None] * torch.tensor(free).diag()

    with pytest.raises(ValueError, match=message):
        with_sde(diffusion=diffusion)


def test_a_state_whose_noise_is_that_of_others_is_named():
    def diffusion(self, t, x, theta):
        root = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [1.5, 1.0, 0.0]])
        return theta[..., 1:, None] * (root @ root.mT)

    sde = type(
        "Three", (Pair,), {"state_names": ("level", "size", "sum"), "diffusion": diffusion}
    )()
    prior = Normal(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"State 'sum' has no noise .* \('level', 'size'\)"):
        StateSpaceModel(sde, GaussianObservation(torch.eye(3), 1.0), prior, torch.ones(3))


def test_a_drift_that_is_infinite_at_time_0_is_accepted():
    """A fit may start later: kills a demand that the drift be finite at every time tried."""
    with_sde(drift=lambda self, t, x, theta: theta[..., :1] * x / t)


def test_constants_in_single_precision_are_accepted():
    """What a user's torch.tensor(0.5) and torch.eye(2) are."""
    half, unit = torch.tensor(0.5, dtype=torch.float32), torch.eye(2, dtype=torch.float32)
    with_sde(drift=lambda self, t, x, theta: half * x, diffusion=lambda self, t, x, theta: unit)


def test_an_unwritten_drift_is_named():
    with pytest.raises(ValueError, match=r"drift of Mine .*Mine must define drift\(self, t, x, th"):
        with_sde(drift=SDE.drift)


@pytest.mark.parametrize("name", ["drift", "diffusion"])
def test_a_value_without_gradient_is_refused(name):
    """Kills: a bound whose gradient lacks a term, in silence. A constant needs none."""

    def detached(self, t, x, theta):
        return getattr(Pair, name)(self, t, x, theta).detach()

    with pytest.raises(ValueError, match=f"{name} must be differentiable by x and theta"):
        with_sde(**{name: detached})

    def constant(self, t, x, theta):
        return torch.ones(2) if name == "drift" else torch.eye(2)

    with_sde(**{name: constant})

    def broken(self, t, x, theta):
        return constant(self, t, x, theta) * torch.nan

    with pytest.raises(ValueError, match=f"{name} must be finite at x0"):
        with_sde(**{name: broken})


def test_a_column_of_F_that_sees_nothing_is_refused():
    with pytest.raises(ValueError, match="see a state; got zeros only in column 2"):
        sir_model(F=[[1.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("theta", "words"),
    [
        (torch.ones(1, 2), r"theta must be a tensor \(n, 3\), .* got \(1, 2\)"),
        (torch.ones(3), r"theta must be a tensor \(n, 3\), .* got \(3,\)"),
        (
            torch.tensor([[1.0, -1.0, 0.0]]),
            r"natural scale, theta3 in \(0, inf\); got \[1.0",
        ),
        (torch.tensor([[1.0, 2.0, 1.0]]), r"natural scale, theta2 in \(-2, 2\); got \[1.0, 2.0"),
    ],
)
def test_theta_to_simulate_from_is_checked(theta, words):
    bounds = Bounds(torch.tensor([0.0, -2.0, 0.0]), torch.tensor([math.inf, 2.0, math.inf]))
    with pytest.raises(ValueError, match=words):
        check_theta(theta, ("theta1", "theta2", "theta3"), bounds)
    with pytest.raises(TypeError, match="a row for each path"):
        check_theta([1.0, 2.0, 3.0], ("a", "b", "c"), bounds)


def test_simulate_looks_at_theta():
    """Kills: a path of NaN in silence."""
    with pytest.raises(ValueError, match="natural scale"):
        ou_model().simulate(-torch.ones(1, 3), 5, 0.1, seed=0)


def test_simulate_looks_at_the_number_of_steps():
    """Kills: torch's words for a negative size, and a path of x_0 alone."""
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"num_steps must be a whole number, 1 .*; got {bad}"):
            ou_model().simulate(torch.ones(1, 3), bad, 0.1, seed=0)
    for bad in (2.5, True, "5"):
        with pytest.raises(
            ValueError, match=f"num_steps must be a whole number, 1 .*; got '?{bad}"
        ):
            check_count(bad, name="num_steps")
    check_count(np.int64(3))


def test_a_model_says_in_a_line_what_it_is():
    assert (
        repr(ou_model()) == "StateSpaceModel(OrnsteinUhlenbeck; states x; θ theta1, theta2, theta3)"
    )
