"""lm-eval with our model and with its own model `hf`: the same requests, the same weights, the same numbers.

    uv run --extra harness python benchmarks/lm_eval_hf.py --output benchmarks/results/lm_eval_hf.json

The requests are those of the usual multiple-choice tasks, made from the story world: five examples in front
of each question and choices of one letter (as in MMLU), five examples and whole sentences as choices (as in
ARC), and a question alone with sentences (as in HellaSwag). The two sides take turns and change who begins;
`hf` gets the batch size that is fastest for it. Prints medians of the ratios (hf / ours) as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from rlhf_data import atomic_write_json
from rlhf_eval.harness.lm_eval_model import PackedLM
from rlhf_eval.harness.suites import Question, story_questions
from rlhf_models import build_tiny_llama, train_byte_tokenizer

_SHOTS = 5
_BATCHES = (1, 4, 16)
_AGREE = 1e-3
"""Nats that a continuation's log-prob may differ by, fp32 against fp32."""


def letters(question: Question) -> str:
    """The question with lettered choices."""
    named = "\n".join(f"{'ABCDEFGH'[i]}. {choice}" for i, choice in enumerate(question.choices))
    return f"{question.text}\n{named}\nAnswer:"


def sentence(choice: str) -> str:
    """A choice as a sentence."""
    return f" the one whom the story is about was last seen in the {choice} ."


def workload(name: str, count: int) -> list[tuple[str, str]]:
    """Contexts and continuations of `count` questions, behind the same examples."""
    questions = story_questions(count + _SHOTS)
    shots, asked = questions[:_SHOTS], questions[_SHOTS:]
    if name == "letters_5_shot":
        head = "\n\n".join(f"{letters(each)} {'ABCDEFGH'[each.answer]}" for each in shots) + "\n\n"
        return [(head + letters(q), f" {'ABCDEFGH'[i]}") for q in asked for i in range(len(q.choices))]
    examples = (f"{each.text}{sentence(each.choices[each.answer])}" for each in shots)
    head = "\n\n".join(examples) + "\n\n" if name == "sentences_5_shot" else ""
    return [(head + q.text, sentence(choice)) for q in asked for choice in q.choices]


def build(folder: Path, quick: bool) -> None:
    """A random Llama of 9 million parameters, or a tiny one, with its tokenizer."""
    texts = [letters(each) + sentence(each.choices[0]) for each in story_questions(300)]
    tokenizer = train_byte_tokenizer(texts, vocab_size=300 if quick else 8192)
    size = {"hidden_size": 32, "num_layers": 2} if quick else {"hidden_size": 256, "num_layers": 8}
    size |= {"intermediate_size": 4 * size["hidden_size"], "max_position_embeddings": 2048}
    model = build_tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id, **size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def score(model: Any, pairs: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Seconds, and the log-prob of each continuation."""
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    start = time.perf_counter()
    found = model.loglikelihood(requests, disable_tqdm=True)
    return time.perf_counter() - start, [logp for logp, _ in found]


def compare(ours: Any, theirs: dict[int, Any], pairs: list[tuple[str, str]], repeats: int) -> dict[str, Any]:
    """One workload: each side as often as `repeats` says, the peer with its fastest batch size."""
    warm = {size: score(model, pairs)[0] for size, model in theirs.items()}
    best = min(warm, key=lambda size: warm[size])
    sides = {"ours": ours, "hf": theirs[best]}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    logps: dict[str, list[float]] = {}
    for turn in range(repeats):
        for name in sorted(sides, reverse=bool(turn % 2)):
            taken, logps[name] = score(sides[name], pairs)
            seconds[name].append(taken)
    difference = max(abs(a - b) for a, b in zip(logps["ours"], logps["hf"], strict=True))
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["hf"], strict=True)]
    return {
        "requests": len(pairs),
        "hf_batch_size": best,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "largest_difference": difference,
        "agree": difference < _AGREE,
    }


def main() -> int:
    """Run the workloads; 1 where the two sides computed different numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few questions")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count, repeats = (4, 1) if options.quick else (options.questions, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), options.quick)
        ours = PackedLM(folder, dtype="float32")
        theirs = {
            size: HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=size) for size in _BATCHES
        }
        names = ("letters_5_shot", "sentences_5_shot", "sentences_0_shot")
        found = {name: compare(ours, theirs, workload(name, count), repeats) for name in names}
    result = {"threads": options.threads, "questions": count, "repeats": repeats, "workloads": found}
    print(json.dumps(result, indent=2))
    if options.output:
        atomic_write_json(options.output, result)
    return 0 if all(each["agree"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
