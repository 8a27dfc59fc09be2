"""Runs what is out of date and keeps the record: what each figure came from and depended on."""

import csv
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from parameters import read_cells

MANIFEST, STATE = "results/manifest.csv", "results/.state.json"
SOURCES = ("lib", "notebooks", "params", "data", "benchmarks")


class Origin(NamedTuple):
    """One row of the manifest: a figure, its notebook, and the commit and device that made it."""

    figure: str
    notebook: str
    commit: str
    device: str
    seconds: str


class Task(NamedTuple):
    """A notebook or a study: its name, the hash of all that it depends on, and how to run it.

    ``run`` returns the files that it has made and its seconds, or raises ``TaskFailed``.
    """

    name: str
    digest: str
    run: Callable[[], tuple[list[str], float]]


class TaskFailed(Exception):
    """A notebook or a study stopped; the message is the sentence for the user."""


def run_outdated(root: Path, tasks: Iterable[Task], force: bool, device: str) -> list[str]:
    """Runs the tasks that are not up to date and records what each made; what failed."""
    failures, commit, machine = [], describe_commit(root), describe_device(device)
    for task in tasks:
        if not force and is_current(root, task.name, task.digest):
            print(f"{task.name}: up to date", flush=True)
            continue
        forget(root, task.name)
        try:
            files, seconds = task.run()
        except TaskFailed as failure:
            failures.append(str(failure))
            continue
        figures = [name for name in files if name.startswith("figures/")]
        rows = [Origin(f, task.name, commit, machine, f"{seconds:.0f}") for f in figures]
        update_manifest(root, task.name, rows)
        remember(root, task.name, task.digest, files)
    return failures


@contextmanager
def staged(target: Path, name: str) -> Iterator[Path]:
    """A hidden folder to write figures/ and results/ into, which is gone afterwards."""
    stage = target / "results" / f".{name}"
    shutil.rmtree(stage, ignore_errors=True)
    for folder in ("figures", "results"):
        (stage / folder).mkdir(parents=True)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, target: Path) -> list[str]:
    """Moves the staged figures and tables to their places; their new paths."""
    published = []
    for folder in ("figures", "results"):
        (target / folder).mkdir(exist_ok=True)
        for path in sorted((stage / folder).iterdir()):
            path.replace(target / folder / path.name)
            published.append(f"{folder}/{path.name}")
    return published


def fingerprint(root: Path, stem: str, device: str) -> str:
    """SHA-256 of the notebook's cells (not outputs), its values, lib, data and the device."""
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in read_cells(root, stem)]
    return _digest(root, json.dumps([sources, device]), [root / f"params/{stem}.yaml"])


def fingerprint_study(root: Path, name: str) -> str:
    """SHA-256 of the scripts of benchmarks/, lib and data, for the study of that name."""
    return _digest(root, name, (root / "benchmarks").glob("*.py"))


def _digest(root: Path, text: str, own: Iterable[Path]) -> str:
    """Of a text, the files of one's own, lib and data."""
    digest = hashlib.sha256(text.encode())
    files = [*own, *(root / "lib").rglob("*.py"), *(root / "data").rglob("*")]
    for path in sorted(p for p in files if p.is_file()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def describe_device(device: str) -> str:
    """The card's name, or the processor's."""
    if device == "cuda":
        import torch  # here: the options are judged without it

        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {os.cpu_count()} cores" if models else platform.machine()


def describe_commit(root: Path) -> str:
    """Short commit, with + where what a result depends on differs from it; else 'unknown'."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not (root / ".git").exists():  # an unpacked archive inside somebody else's repository
            return "unknown"
        changed = git("status", "--porcelain", "--", *SOURCES)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_state(root: Path) -> dict[str, dict]:
    """Hash and files of each task's last full run; empty when the file is absent or broken."""
    try:
        return json.loads((root / STATE).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def write_state(root: Path, state: dict[str, dict]) -> None:
    """Replaces the state in one move, so that a kill leaves the old one or the new one."""
    new = root / f"{STATE}.new"
    new.write_text(json.dumps(state, indent=1))
    new.replace(root / STATE)


def is_current(root: Path, task: str, digest: str) -> bool:
    """Whether the last full run saw the same inputs and everything that it made is still there."""
    last = read_state(root).get(task, {"digest": "", "files": []})
    return last["digest"] == digest and all((root / name).is_file() for name in last["files"])


def forget(root: Path, task: str) -> None:
    """A run that begins makes the task out of date until it succeeds."""
    write_state(root, {name: last for name, last in read_state(root).items() if name != task})


def remember(root: Path, task: str, digest: str, files: Sequence[str]) -> None:
    """A run that succeeded: its inputs' hash and what it made."""
    write_state(root, read_state(root) | {task: {"digest": digest, "files": list(files)}})


def update_manifest(root: Path, task: str, new: Sequence[Origin]) -> None:
    """Replaces the task's rows; a figure that it no longer makes is deleted with its row."""
    path, old = root / MANIFEST, []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            old = [Origin(**row) for row in csv.DictReader(file)]
    for row in old:
        if row.notebook == task and row.figure not in [origin.figure for origin in new]:
            (root / row.figure).unlink(missing_ok=True)
    rows = sorted([row for row in old if row.notebook != task] + list(new))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([Origin._fields, *rows])
