"""What a user would try first, by NumPyro: NUTS on the path, and three guides (SVI).

Runs on benchmarks/.venv (benchmarks/requirements.txt), which the study itself does not need.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import densities
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import timed_run
from jax import Array, lax
from numpyro.distributions import ImproperUniform, constraints
from numpyro.infer import NUTS, SVI, Trace_ELBO, autoguide, init_to_value
from numpyro.infer.hmc import HMCState

jax.config.update("jax_enable_x64", True)
BLOCK = 50  # steps of a chain between two looks at the clock
CHUNK = 500  # draws of a guide made at a time
Point = dict[str, Array]  # "vartheta" (d,) and "path" (N, p), both unconstrained


class Target(NamedTuple):
    """log p of (ϑ, path) = loc + scale·z: as a density of z, which is unconstrained."""

    log_p: Callable[[Point], Array]
    loc: Point
    scale: Point

    def point(self, z: Point) -> Point:
        """loc + scale·z."""
        return jax.tree.map(lambda loc, scale, z: loc + scale * z, self.loc, self.scale, z)

    def log_density(self, z: Point) -> Array:
        """With the Jacobian."""
        ladj = sum(jnp.log(scale).sum() for scale in self.scale.values())
        return self.log_p(self.point(z)) + ladj

    def start(self) -> Point:
        """z = 0."""
        return jax.tree.map(jnp.zeros_like, self.loc)


def read_target(job: timed_run.Job) -> Target:
    """The job's problem and parameterisation, about the point at which our own fit starts too."""
    with np.load(job["data"]) as file:
        data = densities.Data(*(jnp.asarray(file[name]) for name in densities.Data._fields))
        names = ("vartheta", "vartheta_sd", "path", "path_sd")
        vartheta, vartheta_sd, x, x_sd = (jnp.asarray(file[name]) for name in names)
    data = data._replace(dt=float(data.dt), prior_sd=float(data.prior_sd))
    process = densities.PROCESSES[job["problem"]]
    if job["path"] == "innovation":
        path, path_sd, log_p = jnp.zeros_like(x), jnp.ones_like(x), log_innovation
    elif process.positive:
        path, path_sd, log_p = jnp.log(x), x_sd / x, log_centred
    else:
        path, path_sd, log_p = x, x_sd, log_centred
    loc, scale = {"vartheta": vartheta, "path": path}, {"vartheta": vartheta_sd, "path": path_sd}
    return Target(partial(log_p, process, data), loc, scale)


def log_centred(process: densities.Process, data: densities.Data, point: Point) -> Array:
    """Of the path itself, or of its logarithm for positive states, with the Jacobian Σ log x."""
    u = point["path"]
    x, ladj = (jnp.exp(u), u.sum()) if process.positive else (u, 0.0)
    return densities.log_joint(process, point["vartheta"], x, data) + ladj


def log_innovation(process: densities.Process, data: densities.Data, point: Point) -> Array:
    """Of the standard normal noise that makes the path."""
    vartheta, noise = point["vartheta"], point["path"]

    def step(x: Array, z: Array) -> tuple[Array, Array]:
        x = process.move(vartheta, x, z, data.dt)
        return x, x

    _, x = lax.scan(step, data.x0, noise)
    return densities.log_joint_of_noise(process, vartheta, x, noise, data)


def nuts(job: timed_run.Job) -> timed_run.Run:
    """One chain: a diagonal metric, but for ϑ a dense one, adapted in the warm-up."""
    target, counts = read_target(job), (-(-job[name] // BLOCK) for name in ("warmup", "draws"))
    warmup, kept = counts
    kernel = NUTS(
        potential_fn=lambda z: -target.log_density(z),
        target_accept_prob=job["accept"],
        dense_mass=[("vartheta",)],
    )
    key = jax.random.PRNGKey(job["seed"])
    state = kernel.init(key, BLOCK * warmup, target.start(), (), {})
    block = jax.jit(partial(_block, kernel, target)).lower(state).compile()
    setup = timed_run.seconds()
    for _ in range(warmup):
        state, _ = jax.block_until_ready(block(state))
    draws, stamps = [], [timed_run.seconds()]
    for _ in range(kept):
        state, vartheta = block(state)
        draws.append(np.asarray(vartheta))
        stamps.append(timed_run.seconds())
    ends = timed_run.checkpoints(kept, first=2)
    draws, times = np.concatenate(draws)[None], np.array(stamps)[ends]
    return timed_run.Run(draws, np.empty(0), setup, stamps[0], BLOCK * ends, times)


def _block(kernel: NUTS, target: Target, state: HMCState) -> tuple[HMCState, Array]:
    """BLOCK steps of a chain, and ϑ after each."""

    def step(state: HMCState, _: None) -> tuple[HMCState, Array]:
        state = kernel.sample(state, (), {})
        return state, target.point(state.z)["vartheta"]

    return lax.scan(step, state, length=BLOCK)


GUIDES = {
    "normal": autoguide.AutoMultivariateNormal,
    "low rank": autoguide.AutoLowRankMultivariateNormal,
    "iaf": autoguide.AutoIAFNormal,
}


def guide(job: timed_run.Job) -> timed_run.Run:
    """A guide trained by Adam for so many steps, then draws with their weights."""
    target, steps = read_target(job), job["steps"]
    model = partial(_model, target)
    own = GUIDES[job["guide"]](model, init_loc_fn=init_to_value(values=target.start()))

    def rate(i: Array) -> Array:
        return job["rate"] * 0.5 * (1 + jnp.cos(math.pi * i / steps))

    svi = SVI(model, own, numpyro.optim.Adam(rate), Trace_ELBO(job["particles"]))
    key_train, key_draw = jax.random.split(jax.random.PRNGKey(job["seed"]))
    state = svi.init(key_train)
    train = jax.jit(lambda s: lax.scan(lambda s, _: svi.update(s), s, length=steps)[0])
    train = train.lower(state).compile()
    draw = jax.jit(partial(_draw, target, own)).lower(key_draw, svi.get_params(state)).compile()
    setup = timed_run.seconds()
    params = svi.get_params(jax.block_until_ready(train(state)))
    base, keys = timed_run.seconds(), jax.random.split(key_draw, job["draws"] // CHUNK)
    parts = [jax.tree.map(np.asarray, draw(key, params)) for key in keys]
    vartheta, log_weight = map(np.concatenate, zip(*parts, strict=True))
    ends, times = np.array([len(vartheta)]), np.array([timed_run.seconds()])
    return timed_run.Run(vartheta[None], log_weight, setup, base, ends, times)


def _model(target: Target) -> None:
    """The target as a NumPyro model."""
    z = {
        name: numpyro.sample(
            name, ImproperUniform(constraints.independent(constraints.real, v.ndim), (), v.shape)
        )
        for name, v in target.loc.items()
    }
    numpyro.factor("log_density", target.log_density(z))


def _draw(target: Target, own: autoguide.AutoContinuous, key: Array, params: dict) -> tuple:
    """ϑ and log p − log q of CHUNK draws of the guide."""
    posterior = own.get_posterior(params)
    latent, intermediates = posterior.sample_with_intermediates(key, (CHUNK,))
    # A flow's inverse would take one pass for each dimension.
    log_q = posterior.log_prob(latent, *([intermediates] if intermediates else []))
    z = jax.vmap(own._unpack_latent)(latent)
    return target.point(z)["vartheta"], jax.vmap(target.log_density)(z) - log_q


if __name__ == "__main__":
    timed_run.main({"nuts": nuts, "guide": guide})
