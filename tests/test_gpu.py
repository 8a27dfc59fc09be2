"""What a step costs: bytes, products, floors; the tables of the step and GPU studies, tiny."""

import sys

import pandas as pd
import pytest
import torch
from run import ROOT
from torch.utils.flop_counter import FlopCounterMode

import lib

sys.path.insert(0, str(ROOT / "benchmarks"))  # as its scripts find each other
import gpu
import problems
import step
import step_time

TINY = {"problem": "ou", "num_obs": 4, "draws": [3, 1], "repeats": 1, "device": "cpu"}


def work() -> torch.Tensor:
    """A product with a transposed matrix, a view of it, a sum with a number that is repeated."""
    product = torch.ones(2, 3) @ torch.ones(4, 3).T
    return product.view(8) + torch.ones(1).expand(8)


def test_bytes_are_those_of_inputs_and_outputs_and_a_view_is_free():
    """Kills views that count, what is repeated counted as if it lay in memory, a side left out."""
    ones, product, total = 6 + 12 + 1, 6 + 12 + 8, 8 + 1 + 8
    assert step_time.record(work).bytes == 8 * (ones + product + total)


def test_only_products_are_recorded_with_shapes_strides_and_dtype():
    """Kills a product replayed on contiguous tensors, or on the step's own instead of new ones."""
    ((func, args, kwargs),) = step_time.record(work).products
    assert func._schema.name == "aten::mm" and kwargs == {}
    assert [(tuple(a.shape), a.stride()) for a in args] == [((2, 3), (3, 1)), ((3, 4), (1, 3))]
    assert all(a.dtype == torch.float64 and (a == 0.01).all() for a in args)
    assert step_time.flops(step_time.record(work).products) == 2 * 2 * 3 * 4


def test_every_product_of_a_step_is_replayed_and_moves_no_weight():
    """Kills a kind of product that is left out: the names that the flop counter knows, and more."""
    config = lib.FitConfig(num_samples=3, wide_samples=1)
    given = step_time.make_step("ou", 4, config, "cpu")
    recorder = step_time.record(given.call)
    kinds = {func._schema.name.removeprefix("aten::").rstrip("_") for func, *_ in recorder.products}
    assert {"mm", "bmm", "baddbmm", "linalg_solve_triangular"} <= kinds <= set(step_time.PRODUCTS)
    before = [part.detach().clone() for part in given.run.optimizer.state()]
    step_time.replay(recorder.products)
    assert all(map(torch.equal, before, given.run.optimizer.state()))
    assert given.run.path_gradient
    given.call()
    assert not any(map(torch.equal, before[:3], given.run.optimizer.state()[:3]))
    with FlopCounterMode(display=False) as counter:
        given.call()
    assert counter.get_total_flops() == step_time.flops(recorder.products)


def test_operations_of_a_step_with_a_positive_state_are_counted():
    """Kills a counter around the step, which fails where `torch.func.grad` meets its hooks."""
    given = step_time.make_step("sir", None, lib.FitConfig(num_samples=2, wide_samples=1), "cpu")
    hidden, layers = given.run.q.family.hidden, given.run.q.family.num_flows
    once = 2 * 3 * len(given.run.q.loc0) * hidden**2 * layers
    # From layer to layer: forwards, two ways back, and each of the Jacobian's three rows.
    assert step_time.flops(step_time.record(given.call).products) > (1 + 2 + 3) * once


def test_times_are_of_each_call_in_turn():
    """Kills a warm-up that counts, and calls that are not repeated alike."""
    seen: list[int] = []
    slow = step_time.cpu_ms([lambda: seen.append(1), lambda: sum(range(100_000))], 5)
    assert len(seen) == 8 and slow[0] < slow[1]
    assert step_time.clock_ms(lambda: seen.append(2), 4, "cpu") > 0 and seen.count(2) == 7


def test_peaks_are_rates():
    """Kills milliseconds taken for seconds: a machine copies 10 MB to 1 PB a second."""
    per_byte, per_flop = step_time.peaks("cpu", side=128)
    assert 1e7 < per_byte < 1e15 and 1e7 < per_flop < 1e15


