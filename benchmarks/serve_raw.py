"""What an engine and a reward model take for the requests of `serve.py`, each alone.

Reads names of measurements, one a line, and answers each with its seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_infer.rewards.models import ModelReward
from rlhf_models import RewardModel, load_causal_lm, load_tokenizer


def vllm_generator(folder: Path, task: dict[str, Any]) -> Callable[[list[str], int], list[list[str]]]:
    """Plain vLLM with `n` samples a request, as its users call it."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams as Request  # pyright: ignore[reportMissingImports]

    llm = LLM(str(folder / "policy"), dtype="float32", seed=0, **task["vllm"])
    tokens = task["tokens"]

    def generate(prompts: list[str], n: int) -> list[list[str]]:
        request = Request(n=n, max_tokens=tokens, min_tokens=tokens, temperature=1.0)
        outputs = llm.generate(prompts, request, use_tqdm=False)
        return [[each.text for each in output.outputs] for output in outputs]

    return generate


def vllm_async_generator(folder: Path, task: dict[str, Any]) -> Callable[[list[str], int], list[list[str]]]:
    """The asynchronous engine of vLLM, which servers need, with nothing around it."""
    from vllm import SamplingParams as Request  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    loop = asyncio.new_event_loop()
    options = {"dtype": "float32", "seed": 0, "disable_log_stats": True} | task["vllm"]

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder / "policy"), **options))

    engine = loop.run_until_complete(start())
    tokens, names = task["tokens"], itertools.count()

    async def one(prompt: str, n: int) -> list[str]:
        request = Request(n=n, max_tokens=tokens, min_tokens=tokens, temperature=1.0)
        request.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = []
        async for output in engine.generate(prompt, request, request_id=str(next(names))):
            outputs = output.outputs
        return [each.text for each in outputs]

    async def all_of(prompts: list[str], n: int) -> list[list[str]]:
        return await asyncio.gather(*(one(prompt, n) for prompt in prompts))

    return lambda prompts, n: loop.run_until_complete(all_of(prompts, n))


def transformers_generator(folder: Path, task: dict[str, Any]) -> Callable[[list[str], int], list[list[str]]]:
    """This toolkit's engine on transformers."""
    tokenizer: Any = load_tokenizer(folder / "policy")
    engine = TransformersEngine(load_causal_lm(folder / "policy"), tokenizer)
    tokens = task["tokens"]

    def generate(prompts: list[str], n: int) -> list[list[str]]:
        params = SamplingParams(tokens, min_new_tokens=tokens)
        groups = engine.generate([tokenizer(prompt)["input_ids"] for prompt in prompts], n, params)
        return [
            [tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in group] for group in groups
        ]

    return generate


GENERATORS = {
    "transformers": transformers_generator,
    "vllm": vllm_generator,
    "vllm-async": vllm_async_generator,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=GENERATORS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    task = json.loads((options.folder / "task.json").read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    generate = GENERATORS[options.backend](options.folder, task)
    prompts, n = task["prompts"], task["n"]
    texts = [text for group in generate(prompts, n) for text in group]
    reward = ModelReward(RewardModel.from_pretrained(options.folder / "reward"))
    repeated = [prompt for prompt in prompts for _ in range(n)]
    work: dict[str, Callable[[], Any]] = {
        "generate": lambda: generate(prompts, n),
        "single": lambda: generate(prompts[:1], 1),
        "score": lambda: reward(repeated, texts),
    }
    for each in work.values():
        each()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        work[line.strip()]()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
