"""SDEs dX = a(t, X, θ) dt + sqrt(β(t, X, θ)) dW and their Euler-Maruyama transition (eq. 8)."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# The arguments share one batch; each may have size 1 where another has more.
Time = Float[Tensor, "*#batch 1"]
State = Float[Tensor, "*#batch state"]
Theta = Float[Tensor, "*#batch theta"]
Matrix = Float[Tensor, "*#batch state state"]
Scalar = Float[Tensor, "*#batch"]


class SDE:
    r"""A stochastic differential equation :math:`dX = a(t, X, θ)\,dt + \sqrt{β(t, X, θ)}\,dW`.

    A subclass names its components and writes ``drift`` and ``diffusion``; no ``__init__`` needed.
    Shapes: x (..., p), theta (..., d) on the natural scale, t (..., 1). Densities and simulators
    call them through ``aligned``, so the three arrive with one common batch (...).

    Attributes:
        state_names: Names of the p state components.
        theta_names: Names of the d parameters.
        positive_theta: Names of the parameters that are positive (their ϑ is a logarithm).
        positive_state: True, False, or a tuple of the states that are positive.

    >>> class Growth(SDE):
    ...     state_names, theta_names = ("x",), ("rate", "noise")
    ...     def drift(self, t, x, theta): return theta[..., :1] * x
    ...     def diffusion(self, t, x, theta): return theta[..., 1:, None].square()
    >>> Growth().drift(torch.zeros(1), torch.ones(5, 1), torch.ones(5, 2)).shape
    torch.Size([5, 1])
    """

    state_names: tuple[str, ...] = ()
    theta_names: tuple[str, ...] = ()
    positive_theta: tuple[str, ...] = ()
    positive_state: bool | tuple[str, ...] = False

    @property
    def num_states(self) -> int:
        """Dimension p of the state."""
        return len(self.state_names)

    @property
    def num_theta(self) -> int:
        """Number of the SDE's own parameters."""
        return len(self.theta_names)

    @property
    def positive_states(self) -> tuple[bool, ...]:
        """Which of the p components are positive."""
        if isinstance(self.positive_state, bool):
            return (self.positive_state,) * self.num_states
        return tuple(name in self.positive_state for name in self.state_names)

    def drift(self, t: Time, x: State, theta: Theta) -> State:
        """Drift a(t, x, θ)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define drift(self, t, x, theta) -> (..., p)."
        )

    def diffusion(self, t: Time, x: State, theta: Theta) -> Matrix:
        """Diffusion matrix β(t, x, θ): the covariance per unit time, not its square root."""
        raise NotImplementedError(
            f"{type(self).__name__} must define diffusion(self, t, x, theta) -> (..., p, p)."
        )

    def diffusion_tril(self, t: Time, x: State, theta: Theta) -> Matrix:
        """Lower Cholesky factor of β; override it where the factor is known in closed form."""
        return cholesky_unrolled(self.diffusion(t, x, theta))

    def aligned(self, t: Time, x: State, theta: Theta) -> tuple[Time, State, Tensor]:
        """(t, x, θ) with one common batch; θ cut to the SDE's own parameters (σ may follow)."""
        if theta.shape[-1] > self.num_theta:
            theta = theta[..., : self.num_theta]
        batch = torch.broadcast_shapes(t.shape[:-1], x.shape[:-1], theta.shape[:-1])
        return t.expand(*batch, -1), x.expand(*batch, -1), theta.expand(*batch, -1)

    def alive(self, x: Float[Tensor, "*batch state"]) -> Bool[Tensor, "*batch"]:
        """Whether every positive component of x is above 0: the indicator 1{x > 0}; NaN is dead."""
        positive = [i for i, flag in enumerate(self.positive_states) if flag]
        return (x[..., positive] > 0).all(-1)


class OrnsteinUhlenbeck(SDE):
    r"""Ornstein-Uhlenbeck process :math:`dX = θ_1(θ_2 - X)\,dt + θ_3\,dW` (section 3)."""

    state_names = ("x",)
    theta_names = ("theta1", "theta2", "theta3")
    positive_theta = ("theta1", "theta3")

    def drift(self, t: Time, x: State, theta: Theta) -> State:
        """a = θ1(θ2 - x)."""
        return theta[..., 0:1] * (theta[..., 1:2] - x)

    def diffusion(self, t: Time, x: State, theta: Theta) -> Matrix:
        """β = θ3²."""
        return theta[..., 2:3, None].square()

    def diffusion_tril(self, t: Time, x: State, theta: Theta) -> Matrix:
        """L = θ3, which is positive."""
        return theta[..., 2:3, None]


