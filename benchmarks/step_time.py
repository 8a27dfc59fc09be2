"""What one training step costs: its time, its products alone, bytes, operations, peak rates."""

import argparse
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pool
import torch
from problems import problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

import lib
from lib import train
from lib.supply import ThetaSupply

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linalg_solve_triangular")
SHARE = 0.5  # of the run that the step is taken at: warmed up, the dearest kind


class Step(NamedTuple):
    """A step of a fit, to be called again and again, and the fit's parts."""

    call: Callable[[], object]
    run: train._Run


class Recorder(TorchDispatchMode):
    """Operations below autograd: those of matrix products, and the bytes that all of them move.

    Bytes are counted as if each operation read its inputs from memory once and wrote its outputs
    there once; a view moves nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Callable, tuple, dict]] = []
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        """Run the operation and note it."""
        kwargs = dict(kwargs or {})
        if func._schema.name.removeprefix("aten::").rstrip("_") in PRODUCTS:
            self.products.append((func, *tree_map_only(Tensor, like, (args, kwargs))))
        result = func(*args, **kwargs)
        if not func.is_view:
            self.bytes += sum(map(size, tree_leaves((args, kwargs, result))))
        return result


def like(given: Tensor) -> Tensor:
    """A tensor of its own with the shape, strides and dtype of another."""
    made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return made.fill_(0.01)


def size(leaf: object) -> int:
    """Bytes of a tensor, of what it repeats once; 0 of anything else."""
    if not isinstance(leaf, Tensor):
        return 0
    own = [n for n, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride]
    return torch.Size(own).numel() * leaf.element_size()


def make_step(
    name: str, num_obs: int | None, config: lib.FitConfig, device: str, compiled: bool = False
) -> Step:
    """The step of a fit of ``problems.problem(name, num_obs)``, with fresh noise at each call.

    Its chains, which a fit makes for many steps at a time, are made here once and are not counted.
    """
    model, observations = problem(name, num_obs)
    dtype = train.DTYPES[config.dtype]
    q = train._start(model, observations, config.family, 0, None).to(device, dtype)
    grid = observations.grid(dtype, device)
    run = train._Run(model.to(dtype, device), q, grid, config, tqdm(disable=True), 0)
    generator = torch.Generator(device).manual_seed(0)
    if compiled:
        run.path_gradient = config.gradient == "path"
        run.step = torch.compile(run.new_step())
    noise = ThetaSupply(run.model, q, grid, config, generator).noise()
    size = len(noise.theta)

    def call() -> object:
        return run.take_step(SHARE, noise._replace(path=q.draw_path_noise(size, generator)))

    return Step(call, run)


@torch.no_grad()
def replay(products: list[tuple[Callable, tuple, dict]]) -> None:
    """The products alone, on tensors of their own."""
    for func, args, kwargs in products:
        func(*args, **kwargs)


def record(call: Callable[[], object]) -> Recorder:
    """One call, noted."""
    with Recorder() as recorder:
        call()
    return recorder


def flops(products: list[tuple[Callable, tuple, dict]]) -> int:
    """Floating-point operations of matrix products that were noted.

    Not counted around a step: the counter's hooks on modules cannot bear `torch.func.grad` of one.
    """
    with FlopCounterMode(display=False) as counter:
        replay(products)
    return counter.get_total_flops()


def cpu_ms(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median CPU milliseconds of each; they take turns, so that a busy machine hits all alike."""
    seconds = torch.empty(repeats, len(calls), dtype=torch.float64)
    for i in range(-3, repeats):
        for j, call in enumerate(calls):
            start = time.process_time()
            call()
            if i >= 0:  # not the warm-up
                seconds[i, j] = time.process_time() - start
    return (1e3 * seconds.median(0).values).tolist()


def clock_ms(call: Callable[[], object], repeats: int, device: str) -> float:
    """Milliseconds of a call by the clock, of many that are sent off one after another."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return 1e3 * (time.perf_counter() - start) / repeats


def peaks(device: str, side: int = 8192) -> tuple[float, float]:
    """Bytes a second of a large copy, and operations a second of a large float32 product."""
    a, b = (torch.ones(side, side, device=device) for _ in range(2))
    out = torch.empty_like(a)
    copy = clock_ms(lambda: out.copy_(a), 10, device)
    product = clock_ms(lambda: torch.mm(a, b, out=out), 10, device)
    return 2 * size(a) / (1e-3 * copy), 2 * side**3 / (1e-3 * product)


def source() -> str:
    """Fingerprint of what the numbers depend on."""
    here = Path(__file__).parent
    names = ("fits.py", "gpu.py", "problems.py", "step.py", "step_time.py")
    own = [(here / name).read_text(encoding="utf-8") for name in names]
    return hashlib.sha256("\0".join([pool.fingerprint(pool.ROOT), *own]).encode()).hexdigest()


def results(
    wanted: Mapping[str, pool.Spec], measure: pool.Measure, args: argparse.Namespace
) -> dict[str, pool.Result]:
    """What is there, and unless --finished the rest too; one at a time, or they slow each other."""
    args.workers = 1
    if args.fresh:
        args.journal.unlink(missing_ok=True)
    if not args.finished:
        return pool.run(wanted, measure, args.journal, source(), args.workers)
    found = pool.finished(wanted, args.journal, source())
    if not found:
        raise SystemExit("nothing of this version is measured yet")
    return found
