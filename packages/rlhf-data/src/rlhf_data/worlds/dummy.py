"""Example rows in every form that is read, for trying commands and as patterns for rows of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_data.errors import UserError
from rlhf_data.records.kind import ASSISTANT_TURN
from rlhf_data.runs.atomic import atomic_folder, ensure_writable_folder
from rlhf_data.worlds.arithmetic import arithmetic_records
from rlhf_data.worlds.story import StoryWorldConfig, generate_stories
from rlhf_data.worlds.story_tasks import story_records

DummyKind = Literal["story", "arithmetic", "chat"]
_FORM_ROWS = 16
"""Rows of each file in `forms/`."""
_MODEL_CONFIG = """\
# A small GPT-2 from scratch, for --model-config; the tokenizer is trained on the rows.
architecture: gpt2
vocab_size: 512
hidden_size: 64
num_layers: 2
num_heads: 4
intermediate_size: 256
max_seq_length: 512
"""
_FORMS_OF_PAIRS: dict[str, Callable[[str, str, str], Mapping[str, Any]]] = {
    "hh": lambda prompt, good, bad: {
        "chosen": f"\n\nHuman: {prompt}{ASSISTANT_TURN}{good}",
        "rejected": f"\n\nHuman: {prompt}{ASSISTANT_TURN}{bad}",
    },
    "implicit_prompt": lambda prompt, good, bad: {"chosen": prompt + good, "rejected": prompt + bad},
    "conversational": lambda prompt, good, bad: {
        "prompt": [_user(prompt)],
        "chosen": [_assistant(good)],
        "rejected": [_assistant(bad)],
    },
    "ultrafeedback": lambda prompt, good, bad: {
        "instruction": prompt,
        "completions": [
            {"response": bad.strip(), "overall_score": 2.0},
            {"response": good.strip(), "overall_score": 9.0},
        ],
    },
    "helpsteer3": lambda prompt, good, bad: {
        "context": [_user(prompt)],
        "response1": bad.strip(),
        "response2": good.strip(),
        "overall_preference": 2,
    },
    "pku_saferlhf": lambda prompt, good, bad: {
        "prompt": prompt,
        "response_0": good.strip(),
        "response_1": bad.strip(),
        "better_response_id": 0,
    },
}
_FORMS_OF_DEMONSTRATIONS: dict[str, Callable[[str, str], Mapping[str, Any]]] = {
    "alpaca": lambda prompt, good: {"instruction": prompt, "input": "", "output": good.strip()},
    "sharegpt": lambda prompt, good: {
        "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": good.strip()}]
    },
    "messages": lambda prompt, good: {"messages": [_user(prompt), _assistant(good)]},
    "text": lambda prompt, good: {"text": prompt + good},
}


def write_dummy_data(
    folder: str | Path, rows: int = 256, *, kind: DummyKind = "story", seed: int = 0
) -> dict[str, int]:
    """Write a folder of example rows: a file for each method, and `forms/` with a file for each form.

    Args:
        folder: made, whole or not at all; it must not exist, or be empty.
        rows: training rows of each file; a quarter as many held-out ones.
        kind: "story": stories and questions; "arithmetic": additions, without steps and questions; "chat":
            stories as chat messages.
        seed: equal arguments give equal files.

    Returns:
        Rows by file.

    Raises:
        UserError: the folder has files; fewer than two rows, or more than the world has; an unknown kind.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists and is not empty; give another folder",
            code="folder_not_empty",
            path=str(folder),
        )
    if kind not in ("story", "arithmetic", "chat"):
        raise UserError(f"kind of rows must be story, arithmetic or chat, got {kind!r}", code="unknown_kind")
    if rows < 2:
        raise UserError(f"rows must be at least 2, got {rows}", code="invalid_value", key="rows")
    files = _files(rows, kind, seed)
    ensure_writable_folder(folder.parent)
    with atomic_folder(folder) as temporary:
        (temporary / "forms").mkdir()
        for name, values in files.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values)
            (temporary / name).write_text(text, encoding="utf-8")
        (temporary / "model_config.yaml").write_text(_MODEL_CONFIG, encoding="utf-8")
        (temporary / "README.md").write_text(_readme(folder.name, kind, files), encoding="utf-8")
    return {name: len(values) for name, values in files.items()}


