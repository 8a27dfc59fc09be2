"""Problems that grow: OU with more observations, the epidemic on a finer grid; one run of each."""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pool
import problems
import side_run
import timed_run
import yardstick
from problems import PRIOR_SD, Problem

import lib
from lib.start import find_start


def problem(name: str, size: float) -> Problem:
    """``"ou"`` with so many observations, or ``"sir"`` with this grid step, days."""
    if name == "ou":
        return problems.problem(name, int(size))
    model, known = problems.problem(name)
    return Problem(model, lib.Observations(known.times, known.y, dt=size))


def write(path: Path, name: str, size: float, seed: int) -> float:
    """Data, and the start of our own fit, for a process without torch; the seconds of that start.

    Arrays are those of ``densities.Data``; ``path`` is x_1, …, x_N.
    """
    model, observations = problem(name, size)
    grid, clock = observations.grid(), time.process_time()
    start = find_start(model, grid, seed)
    seconds = time.process_time() - clock
    about = {"vartheta": start.vartheta, "vartheta_sd": start.vartheta_sd}
    about |= {"path": start.path[1:], "path_sd": start.path_sd[1:]}
    about |= {"y": grid.y[1:, 0], "observed": grid.observed[1:, 0], "dt": grid.dt}
    np.savez(path, x0=model.x0_value.double(), prior_sd=PRIOR_SD[name], **about)
    return seconds


def measure(spec: pool.Spec) -> pool.Result:
    """One run in a process of its own, as ``side_run.measure``.

    ``start`` are the seconds of finding where to begin, within the ``setup`` of a chain; our own
    fit does that by itself, and they are 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, data, out = (Path(folder, name) for name in ("job.json", "data.npz", "out.npz"))
        python, start = sys.executable, 0.0
        if spec["script"] == "peers":
            python = str(side_run.PEERS)
            start = write(data, spec["problem"], spec["size"], spec["seed"])
        job.write_text(json.dumps(spec | {"data": str(data)}))
        side_run.call([python, str(side_run.HERE / f"{spec['script']}.py"), str(job), str(out)])
        with np.load(out) as file:
            run = timed_run.Run(*(file[name] for name in timed_run.Run._fields))
            memory = float(file["memory"])
    looks = yardstick.looks(run._replace(seconds=run.seconds + start))
    return {"setup": float(run.setup) + start, "start": start, "memory": memory, "looks": looks}