class SIR(SDE):
    r"""Epidemic with states (S, I), contact rate θ1 and removal rate θ2 (section 3).

    .. math:: a = (-θ_1SI,\; θ_1SI - θ_2I), \qquad
              β = \begin{pmatrix} θ_1SI & -θ_1SI \\ -θ_1SI & θ_1SI + θ_2I \end{pmatrix}

    Args:
        population: Number of people; only the reproduction number R0 uses it.

    >>> SIR().drift(torch.zeros(1), torch.tensor([762.0, 1.0]), torch.tensor([0.002, 0.5])).shape
    torch.Size([2])
    """

    state_names = ("S", "I")
    theta_names = ("theta1", "theta2")
    positive_theta = ("theta1", "theta2")
    positive_state = True

    def __init__(self, population: float | int = 763) -> None:
        if not (population > 0 and math.isfinite(population)):
            raise ValueError(f"population must be positive and finite; got {population}.")
        self.population = population

    def drift(self, t: Time, x: State, theta: Theta) -> State:
        """a = (-θ1 S I, θ1 S I - θ2 I)."""
        susceptible, infected = x.unbind(-1)
        infection = theta[..., 0] * susceptible * infected
        return torch.stack((-infection, infection - theta[..., 1] * infected), -1)

    def diffusion(self, t: Time, x: State, theta: Theta) -> Matrix:
        """β of the class docstring."""
        susceptible, infected = x.unbind(-1)
        infection = theta[..., 0] * susceptible * infected
        total = infection + theta[..., 1] * infected
        return torch.stack((infection, -infection, -infection, total), -1).unflatten(-1, (2, 2))

    def diffusion_tril(self, t: Time, x: State, theta: Theta) -> Matrix:
        """L11 = sqrt(θ1 S I), L21 = -L11, L22 = sqrt(θ2 I)."""
        susceptible, infected = x.unbind(-1)
        # A product of roots: θ1 S I itself underflows in float32 when S and I are both tiny.
        root_infected = infected.sqrt()
        first = (theta[..., 0] * susceptible).sqrt() * root_infected
        second = theta[..., 1].sqrt() * root_infected
        entries = (first, torch.zeros_like(first), -first, second)
        return torch.stack(entries, -1).unflatten(-1, (2, 2))

    def r0(self, theta: Float[Tensor, "*batch theta"]) -> Float[Tensor, "*batch"]:
        """Basic reproduction number R0 = population·θ1/θ2."""
        return self.population * theta[..., 0] / theta[..., 1]


class EulerMaruyama:
    r"""Gaussian one-step density of an SDE (eq. 8): :math:`x_i \sim N(x_{i-1} + a\,dt, β\,dt)`.

    The drift a and the diffusion β are evaluated at :math:`t_{i-1}` and :math:`x_{i-1}`.

    Args:
        sde: Supplies ``drift`` a and ``diffusion`` β (the matrix, not its square root).
        dt: Grid step, in the time unit of the data; positive.

    >>> step = EulerMaruyama(OrnsteinUhlenbeck(), dt=0.1)
    >>> x, theta = torch.ones(5, 1), torch.ones(5, 3)
    >>> step.log_prob(x, x, theta, torch.zeros(1)).shape
    torch.Size([5])
    """

    def __init__(self, sde: SDE, dt: float | int) -> None:
        if not (dt > 0 and math.isfinite(dt)):
            raise ValueError(f"dt must be positive and finite; got {dt}. It is the grid step.")
        self.sde, self.dt = sde, dt

    def log_prob(self, x_next: State, x: State, theta: Theta, t: Time) -> Float[Tensor, "*batch"]:
        """Log density of the move from x at time t to x_next, given θ; x must be alive."""
        t, x, theta = self.sde.aligned(t, x, theta)
        residual = torch.sub(x_next - x, self.sde.drift(t, x, theta), alpha=self.dt)
        square, log_det = _whitened(self.sde.diffusion_tril(t, x, theta), residual)
        constant = 0.5 * self.sde.num_states * math.log(2 * math.pi * self.dt)
        return square * (-0.5 / self.dt) - log_det - constant

    def sample(
        self, x: State, theta: Theta, t: Time, noise: State
    ) -> Float[Tensor, "*batch state"]:
        """One step x + a·dt + sqrt(dt)·L·noise from x at time t; noise is standard normal."""
        t, x, theta = self.sde.aligned(t, x, theta)
        kick = (self.sde.diffusion_tril(t, x, theta) * noise[..., None, :]).sum(-1)
        return x + self.sde.drift(t, x, theta) * self.dt + kick * math.sqrt(self.dt)

    def simulate(
        self,
        x0: State,
        theta: Theta,
        noise: Float[Tensor, "*batch steps state"],
        t0: float | int = 0.0,
    ) -> Float[Tensor, "*batch time state"]:
        """Path x_0..x_N from the standard normal noise of its N steps.

        A path that dies (a positive component reaches 0) is followed further and may turn NaN.
        """
        path = [x0.expand_as(noise[..., 0, :])]
        for i, step_noise in enumerate(noise.unbind(-2)):
            t = noise.new_full((1,), t0 + i * self.dt)
            path.append(self.sample(path[-1], theta, t, step_noise))
        return torch.stack(path, -2)


def _whitened(tril: Matrix, residual: State) -> tuple[Scalar, Scalar]:
    """(|L⁻¹ r|², log det L) by forward substitution, written out because p is small."""
    rows = [row.unbind(-1) for row in tril.unbind(-2)]
    white: list[Tensor] = []
    for row, rest in zip(rows, residual.unbind(-1), strict=True):
        for entry, known in zip(row, white, strict=False):
            rest = rest - entry * known
        white.append(rest / row[len(white)])
    square, log_det = white[0].square(), rows[0][0].log()
    for i in range(1, len(white)):
        square, log_det = square + white[i].square(), log_det + rows[i][i].log()
    return square, log_det


def cholesky_unrolled(beta: Matrix) -> Matrix:
    """Lower Cholesky factor of a small matrix; NaN where it is not positive definite.

    Elementwise operations only: faster than batched LAPACK for small p, and safe in a CUDA graph.
    """
    size = beta.shape[-1]
    entries = [row.unbind(-1) for row in beta.unbind(-2)]
    tril = [[torch.zeros_like(entries[0][0])] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = entries[i][j]
            for k in range(j):
                rest = rest - tril[i][k] * tril[j][k]
            tril[i][j] = rest.sqrt() if i == j else rest / tril[j][j]
    return torch.stack([torch.stack(row, -1) for row in tril], -2)