def test_gpu_study_covers_draws_lengths_and_both_ways():
    found = gpu.specs("cuda", None)
    steps = [spec for spec in found.values() if spec["what"] == "step"]
    draws = [sum(spec["draws"]) for spec in steps if spec["problem"] == "sir"]
    assert min(draws) == 50 and 60 in draws and max(draws) == 2000
    assert {spec["num_obs"] for spec in steps} == {None, 1000, 10_000, 100_000}
    assert {spec["mode"] for spec in steps} == {"eager", "cuda_graph", "compiled"}
    assert sum(spec["mode"] == "compiled" for spec in steps) == 1
    assert len({str(spec) for spec in found.values()}) == len(found)


def test_a_step_is_measured_beside_its_floors(monkeypatch):
    """Kills a floor in seconds, and one of the other rate."""
    monkeypatch.setattr(step_time, "peaks", lambda device, side: (1e9, 1e12))
    row = gpu.measure(TINY | {"what": "step", "mode": "eager"})
    config = lib.FitConfig(num_samples=3, wide_samples=1)
    call = step_time.make_step("ou", 4, config, "cpu").call
    recorder = step_time.record(call)
    assert row["bytes_floor_ms"] == pytest.approx(1e-6 * recorder.bytes)
    assert row["flops_floor_ms"] == pytest.approx(1e-9 * step_time.flops(recorder.products))
    assert row["ms"] > 0 and row["card"] == "cpu"


@pytest.mark.parametrize(
    ("name", "kl", "k_hat", "good"),
    [
        ("ou", 0.1, 0.9, True),
        ("ou", 0.11, 0.1, False),
        ("sir", 0.75, 0.69, True),
        ("sir", 0.75, 0.7, False),
        ("sir", 0.76, 0.1, False),
        ("ou", None, None, False),
    ],
)
def test_a_fit_is_good_at_the_bars(monkeypatch, name, kl, k_hat, good):
    """Kills a bar that leaves out its end, and a fit without numbers that counts as good."""
    numbers = {"seconds": 1.0} | ({} if kl is None else {"kl": kl, "k_hat": k_hat})
    monkeypatch.setattr(gpu, "assess", lambda *_: numbers)
    monkeypatch.setattr(lib, "fit", lambda *_, progress: None)
    spec = {"what": "fit", "problem": name, "steps": 3, "mode": "eager", "device": "cpu"}
    row = gpu.measure(spec)
    assert row["good"] == good and row["seconds"] == 1.0
    frame = gpu.table({"a": spec, "b": spec}, {"a": row, "b": {"error": "ValueError: no"}})
    assert frame.note.tolist() == ["", "ValueError: no"] and list(frame) == gpu.COLUMNS


def test_without_a_gpu_nothing_is_measured_or_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--save-to", str(tmp_path), "--journal", str(tmp_path / ".gpu.jsonl")]) == 3
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == (
        "gpu: torch finds no CUDA GPU here, so nothing is measured.\n"
    )


def test_step_study_measures_and_tells_the_bars(monkeypatch):
    """Kills a ratio upside down, and a bar that is met by one of its two halves."""
    monkeypatch.setattr(step_time, "problem", lambda name, _: problems.problem(name, 4))
    wanted = {"a": {"problem": "ou", "draws": [50, 0], "repeats": 1}}
    result = step.measure(wanted["a"])
    assert result["gflop"] > 0 and result["step_ms"] > result["update_ms"] > 0
    for whole, alone, met in ((12.0, 2.5, True), (12.1, 9.0, False), (11.0, 2.0, False)):
        frame = step.table(wanted, {"a": result | {"step_ms": whole, "products_ms": alone}})
        assert frame.ratio.tolist() == [round(whole / alone, 3)]
        (words,) = step.verdicts(frame)
        assert words.endswith(": met." if met else ": not met.")
    assert step.verdicts(step.table(wanted, {"a": {"error": "no"}})) == [
        "OU, 50 draws: nan ms (bar 12), nan times its products (bar 5, aim 3): not met."
    ]
    assert isinstance(step.table(wanted, {}), pd.DataFrame)


def test_step_studys_cases_are_the_default_and_the_papers_draws():
    assert list(step.specs(None)) == ["ou 40 + 20", "ou 50 + 0", "sir 40 + 20", "sir 50 + 0"]
    default = lib.FitConfig()
    assert step.DRAWS[0] == (default.num_samples, default.wide_samples)
    assert {spec["repeats"] for spec in step.specs(7).values()} == {7}
