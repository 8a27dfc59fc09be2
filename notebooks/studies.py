"""The heavier studies, benchmarks/NAME.py: run by name only, resumed when they were stopped."""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import ledger

STUDIES = {  # on 2 CPU cores
    "ablation": "1 hour 40 minutes",
    "compare": "1 hour 15 minutes, estimated",
    "gpu": "on a GPU, not yet measured",
    "growth": "3 hours, estimated",
    "robustness": "35 minutes",
    "step": "half a minute",
}


def check(names: Sequence[str], args: argparse.Namespace) -> None:
    """Refuses what the studies cannot do, before anything runs."""
    if names and args.quick:
        raise SystemExit(f"--quick is of the notebooks; {', '.join(names)} has no quick values.")
    others = [name for name in names if name != "gpu"]
    if others and args.device == "cuda":
        raise SystemExit(f"{', '.join(others)} runs on the CPU, a fit on each core; got cuda.")
    if "gpu" in names and args.device == "cpu":
        raise SystemExit("gpu runs on a GPU; got cpu. Name step for the CPU's time of a step.")


def tasks(root: Path, names: Sequence[str], fresh: bool) -> Iterator[ledger.Task]:
    """The studies of these names, each judged by the sources as they are when its turn comes."""
    for name in names:
        digest = ledger.fingerprint_study(root, name)
        yield ledger.Task(name, digest, partial(run_study, root, name, fresh))


def run_study(root: Path, name: str, fresh: bool) -> tuple[list[str], float]:
    """A study in a process of its own: what it made, and its seconds, over all its sittings."""
    print(f"{name}: running ({STUDIES[name]})", flush=True)
    with ledger.staged(root, name) as stage:
        script = [sys.executable, str(root / f"benchmarks/{name}.py"), "--save-to", str(stage)]
        code = wait(subprocess.Popen([*script, "--fresh"] if fresh else script, cwd=root))
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise ledger.TaskFailed(
                f"{name} failed with exit code {code}, for the reason above; its finished fits "
                f"are kept, and ./run_all.sh {name} goes on there"
            )
        seconds = float((root / f"results/.{name}.seconds").read_text())
        return ledger.publish(stage, root), seconds


def wait(process: subprocess.Popen) -> int:
    """Its exit code; a stop request is handed on, and met when the process has ended."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
