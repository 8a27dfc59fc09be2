"""Fits in worker processes, one line of a journal each, so that a killed study goes on."""

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
CLAIM = ["claim", "paper", "ours", "verdict", "notebook"]  # columns of README's table
Spec = dict[str, object]  # what a fit depends on beside the sources, as JSON has it
Result = dict[str, object]
Measure = Callable[[Spec], Result]
# What an unstable fit raises. Anything else is a fault of the study, and stops it.
FAILURES = (ArithmeticError, RuntimeError, ValueError)


def fingerprint(root: Path) -> str:
    """SHA-256 of what a fit's numbers depend on: lib without its figures, data, and fits.py."""
    files = [*(root / "lib").rglob("*.py"), *(root / "data").rglob("*")]
    files.append(root / "benchmarks/fits.py")
    digest = hashlib.sha256()
    for path in sorted(p for p in files if p.is_file() and not p.name.startswith("plots")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def shortened(spec: Spec, trial: int | None) -> Spec:
    """A fit of so many steps, or a chain of so many draws after as many more; None: as it is."""
    if not trial:
        return spec
    return spec | ({"steps": trial} if "steps" in spec else {"draws": trial, "warmup": trial})


def key(spec: Spec, source: str) -> str:
    """Name of a fit in the journal."""
    return hashlib.sha256(json.dumps([source, spec], sort_keys=True).encode()).hexdigest()


def read_journal(path: Path) -> dict[str, Result]:
    """Results by key; a line that a kill left half written does not count."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            found[entry["key"]] = entry["result"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def append(path: Path, name: str, spec: Spec, result: Result) -> None:
    """Adds a line and has it on the disk before the next fit is reported."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        torn = not (file.read() or "\n").endswith("\n")
        entry = json.dumps({"key": name, "spec": spec, "result": result})
        file.write("\n" * torn + entry + "\n")
        file.flush()
        os.fsync(file.fileno())


def finished(specs: Mapping[str, Spec], journal: Path, source: str) -> dict[str, Result]:
    """Results of the specs that the journal holds, by the specs' labels."""
    there = read_journal(journal)
    keys = {label: key(spec, source) for label, spec in specs.items()}
    return {label: there[name] for label, name in keys.items() if name in there}


def run(
    specs: Mapping[str, Spec], measure: Measure, journal: Path, source: str, workers: int
) -> dict[str, Result]:
    """Measures each spec that the journal lacks, in their order; all results by label.

    Args:
        specs: By label; equal specs are measured once.
        measure: A function at the top of a module, as the workers import it by name.
        journal: File that gets a line as each spec is done.
        source: Fingerprint of the sources.
        workers: Processes at a time, of one thread each.
    """
    done = finished(specs, journal, source)
    todo: dict[str, tuple[str, Spec]] = {}
    for label, spec in specs.items():
        if label not in done:
            todo.setdefault(key(spec, source), (label, spec))
    print(f"{len(done)} of {len(specs)} done before, {len(todo)} to do", flush=True)
    if todo:
        # The workers import torch after this, with one thread each.
        os.environ["OMP_NUM_THREADS"] = "1"
        _run_in_workers(todo, measure, journal, workers)
    return finished(specs, journal, source)


def _run_in_workers(
    todo: Mapping[str, tuple[str, Spec]], measure: Measure, journal: Path, workers: int
) -> None:
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_be_a_worker) as pool:
        try:
            futures = {
                pool.submit(partial(attempt, measure), spec): (name, label, spec)
                for name, (label, spec) in todo.items()
            }
            for count, future in enumerate(as_completed(futures), 1):
                (name, label, spec), result = futures[future], future.result()
                append(journal, name, spec, result)
                text = f"failed, {result['error']}" if "error" in result else "done"
                text = f"{label}: {text} in {result['wall']:.0f} s"
                minutes = (time.monotonic() - start) / 60
                print(f"{count} of {len(todo)} after {minutes:.1f} min: {text}", flush=True)
        except BaseException:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second request, while this one is met
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def attempt(measure: Measure, spec: Spec) -> Result:
    """The result with its seconds, ``wall``; or the reason why there is none, ``error``."""
    start = time.monotonic()
    try:
        result = measure(spec)
    except FAILURES as error:
        result = {"error": describe(error)}
    return result | {"wall": time.monotonic() - start}


def describe(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _be_a_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The bars' own lock is between processes, and a terminated worker would leave it behind.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def parse(study: str, about: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options that the studies share."""
    parser = argparse.ArgumentParser(f"benchmarks/{study}.py", description=about)
    add, journal = parser.add_argument, ROOT / f"results/.{study}.jsonl"
    add("--only", default="*", metavar="GLOB", help="rows to make, by name; quote it")
    add("--workers", type=_count, default=os.cpu_count(), help="processes of one thread each")
    add("--steps", type=_count, help="steps of every fit, to try the script; not the study")
    add("--finished", action="store_true", help="no new fits: the rows whose fits are all there")
    add("--fresh", action="store_true", help="repeat the fits that are there")
    add("--journal", type=Path, default=journal, help="where finished fits are kept")
    add("--save-to", type=Path, help="folder for results/ and figures/; else the table is printed")
    args = parser.parse_args(argv)
    if args.fresh and args.finished:
        parser.error("--fresh and --finished exclude each other")
    if args.steps and args.save_to:
        parser.error("--steps is a trial, whose table is printed; leave out --save-to")
    return args


def _count(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more; got {text!r}")
    return int(text)


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """The names that the pattern fits; refuses one that fits none."""
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise SystemExit(f"--only {pattern} fits no row; there are {', '.join(names)}.")
    return found


def results(
    specs: Mapping[str, Spec], measure: Measure, args: argparse.Namespace
) -> dict[str, Result]:
    """What the command line asks for: all results, or those that are there."""
    source = fingerprint(ROOT)
    if args.fresh:
        args.journal.unlink(missing_ok=True)
    if not args.finished:
        return run(specs, measure, args.journal, source, args.workers)
    found = finished(specs, args.journal, source)
    if not found:
        raise SystemExit("no fit of this version of lib is finished yet")
    return found


def save(frame: pd.DataFrame, found: Mapping[str, Result], args: argparse.Namespace) -> None:
    """The table; and beside the journal the study's seconds, whatever number of sittings."""
    for folder in ("results", "figures"):
        (args.save_to / folder).mkdir(parents=True, exist_ok=True)
    name = args.journal.stem.lstrip(".")
    frame.to_csv(args.save_to / f"results/{name}.csv", index=False)
    walls = {id(result): result["wall"] for result in found.values()}  # equal specs share one
    seconds = sum(walls.values()) / args.workers
    args.journal.with_suffix(".seconds").write_text(f"{seconds:.0f}")


def guarded(main: Callable[[], int]) -> None:
    """Runs a study's main and exits; an interruption ends with a sentence."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted; the finished fits are kept, and the study goes on there.", flush=True)
        sys.exit(130)
    except BrokenProcessPool:
        sys.exit("A worker process died, perhaps for lack of memory; the finished fits are kept.")
