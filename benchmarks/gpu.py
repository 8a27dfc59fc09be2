"""GPU: a step eager, recorded and compiled beside its floors; seconds of a fit to good quality."""

import itertools
import sys
from collections.abc import Sequence

import pandas as pd
import pool
import step_time
import torch
from fits import assess, problem

import lib

NO_GPU = 3  # exit code
MODES = ("eager", "cuda_graph")
DRAWS = ((40, 20), (50, 0), (200, 0), (500, 0), (2000, 0))  # inner, wide
OU_LENGTHS = (1000, 10_000, 100_000)  # beside the study's own 200
FIT_STEPS = (125, 250, 500, 1000)
KL_BAR = {"ou": 0.1, "sir": 0.75}  # nats of log p(y) - ELBO
K_HAT_BAR = 0.7  # of the epidemic
REPEATS = 100
COLUMNS = ["what", "problem", "num_obs", "draws", "mode", "ms", "bytes_floor_ms", "flops_floor_ms"]
COLUMNS += ["memory_mb", "steps", "seconds", "kl", "k_hat", "good", "bytes_per_s", "flops_per_s"]
COLUMNS += ["card", "note"]


def specs(device: str, trial: int | None) -> dict[str, pool.Spec]:
    """What to measure, by label; ``trial`` are the repeats and steps that try this script."""
    sizes = [(name, None, draws) for name in KL_BAR for draws in DRAWS]
    sizes += [("ou", length, DRAWS[0]) for length in OU_LENGTHS]
    cases = list(itertools.product(sizes, MODES)) + [(sizes[0], "compiled")]
    found: dict[str, pool.Spec] = {}
    for (name, length, draws), mode in cases:
        about = {"what": "step", "problem": name, "num_obs": length, "draws": list(draws)}
        about |= {"mode": mode, "repeats": trial or REPEATS, "device": device}
        found[f"step {name} {length or ''} {draws[0]}+{draws[1]} {mode}"] = about
    for name, steps, mode in itertools.product(KL_BAR, [trial] if trial else FIT_STEPS, MODES):
        about = {"what": "fit", "problem": name, "steps": steps, "mode": mode, "device": device}
        found[f"fit {name} {steps} {mode}"] = about
    return found


def measure(spec: pool.Spec) -> pool.Result:
    """One row."""
    return measure_step(spec) if spec["what"] == "step" else measure_fit(spec)


def measure_step(spec: pool.Spec) -> pool.Result:
    """Milliseconds of a step, and the least that its bytes and its operations take.

    Both floors are counted on the eager step, at peak rates that are measured here.
    """
    device, compiled = spec["device"], spec["mode"] == "compiled"
    inner, wide = spec["draws"]
    config = lib.FitConfig(num_samples=inner, wide_samples=wide)
    about = spec["problem"], spec["num_obs"]
    eager = step_time.make_step(*about, config, device)
    recorder = step_time.record(eager.call)
    num_bytes, num_flops = recorder.bytes, step_time.flops(recorder.products)
    del eager, recorder  # their memory is not the step's
    per_byte, per_flop = step_time.peaks(device, side=8192 if device == "cuda" else 256)
    mode = "eager" if compiled else spec["mode"]
    config = lib.FitConfig(num_samples=inner, wide_samples=wide, mode=mode)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = step_time.make_step(*about, config, device, compiled)
    return {
        "ms": step_time.clock_ms(step.call, spec["repeats"], device),
        "bytes_floor_ms": 1e3 * num_bytes / per_byte,
        "flops_floor_ms": 1e3 * num_flops / per_flop,
        "memory_mb": _memory_mb(device),
        "bytes_per_s": per_byte,
        "flops_per_s": per_flop,
        "card": _card(device),
    }


def measure_fit(spec: pool.Spec) -> pool.Result:
    """Seconds of a fit by its history, and whether it is good."""
    given, name, device = problem(spec["problem"]), spec["problem"], spec["device"]
    config = lib.FitConfig(num_steps=spec["steps"], mode=spec["mode"])
    fit = lib.fit(given.model, given.observations, config, 0, device, progress=False)
    found = assess(given, fit)
    kl, k_hat = found.get("kl", float("inf")), found.get("k_hat", float("inf"))
    good = kl <= KL_BAR[name] and (name == "ou" or k_hat < K_HAT_BAR)
    result = {"seconds": found["seconds"], "kl": kl, "k_hat": k_hat, "good": good}
    return result | {"card": _card(device), "memory_mb": _memory_mb(device)}


def _card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _memory_mb(device: str) -> float:
    """Most memory that was in use on the card at a time; not known of a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan")


def table(wanted: dict[str, pool.Spec], found: dict[str, pool.Result]) -> pd.DataFrame:
    """A row for each that is measured."""
    rows = []
    for label, spec in wanted.items():
        if label in found:
            row = spec | found[label] | {"note": found[label].get("error", "")}
            if "draws" in spec:
                row["draws"] = "+".join(map(str, spec["draws"]))
            rows.append(row)
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, then writes results/gpu.csv or prints the table."""
    args = pool.parse("gpu", __doc__, argv)
    if not torch.cuda.is_available():
        print("gpu: torch finds no CUDA GPU here, so nothing is measured.", file=sys.stderr)
        return NO_GPU
    wanted = specs("cuda", args.steps)
    wanted = {label: wanted[label] for label in pool.matching(list(wanted), args.only)}
    found = step_time.results(wanted, measure, args)
    frame = table(wanted, found)
    if args.save_to is None:
        print(frame.to_string(index=False))
    else:
        pool.save(frame, found, args)
    return 0


if __name__ == "__main__":
    pool.guarded(main)
