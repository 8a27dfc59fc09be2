"""Runs the notebooks with the study's values and keeps what they make; run_all.sh calls it."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import claims
import ledger
import studies
from parameters import check_data, read_defaults, read_study
from studies import STUDIES

# torch, papermill and nbconvert are imported where they are used: the options are judged on a bare
# Python before set-up, and a second run with nothing to do must not wait for them.

ROOT = Path(__file__).resolve().parents[1]
TIMES = (
    "On 2 CPU cores, by machine: set-up 2 to 5 minutes with its downloads, the full run 30 to 100, "
    "--quick 4 to 10, --test 15 to 35, a second full run with nothing changed a few seconds."
)


class Job(NamedTuple):
    """A notebook to run: its stem, the parameters to inject, the hash of all that it depends on."""

    stem: str
    parameters: dict[str, object]
    digest: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"run_all.sh: {message} (see ./run_all.sh --help)\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of run_all.sh, which hands them over unchanged."""
    about = "Runs the study's notebooks; sets up .venv first when no environment is active."
    heavier = "; ".join(f"{name}: {minutes}" for name, minutes in STUDIES.items())
    times = f"{TIMES} Heavier studies, run by name only and resumed when stopped: {heavier}."
    parser = _Parser("run_all.sh", description=about, epilog=times, allow_abbrev=False)
    add, study = parser.add_argument, f"or a study: {', '.join(STUDIES)}"
    add("names", nargs="*", metavar="NAME", help=f"notebooks by stem or prefix such as 01, {study}")
    add("--quick", action="store_true", help="the notebooks' own values, into results/quick/ only")
    add("--test", action="store_true", help="set up, run every test and stop")
    add("--setup", action="store_true", help="make .venv, even in an active environment, and stop")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is the default")
    add("--force", action="store_true", help="run also what is up to date, a study from nothing")
    add("--check", action="store_true", help=argparse.SUPPRESS)  # judge options and names, no more
    args = parser.parse_intermixed_args(argv)
    if args.test + args.setup + args.quick > 1:
        parser.error("--test, --setup and --quick exclude each other")
    if (args.test or args.setup) and (args.names or args.force or args.device != "auto"):
        parser.error("--test and --setup take no NAME, --device or --force")
    return args


