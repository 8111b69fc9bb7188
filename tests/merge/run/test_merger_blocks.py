"""The arithmetic of whole models: threads, memory, progress, and what stops it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from raises import raises_error
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.run import merger as engine
from rlhf_merge.run.merger import Resources, expected_bytes, merge_tensors
from rlhf_merge.run.plan import TensorJob, make_jobs, make_plan

State = dict[str, Tensor]


class Memory:
    """Merged tensors, and what the engine said of them; each piece may take some time to write."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.tensors: State = {}
        self.pieces: list[tuple[str, int, int]] = []
        self.finished: dict[str, tuple[float, ...]] = {}
        self.begun = threading.Event()

    def write(self, name: str, element: int, values: Tensor) -> None:
        self.begun.set()
        time.sleep(self.seconds)
        self.pieces.append((name, element, len(values)))
        self.tensors.setdefault(name, torch.empty(0, dtype=values.dtype))
        if element == len(self.tensors[name]):
            self.tensors[name] = torch.cat([self.tensors[name], values])

    def note(self, finished: dict[str, tuple[float, ...]]) -> None:
        self.finished |= finished


def jobs_of(states: dict[str, State], /, **values: Any) -> list[TensorJob]:
    """The jobs of a merge in memory."""
    config = MergeConfig.from_dict(values)
    tensors = {spec: {k: MemoryTensor(t) for k, t in state.items()} for spec, state in states.items()}
    return list(make_jobs(config, tensors, config.model_specs[0]))


def merged(states: dict[str, State], threads: int = 1, /, **values: Any) -> Memory:
    sink = Memory()
    merge_tensors(jobs_of(states, **values), sink.write, sink.note, threads=threads)
    return sink


