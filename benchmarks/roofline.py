"""A DPO step against the limit: how much of its time plain matrix products of its shapes alone would take.

Every linear layer of the model is, per pass of N tokens, a product forward, one more for the reference, and
two backward; the LM head is the same on the R positions that predict something. Each of these shapes is timed
alone, in the same process, by `torch.mm` and by the library that the model uses, and the faster one counts.
`share` is the sum of those times over the time of the step: the FLOP/s that the step reaches, in units of
what products of its shapes reach. Attention, element-wise operations, the optimizer and all overhead count as
time, not as work. A profile of one more step says where the time goes. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from offline_vs_trl import HH_DATA, SHAPES, describe, read_pairs, write_models
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import rlhf_algos
from rlhf_data import PreferenceDataset, PreferenceRecord, UserError, atomic_write_json
from rlhf_models import load_causal_lm, load_tokenizer
from rlhf_models.kernels.cpu_linear import product, rounding
from rlhf_models.kernels.partitioned_linear import is_linear

Shape = tuple[int, int, int]
"""Rows, inner size and columns of a product."""
_KINDS = {
    "matrix products": ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adam", "Optimizer.step", "aten::_foreach_norm"),
    "copies and gathers": (
        *("aten::copy_", "aten::index", "aten::cat", "aten::gather", "aten::scatter", "aten::clone"),
        *("aten::fill_", "aten::constant_pad"),
    ),
}


class Recorder(rlhf_algos.DPOTrainer):
    """Trains, and notes the tokens and the scored positions of every pass."""

    passes: list[tuple[int, int]]

    def loss(self, batch: Any, examples: Any) -> Any:
        """The loss; see `BaseTrainer`."""
        rows = len(batch.score_positions.unique())
        self.passes.append((batch.num_tokens, rows))
        return super().loss(batch, examples)


def products(model: Any, tokens: int, rows: int) -> Counter[Shape]:
    """The products of one pass, forward, reference and backward, by shape."""
    weight = next(model.parameters())
    tokens, rows = tokens + rounding(tokens, weight), rows + rounding(rows, weight)
    found: Counter[Shape] = Counter()
    head = model.get_output_embeddings()
    for module in model.modules():
        if is_linear(module):
            out, inner = module.weight.shape
            n = rows if module is head else tokens
            found[n, inner, out] += 2  # the policy and its reference
            found[n, out, inner] += 1  # the input's gradient
            found[out, n, inner] += 1  # the weight's
    return found


def seconds_alone(shape: Shape, repeats: int) -> dict[str, float]:
    """Median seconds of one product of a shape, by either library, one after the other in turn."""
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    ways: dict[str, Callable[[], Tensor]] = {"torch.mm": lambda: a.mm(b.T), "model": lambda: product(a, b)}
    times = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if repeat:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def where_time_goes(trained: Callable[[], Any]) -> dict[str, float]:
    """Shares of the time of a step, by kind of operation; what runs outside of operations is overhead."""
    with profile(activities=[ProfilerActivity.CPU]) as run:
        started = time.perf_counter()
        trained()
        total = time.perf_counter() - started
    shares: defaultdict[str, float] = defaultdict(float)
    for event in run.key_averages():
        kind = next((k for k, names in _KINDS.items() if event.key.startswith(names)), None)
        if kind or event.key.startswith(("aten::", "mkldnn::")):
            shares[kind or "element-wise and reductions"] += event.self_cpu_time_total / 1e6 / total
    shares["overhead"] = max(0.0, 1 - sum(shares.values()))
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, then time the shapes that occurred."""
    torch.set_num_threads(options.threads)
    size, steps = options.batch_size, options.steps
    pairs = read_pairs(options.data, (steps + 2) * size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = get_context("spawn").Process(target=write_models, args=(folder, options.shape, pairs))
        writer.start()
        writer.join()
        model = load_causal_lm(folder / "policy", dtype="float32")
        tokenizer = load_tokenizer(folder / "policy")
    config = rlhf_algos.DPOConfig(
        shuffle=False,
        per_device_train_batch_size=size,
        max_tokens_per_batch=options.max_tokens_per_batch,
        max_steps=steps + 2,
        save_steps=None,
        bf16=False,
    )
    records = [PreferenceRecord(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in pairs]
    examples = PreferenceDataset(records, tokenizer)
    trainer = Recorder(model, config, examples)
    trainer.passes = []
    seconds, shapes = [], []
    batches = [[examples[i] for i in range(at, at + size)] for at in range(0, len(examples), size)]
    for batch in batches[:-1]:
        trainer.passes.clear()
        started = time.perf_counter()
        trainer.train_step(batch)
        seconds.append(time.perf_counter() - started)
        shapes.append(sum((products(trainer.model, *sizes) for sizes in trainer.passes), Counter[Shape]()))
        print(f"step {len(seconds)}: {seconds[-1]:.2f} s", file=sys.stderr)
    seconds, shapes = seconds[1:], shapes[1:]  # the first one compiles kernels and makes optimizer state
    profiled = where_time_goes(lambda: trainer.train_step(batches[-1]))
    return report(trainer.model, seconds, shapes, profiled, options)


def report(
    model: nn.Module,
    seconds: list[float],
    shapes: list[Counter[Shape]],
    profiled: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The shares, from the steps' seconds and shapes."""
    every: Counter[Shape] = sum(shapes, Counter())
    alone = {}
    for number, shape in enumerate(sorted(every), 1):
        alone[shape] = seconds_alone(shape, options.repeats)
        print(f"shape {number} of {len(every)}: {shape}", file=sys.stderr)

    def ideal(way: Callable[[dict[str, float]], float]) -> float:
        return sum(count * way(alone[shape]) for shape, count in every.items())

    flops = sum(2 * n * k * m * count for (n, k, m), count in every.items())
    best = ideal(lambda times: min(times.values()))
    return {
        "benchmark": "roofline",
        "method": "dpo",
        "shape": options.shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": options.threads,
        **describe(),
        "steps": len(seconds),
        "seconds_per_step": statistics.median(seconds),
        "matmul_flops": flops,
        "step_gflops_per_second": flops / sum(seconds) / 1e9,
        "matmul_gflops_per_second": flops / best / 1e9,
        "torch_mm_gflops_per_second": flops / ideal(lambda times: times["torch.mm"]) / 1e9,
        "share": best / sum(seconds),
        "share_of_torch_mm": ideal(lambda times: times["torch.mm"]) / sum(seconds),
        "profile": profiled,
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110M")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs in a step (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (%(default)s)")
    parser.add_argument("--max-tokens-per-batch", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each product (default %(default)s)")
    parser.add_argument("--data", type=Path, default=HH_DATA, help="preference pairs (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="made-up texts in place of --data")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(arguments)
    if options.synthetic:
        options.data = None
    try:
        result = measure(options)
        if options.output:
            atomic_write_json(options.output, result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
