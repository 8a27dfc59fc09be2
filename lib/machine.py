"""The machine of a fit: its device, and the process while it trains."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def choose_device(device: str) -> str:
    """Resolve ``"auto"``; refuse what is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}.")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("device 'cuda' was asked for, but no CUDA GPU is available. Use 'cpu'.")
    return "cuda" if available and device != "cpu" else "cpu"


def check_mode(mode: str, device: str) -> None:
    """Refuse a step that this device cannot run."""
    if mode == "cuda_graph" and device != "cuda":
        raise ValueError(
            f"mode 'cuda_graph' needs a CUDA GPU; got device {device!r}. Use mode='eager'."
        )


@contextlib.contextmanager
def settled(threads: int) -> Iterator[None]:
    """Train with so many threads and without denormals, then put the process back."""
    before, flushed = torch.get_num_threads(), flushes_denormals()
    frozen = gc.get_freeze_count() > 0
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    if not frozen:  # else the caller did, and to thaw what is ours would thaw theirs
        gc.freeze()  # what is there already need not be looked at again and again
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        torch.set_num_threads(before)
        torch.set_flush_denormal(flushed)


def flushes_denormals() -> bool:
    """Whether the process takes denormals for 0; torch sets this, but does not tell it."""
    return float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0


def keep_freed_memory() -> None:
    """For the rest of the process, glibc keeps freed blocks of up to 32 MB, 512 MB in all.

    It would give them back and then meet a page fault in every 4 KB of them in the next step:
    some 1,200 a step, a sixth of its time. Where there is no glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 512 * 2**20)