def states(*specs: str, layers: int = 4, size: int = 3000) -> dict[str, State]:
    """In each layer a small `v` and a `w` of three times its size."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        f"layers.{i}.{part}": size * times for i in range(layers) for part, times in (("v", 1), ("w", 3))
    }
    return {spec: {k: torch.randn(n, generator=generator) for k, n in sizes.items()} for spec in specs}


COPY = {"method": "linear", "models": ["a"]}


def test_tensors_are_worked_on_at_once_and_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    models, together = states("a", "b", layers=1), threading.Barrier(2, timeout=60)
    copy = MemoryTensor.read

    def meeting(self: MemoryTensor, start: int, stop: int, out: Tensor) -> None:
        together.wait()  # passes only when two threads are here
        assert torch.get_num_threads() == 1
        copy(self, start, stop, out)

    monkeypatch.setattr(MemoryTensor, "read", meeting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert len(merged(models, 2, method="linear", models=["a", "b"]).finished) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "values",
    [
        {"method": "ties", "density": 0.5},
        {"method": "model_stock"},
        {"method": "dare_ties", "density": 0.5},
        {"method": "task_arithmetic", "weight": {"mlp": 0, "*": 1}},  # what has no weight is not read
    ],
)
def test_progress_tells_every_byte(
    monkeypatch: pytest.MonkeyPatch, workshop: Any, values: dict[str, Any]
) -> None:
    monkeypatch.setattr("rlhf_merge.methods.blocks.BLOCK", 32)
    base, a, b = (
        workshop.save(name, workshop.tensors(seed, dtype=torch.bfloat16) | {"steps": torch.arange(6)})
        for seed, name in enumerate(("base", "a", "b"))
    )
    plan = make_plan(MergeConfig.from_dict({"base": base, "models": [a, b]} | values))
    counts: list[int] = []
    merge_tensors(plan.jobs, Memory().write, threads=2, on_bytes=counts.append)
    plan.close()
    assert sum(counts) == plan.bytes_read + plan.bytes_written
    assert "weight" in values or max(counts) <= 3 * 6 * 8


def test_finished_tensors_are_noted_with_their_coefficients_the_largest_first() -> None:
    models = states("base", "a", "b", layers=2)
    values = {"base": "base", "models": [{"model": "a", "weight": [1.0, 3.0]}, "b"], "method": "linear"}
    sink = merged(models, **values)
    assert sink.finished["layers.0.w"] == (0.5, 0.5)
    assert sink.finished["layers.1.v"] == (0.75, 0.25)
    sizes = [length for _, _, length in sink.pieces]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 2
    values |= {"method": "task_arithmetic", "normalize": True, "lambda": -2.0}
    coefficients = merged(models, **values).finished["layers.1.v"]
    assert coefficients == (-1.5, -0.5), "λ times the share of the weights"


def test_a_failure_ends_the_work_and_keeps_what_is_finished() -> None:
    models = states("a", layers=20)
    models["a"]["layers.3.w"][0] = float("nan")  # the fourth of the largest tensors, which come first
    sink = Memory(seconds=0.02)
    with raises_error("non_finite_value"):
        merge_tensors(jobs_of(models, **COPY), sink.write, sink.note, threads=1)
    assert {f"layers.{i}.w" for i in range(3)} <= set(sink.finished)
    assert len(sink.tensors) < 40, "half of the work was not done"


def test_a_failure_stops_what_is_at_work_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_merge.methods.blocks.BLOCK", 10)
    models = {"a": {"broken": torch.full((3000,), torch.nan), "long": torch.ones(2000)}}
    sink, read = Memory(seconds=0.01), MemoryTensor.read

    def waiting(self: MemoryTensor, start: int, stop: int, out: Tensor) -> None:
        if self.shape == (3000,):
            assert sink.begun.wait(60), "the other thread never began"
        read(self, start, stop, out)

    monkeypatch.setattr(MemoryTensor, "read", waiting)
    with raises_error("non_finite_value", tensor="broken"):
        merge_tensors(jobs_of(models, **COPY), sink.write, sink.note, threads=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]
    assert 1 <= len(sink.pieces) < 100, "of two hundred"


def test_integers_are_copied_where_they_are_equal_and_refused_where_not() -> None:
    numbers = torch.tensor([2**53 + 1, -5, 7])
    models = {spec: {"ids": numbers.clone(), "flags": torch.tensor([True, False])} for spec in ("base", "a")}
    values = {"method": "ties", "base": "base", "models": ["a"]}
    sink = merged(models, **values)
    assert torch.equal(sink.tensors["ids"], numbers) and sink.tensors["flags"].tolist() == [True, False]
    models["a"]["ids"][2] = 8
    with raises_error("different_integers", tensor="ids"):
        merged(models, **values)


@pytest.mark.parametrize(
    "method", ["ties", "dare_ties", "della", "breadcrumbs", "model_stock", "linear", "slerp"]
)
def test_empty_tensors(method: str) -> None:
    models = {spec: {"none": torch.zeros(0, 4), "one": torch.ones(())} for spec in ("base", "a", "b")}
    density = {} if method in ("linear", "slerp", "model_stock") else {"density": 0.5}
    sink = merged(models, method=method, models=["a", "b"], base="base", **density)
    assert sink.tensors["one"].tolist() == [1] and "none" in sink.finished


@pytest.mark.parametrize("values", [{"threads": 0}, {"threads": -1}, {"max_memory": 0}])
def test_resources_are_positive(values: dict[str, Any]) -> None:
    with raises_error("invalid_value", key=next(iter(values))):
        Resources(**values)


def test_threads_are_as_many_as_the_memory_allows(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, a, b = workshop.trio()
    plan = make_plan(MergeConfig.from_dict({"method": "ties", "base": base, "models": [a, b]}))
    plan.close()
    each = plan.bytes_per_thread
    assert each > 3 * 4 * 2**18, "three inputs and more, a block each"
    monkeypatch.setattr(engine, "resident_bytes", lambda: 276_000_000)  # and 24 MB later on
    monkeypatch.setattr(engine, "processors", lambda: 5)
    assert [expected_bytes(plan, threads) for threads in (1, 3)] == [300_000_000 + n * each for n in (1, 3)]
    bounds = {300_000_000 + count * each: count for count in (1, 2, 4)} | {10**12: 5}
    for bound, threads in bounds.items():
        assert Resources(max_memory=bound).threads_for(plan) == threads
        assert Resources(max_memory=bound, threads=3).threads_for(plan) == min(threads, 3)
    assert Resources(threads=7).threads_for(plan) == 7 and Resources().threads_for(plan) == 5
    for bound in (1000, 300_000_000 + each - 1):
        with raises_error("max_memory_too_small") as refused:
            Resources(max_memory=bound).threads_for(plan)
        least = refused.value.fields["least"]
        assert Resources(max_memory=least).threads_for(plan) == 1
        assert least - 10**6 < 300_000_000 + each <= least


_GROWTH = """
import re, pathlib, torch
from rlhf_merge.run.merger import resident_bytes
before, pages = resident_bytes(), pathlib.Path("/proc/self/smaps_rollup")
if pages.exists():
    found = re.search(r"Rss:\\s+(\\d+) kB", pages.read_text())
    assert found and abs(before / (int(found[1]) * 1024) - 1) < 0.05
kept = torch.ones(50_000_000, dtype=torch.uint8)
assert 40_000_000 < resident_bytes() - before < 200_000_000 and len(kept)
"""


@pytest.mark.slow
def test_resident_bytes_grows_with_what_is_used() -> None:
    """In a process of its own: here, threads of other tests may free memory meanwhile."""
    subprocess.run([sys.executable, "-c", _GROWTH], check=True)
