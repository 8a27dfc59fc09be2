"""Starts each run of the comparison in a process of its own and judges what comes back."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pool
import yardstick
from problems import write_for_peers
from timed_run import ONE_THREAD, Run

HERE = Path(__file__).resolve().parent
LIB = HERE.parent / "lib"
PEERS = HERE / ".venv/bin/python"
MAKE_PEERS = (
    "benchmarks/.venv is missing, on which NumPyro runs. Make it: python3.11 -m venv "
    "benchmarks/.venv && benchmarks/.venv/bin/python -m pip install -r benchmarks/requirements.txt"
)
LIMIT = 3600  # seconds by the clock, after which a run counts as failed
SHARED = ("side_run.py", "problems.py", "timed_run.py", "yardstick.py")


def results(wanted: Mapping[str, pool.Spec], args: argparse.Namespace) -> dict[str, pool.Result]:
    """By label: what is there, and unless --finished the rest too; the sides take turns by seed."""
    found = {}
    for seed in sorted({spec["seed"] for spec in wanted.values()}):
        for script in ("contenders", "peers"):
            mine = (seed, script)
            part = {k: s for k, s in wanted.items() if (s["seed"], s["script"]) == mine}
            if args.finished:
                found |= pool.finished(part, args.journal, source(script))
            elif part:
                _need(script)
                found |= pool.run(part, measure, args.journal, source(script), args.workers)
    if not found:
        raise SystemExit("no run of this version is finished yet")
    return found


def _need(script: str) -> None:
    if script == "peers" and not PEERS.is_file():
        raise SystemExit(MAKE_PEERS)


def source(script: str) -> str:
    """Fingerprint of what a script's numbers depend on; those of the peers hardly depend on lib."""
    own, text = [HERE / name for name in (*SHARED, f"{script}.py")], ""
    if script == "peers":
        data = (HERE.parent / "data").glob("*.csv")
        own += [HERE / "densities.py", HERE / "requirements.txt", *data]
        own += [LIB / name for name in ("weights.py", "start.py")]  # their looks and starts
    else:
        own += [HERE / name for name in ("guided_filter.py", "outbreak.py")]
        text = pool.fingerprint(pool.ROOT)
    whole = hashlib.sha256(text.encode())
    for path in sorted(own):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def measure(spec: pool.Spec) -> pool.Result:
    """One run. The peers are given the start of our own fit, whose seconds count as set-up."""
    with tempfile.TemporaryDirectory() as folder:
        job, data, out = (Path(folder, name) for name in ("job.json", "data.npz", "out.npz"))
        python, start = sys.executable, 0.0
        if spec["script"] == "peers":
            python = str(PEERS)
            start = write_for_peers(data, spec["problem"], spec["num_obs"], spec["seed"])
        job.write_text(json.dumps(spec | {"data": str(data)}))
        call([python, str(HERE / f"{spec['script']}.py"), str(job), str(out)])
        with np.load(out) as file:
            run, memory = Run(*(file[name] for name in Run._fields)), float(file["memory"])
    setup, base, seconds = (float(run.setup) + start, float(run.base) + start, run.seconds + start)
    looks = yardstick.looks(run._replace(seconds=seconds))
    to_ess = yardstick.seconds_to_ess(looks[-1], base)
    return {"setup": setup, "memory": memory, "seconds_to_ess": to_ess, "looks": looks}


def call(command: Sequence[str]) -> None:
    """Runs it on one thread; the last line of what it says is the error."""
    with tempfile.TemporaryFile("w+") as said:
        # The pipe closes when this process ends, and the other one ends with it.
        pipes = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said}
        process = subprocess.Popen(command, env=os.environ | ONE_THREAD, **pipes)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {LIMIT} s") from None
        finally:
            process.kill()  # of no effect on one that has ended
            process.wait()
            process.stdin.close()
        if code:
            said.seek(0)
            lines = said.read().strip().splitlines() or ["nothing said"]
            raise RuntimeError(f"exit code {code}: {lines[-1]}")
