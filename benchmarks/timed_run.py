"""A method of the comparison in a process of its own: a job in, draws with time stamps out."""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

Job = dict[str, object]
# One thread each, whatever library computes.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


class Run(NamedTuple):
    """Draws of ϑ, and when there were how many of them.

    Seconds are of the processor, of all threads, since the process began: imports count, and a busy
    machine does not lengthen them.

    Attributes:
        theta: ϑ, (chains, draws, d).
        log_weight: log p − log q of each draw (draws,); empty for a Markov chain.
        setup: Seconds of imports, tracing and compiling.
        base: Seconds before the first draw, set-up included: of the fit, or of the warm-up.
        ends: Draws of each chain at each checkpoint, (checkpoints,).
        seconds: And the seconds there.
    """

    theta: np.ndarray
    log_weight: np.ndarray
    setup: float
    base: float
    ends: np.ndarray
    seconds: np.ndarray


seconds = time.process_time


def checkpoints(num_draws: int, first: int) -> np.ndarray:
    """Numbers of draws at which a chain is judged: first, √2·first, ..., the last of them all."""
    count = int(2 * np.log2(num_draws / first)) + 1
    return np.unique([*np.rint(first * 2 ** (np.arange(count) / 2)).astype(int), num_draws])


def main(methods: dict[str, Callable[[Job], Run]]) -> None:
    """Runs the job of the file that is named first and writes its run to the second."""
    job, target = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    run = methods[job["method"]](job)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    np.savez(target, memory=memory, **run._asdict())


def _end_with_the_parent() -> None:
    """Standard input is a pipe that the parent never writes to: it ends when the parent does."""
    os.read(0, 1)
    os._exit(1)