def _files(rows: int, kind: DummyKind, seed: int) -> dict[str, Sequence[Mapping[str, Any]]]:
    make = arithmetic_records if kind == "arithmetic" else story_records
    held_out = max(2, rows // 4)
    pairs = make("preference", rows, split="train", seed=seed)
    shown: Callable[..., dict[str, Any]] = _chat if kind == "chat" else dict
    files: dict[str, Sequence[Mapping[str, Any]]] = {
        "sft.jsonl": [
            shown(prompt=r.prompt, completion=r.completion)
            for r in make("sft", rows, split="train", seed=seed)
        ],
        "preference.jsonl": [_pair(record, shown) for record in pairs],
        "kto.jsonl": [
            shown(prompt=r.prompt, completion=r.rejected if i % 2 else r.chosen) | {"label": i % 2 == 0}
            for i, r in enumerate(pairs)
        ],
        "prompts.jsonl": [
            shown(prompt=r.prompt) | dict(r.columns) for r in make("prompt", rows, split="train", seed=seed)
        ],
        "test.jsonl": [
            _pair(record, shown) for record in make("preference", held_out, split="eval", seed=seed)
        ],
    }
    if kind != "arithmetic":
        files["prm.jsonl"] = [
            {"prompt": r.prompt, "completions": list(r.completions), "labels": list(r.labels)}
            for r in story_records("steps", rows, split="train", seed=seed)
        ]
        sides: tuple[tuple[str, int, Literal["train", "eval"]], ...]
        sides = ("qa.jsonl", rows, "train"), ("qa_test.jsonl", held_out, "eval")
        for name, count, split in sides:
            files[name] = [
                {
                    "story": r.story,
                    "question": r.question,
                    "choices": list(r.choices),
                    "answer": r.answer_text,
                }
                for r in generate_stories(StoryWorldConfig(), count, split=split, seed=seed)
            ]
    return files | _forms(pairs[:_FORM_ROWS], seed)


def _forms(pairs: Sequence[Any], seed: int) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The same few rows in every other form."""
    forms: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, pair in _FORMS_OF_PAIRS.items():
        forms[f"forms/preference-{name}.jsonl"] = [pair(r.prompt, r.chosen, r.rejected) for r in pairs]
    for name, demonstration in _FORMS_OF_DEMONSTRATIONS.items():
        forms[f"forms/sft-{name}.jsonl"] = [demonstration(r.prompt, r.chosen) for r in pairs]
    steps = story_records("steps", len(pairs), split="train", seed=seed)
    forms["forms/prm-prm800k.jsonl"] = [_prm800k(record) for record in steps]
    stories = generate_stories(StoryWorldConfig(), len(pairs), split="train", seed=seed)
    forms["forms/sft-choices.jsonl"] = [
        {
            "question": f"{r.story} {r.question}",
            "choices": {"text": list(r.choices), "label": list("ABCDEFGH"[: len(r.choices)])},
            "answerKey": "ABCDEFGH"[r.choices.index(r.answer_text)],
        }
        for r in stories
    ]
    return forms


def _prm800k(record: Any) -> Mapping[str, Any]:
    steps = [
        {
            "completions": [{"text": text, "rating": int(2 * label - 1)}],
            "chosen_completion": 0,
            "human_completion": None,
        }
        for text, label in zip(record.completions, record.labels, strict=True)
    ]
    return {"question": {"problem": record.prompt}, "label": {"steps": steps}}


def _pair(record: Any, shown: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return shown(prompt=record.prompt, chosen=record.chosen, rejected=record.rejected)


def _chat(**texts: str) -> dict[str, Any]:
    return {name: [_user(text) if name == "prompt" else _assistant(text)] for name, text in texts.items()}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text.strip()}


def _readme(name: str, kind: DummyKind, files: Mapping[str, Sequence[Any]]) -> str:
    """Text of the README: the contents of the folder, and the commands that read it."""
    reward = "exact" if kind == "arithmetic" else "choice"
    commands = {
        "sft.jsonl": f"rlhf-train sft --train-data {name}/sft.jsonl",
        "preference.jsonl": f"rlhf-train dpo --train-data {name}/preference.jsonl",
        "kto.jsonl": f"rlhf-train kto --train-data {name}/kto.jsonl",
        "prm.jsonl": f"rlhf-train prm --train-data {name}/prm.jsonl",
        "prompts.jsonl": f"rlhf-train grpo --train-data {name}/prompts.jsonl --reward {reward}",
        "qa.jsonl": f"rlhf-train minmax --train-data {name}/qa.jsonl --eval-data {name}/qa_test.jsonl",
    }
    lines = [command for file, command in commands.items() if file in files]
    lines.append(f"rlhf-train rlhf --data {name} --set sft.model_config={name}/model_config.yaml")
    table = [f"| `{file}` | {len(rows)} |" for file, rows in files.items()]
    return "\n".join(
        [
            "# Example rows",
            "",
            "From the folder that holds this one:",
            "",
            "```",
            *lines,
            "```",
            "",
            "| file | rows |",
            "|---|---|",
            *table,
            "",
        ]
    )