def select(root: Path, names: Sequence[str]) -> list[str]:
    """Notebooks that start with one of the names, and studies of that name; no names: notebooks."""
    stems = sorted(path.stem for path in (root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not stems:
        raise SystemExit("notebooks/ holds no notebook named like 01_name.ipynb.")
    wanted = [Path(name).stem for name in names]
    for name in wanted:
        if name not in STUDIES and not any(stem.startswith(name) for stem in stems):
            raise SystemExit(
                f"No notebook starts with '{name}'; there are {', '.join(stems)}. "
                f"Studies, by their whole name: {', '.join(STUDIES)}."
            )
    notebooks = [stem for stem in stems if not wanted or stem.startswith(tuple(wanted))]
    return notebooks + [name for name in STUDIES if name in wanted]


def resolve_device(device: str) -> str:
    """'cpu' or 'cuda'; refuses a GPU that is not there before any notebook runs."""
    if device == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise SystemExit("--device cuda was asked for, but torch finds no CUDA GPU here; use cpu.")
    return "cuda" if available else "cpu"


def read_job(root: Path, stem: str, args: argparse.Namespace, device: str) -> Job:
    """A notebook with its parameters, refused here rather than half-way through the study."""
    defaults = read_defaults(root, stem)
    if args.quick:
        # The quick values include the device, unless the user asks for one.
        values = {} if args.device == "auto" else {"device": device}
    else:
        values = {"quick": False, "device": device} | read_study(root, stem, defaults)
    check_data(root, stem, defaults | values)
    return Job(stem, values, ledger.fingerprint(root, stem, device))


def execute(root: Path, target: Path, job: Job) -> list[str]:
    """Runs a notebook in a hidden folder; its files reach target only when it succeeds."""
    with ledger.staged(target, job.stem) as stage:
        (target / "results/notebooks").mkdir(exist_ok=True)
        try:
            run_papermill(root / "notebooks", stage, job)
            return ledger.publish(stage, target) + keep_notebook(stage, target, job.stem)
        except Exception as error:
            half_run, where = stage / f"{job.stem}.ipynb", ""
            if half_run.is_file():
                kept = half_run.replace(target / f"results/notebooks/{job.stem}.failed.ipynb")
                where = f"; the half-run notebook is {kept.relative_to(root).as_posix()}"
            sentence = f"{job.stem} failed {describe_error(error)}{where}"
            raise ledger.TaskFailed(sentence) from error


def run_papermill(notebooks: Path, stage: Path, job: Job) -> None:
    """The notebook with its parameters injected, executed in notebooks/ into the staging folder."""
    import papermill
    from tqdm.contrib.logging import logging_redirect_tqdm

    # Relative to the kernel's folder, so that the executed copy names no path of this machine.
    save_to = Path(os.path.relpath(stage, notebooks)).as_posix()
    with logging_redirect_tqdm():  # the notebook's outputs above the bar, not through it
        papermill.execute_notebook(
            notebooks / f"{job.stem}.ipynb",
            stage / f"{job.stem}.ipynb",
            job.parameters | {"save_to": save_to},
            kernel_name="python3",
            language="python",
            cwd=notebooks,
            log_output=True,
            autosave_cell_every=30,
            progress_bar=sys.stderr.isatty(),  # in a file the bar would be noise
        )


def describe_error(error: Exception) -> str:
    """Which cell, and the last line of its error."""
    if not hasattr(error, "exec_count"):
        return f"with {type(error).__name__}: {error}"
    first = (error.source.strip().splitlines() or [""])[0]
    last = (error.evalue.strip().splitlines() or [""])[-1]
    return f"in cell [{error.exec_count}] (`{first}`) with {error.ename}: {last}"


def keep_notebook(stage: Path, target: Path, stem: str) -> list[str]:
    """Moves the executed notebook to its place, where a failed one has no more business."""
    executed = target / f"results/notebooks/{stem}.ipynb"
    (stage / executed.name).replace(executed)
    executed.with_suffix(".failed.ipynb").unlink(missing_ok=True)
    return [f"results/notebooks/{stem}.ipynb"]


def run_quick(root: Path, jobs: Sequence[Job]) -> list[str]:
    """Runs the notebooks into results/quick/, which mirrors the top level; what failed."""
    failures = []
    for job in jobs:
        try:
            timed_execute(root, root / "results/quick", job)
        except ledger.TaskFailed as failure:
            failures.append(str(failure))
    return failures


def timed_execute(root: Path, target: Path, job: Job) -> tuple[list[str], float]:
    """The notebook's files and its seconds, with a line before and after."""
    print(f"{job.stem}: running", flush=True)
    start = time.monotonic()
    files = execute(root, target, job)
    seconds = time.monotonic() - start
    print(f"{job.stem}: done in {seconds:.0f} s", flush=True)
    return files, seconds


def write_html(target: Path, stems: Sequence[str]) -> None:
    """A page beside each executed notebook that has none as new."""
    for stem in stems:
        executed = target / f"results/notebooks/{stem}.ipynb"
        page = executed.with_suffix(".html")
        made = page.stat().st_mtime if page.is_file() else 0.0
        if executed.is_file() and made < executed.stat().st_mtime:
            from nbconvert import HTMLExporter

            page.write_text(HTMLExporter().from_filename(str(executed))[0], encoding="utf-8")


def run_named(
    root: Path, args: argparse.Namespace, jobs: Sequence[Job], names: Sequence[str], device: str
) -> list[str]:
    """Runs the notebooks, then the studies of these names; what failed."""
    if args.quick:
        return run_quick(root, jobs)
    notebooks = [
        ledger.Task(job.stem, job.digest, partial(timed_execute, root, root, job)) for job in jobs
    ]
    failures = ledger.run_outdated(root, notebooks, args.force, device)
    tasks = studies.tasks(root, names, fresh=args.force)
    return failures + ledger.run_outdated(root, tasks, args.force, "cpu")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Judges everything first, runs what was named, then makes the pages and the claims table."""
    args = parse(argv)
    names = select(root, args.names)
    stems, heavy = [n for n in names if n not in STUDIES], [n for n in names if n in STUDIES]
    studies.check(heavy, args)
    if args.check:
        return 0
    if args.test or args.setup:
        raise SystemExit("--test and --setup are options of ./run_all.sh; call that.")
    device = resolve_device(args.device)
    jobs = [read_job(root, stem, args, device) for stem in stems]
    target = root / "results/quick" if args.quick else root
    (target / "results").mkdir(parents=True, exist_ok=True)
    try:
        failures = run_named(root, args, jobs, heavy, device)
        write_html(target, stems)
    except KeyboardInterrupt:
        print("Interrupted; the notebooks and fits that had finished are kept.", file=sys.stderr)
        return 130
    for sentence in failures:
        print(sentence, file=sys.stderr)
    claimed = stems or any((root / f"results/claims_{name}.csv").is_file() for name in heavy)
    if claimed and not args.quick:
        claims.update_readme(root)
    return 1 if failures else 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # papermill logs the outputs
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stop request ends like Ctrl-C
    sys.exit(main())
