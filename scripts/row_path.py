"""Modules that a preference row crosses in `rlhf-train dpo`, from its file to the loss, in order.

    uv run scripts/row_path.py --at-most 12

A module is on the path when one of its functions is given the row or returns it, as text, record, token ids,
packed batch or scores. What only sets the job up, runs the loop, or reports is left out, and the model's own
layers count as the model. Exit code 1: there are more modules than `--at-most`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORD = "Wollongong"
_ROWS = [
    {"prompt": f"{_WORD} lies", "chosen": " in Australia.", "rejected": " on the Moon."},
    {"prompt": f"{_WORD} is", "chosen": " a city.", "rejected": " a fish."},
]
_LEFT_OUT = (
    "rlhf_train.",
    "rlhf_algos.jobs.chat_setup",
    "rlhf_algos.jobs.models",
    "rlhf_algos.jobs.training_job",
    "rlhf_algos.engine.base_trainer",
    "rlhf_algos.engine.optimizer_step",
    "rlhf_algos.engine.step_examples",
    "rlhf_algos.engine.trained_module",
    "rlhf_algos.engine.training_method",
    "rlhf_algos.tracking.",
    "rlhf_models.attention.",
    "rlhf_models.kernels.",
    "rlhf_models.language_model.head",
)


class _Reached(BaseException):
    """The loss is computed."""


def is_row(value: Any, first_ids: list[int], depth: int = 4) -> bool:
    """Whether a value holds a row in one of its forms; every row starts with the tokens `first_ids`."""
    if isinstance(value, str | bytes):
        return (_WORD.encode() if isinstance(value, bytes) else _WORD) in value
    if hasattr(value, "input_ids"):
        return [int(token) for token in value.input_ids[: len(first_ids)]] == first_ids
    if type(value).__name__ == "TokenLogps":
        return True
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value[:4])
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return depth > 0 and any(is_row(part, first_ids, depth - 1) for part in parts)


def follow(run: Callable[[], object], first_ids: list[int]) -> list[str]:
    """Modules in the order in which they first handle a row, up to the preference loss."""
    found: dict[str, None] = {}

    def look(frame: Any, event: str, value: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("rlhf_") or module.startswith(_LEFT_OUT):
            return
        if event == "call" and frame.f_code.co_name == "dpo_loss":
            found[module] = None
            raise _Reached
        given = list(frame.f_locals.values()) if event == "call" else [value] if event == "return" else []
        if module not in found and any(is_row(each, first_ids) for each in given):
            found[module] = None

    sys.setprofile(look)
    try:
        run()
    except _Reached:
        pass
    finally:
        sys.setprofile(None)
    return list(found)


def train_and_follow() -> list[str]:
    """Modules that two rows cross in one step of a tiny model."""
    from rlhf_models import build_tiny_llama, train_byte_tokenizer
    from rlhf_train.cli import main as train

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding="utf-8")
        tokenizer = train_byte_tokenizer([text for row in _ROWS for text in row.values()], vocab_size=300)
        build_tiny_llama(len(tokenizer)).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        sets = ("eval_fraction=0", "stage_samples=0", "per_device_train_batch_size=2")
        options = [each for value in sets for each in ("--set", value)]
        sys.argv = ["rlhf-train", "dpo", "--model", f"{folder}/model", "--train-data", str(data)]
        sys.argv += ["--output-dir", f"{folder}/run", *options]
        return follow(train, tokenizer(_WORD)["input_ids"])


def main() -> int:
    """Print the modules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-most", type=int, metavar="N", help="more modules are an error")
    at_most = parser.parse_args().at_most
    with contextlib.redirect_stdout(sys.stderr):
        path = train_and_follow()
    print("\n".join(f"{number:2}  {module}" for number, module in enumerate(path, start=1)))
    return int(at_most is not None and len(path) > at_most)


if __name__ == "__main__":
    sys.exit(main())
