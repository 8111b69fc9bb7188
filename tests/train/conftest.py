"""The command as a person calls it, and rows to give it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

ROWS = [
    {
        "story": f"The {animal} slept in the {place}. A guest said it was in the attic.",
        "question": f"Where did the {animal} sleep?",
        "choices": [place, "attic", "garden"],
        "answer": place,
    }
    for animal, place in zip(
        ("cat", "dog", "hen", "fox", "owl", "pig", "ram", "cow", "elk", "bat"),
        ("barn", "hall", "shed", "yard", "loft", "cave", "hut", "nest", "well", "mill"),
        strict=True,
    )
]


@pytest.fixture
def cli(train: Callable[..., Result]) -> Callable[..., Result]:
    """Calls `rlhf-train minmax`, like `train`."""
    return functools.partial(train, "minmax")


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines, by default ten good ones; the file."""

    def write(rows: list[Any] | None = None, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [json.dumps(row, ensure_ascii=False) for row in (ROWS if rows is None else rows)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def refused(train_refused: Callable[..., str]) -> Callable[..., str]:
    """Calls `rlhf-train minmax`, like `train_refused`."""
    return functools.partial(train_refused, "minmax")


@pytest.fixture(scope="session")
def model(built_llama_folder: Path) -> Path:
    """A tiny random Llama and its tokenizer, which no test may change."""
    return built_llama_folder


@pytest.fixture
def model_folder(tmp_path: Path, byte_tokenizer: Any) -> Callable[..., Path]:
    """Saves a tiny random GPT-2 with a byte-level tokenizer; its folder."""
    from rlhf_models import tiny_model

    def save(name: str = "model", **fields: Any) -> Path:
        folder = tmp_path / name
        fields = {"n_positions": 512} | fields
        tiny_model("gpt2", vocab_size=len(byte_tokenizer), seed=3, **fields).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is most of a tiny run; only the runs that modules share draw."""
    monkeypatch.setattr("rlhf_eval.training_curves", lambda rows, keys, path, **options: path.touch())


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls `rlhf-train` in an empty folder, with an empty cache; what it printed and returned."""
    from rlhf_train.cli import main

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: Any) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def train_refused(train: Callable[..., Result], tmp_path: Path) -> Callable[..., str]:
    """Calls `rlhf-train`, expecting one sentence on stderr, exit code 2 and no file left; the sentence."""

    def call(*arguments: Any) -> str:
        before = set(tmp_path.rglob("*"))
        result = train(*arguments)
        assert result.exit_code == 2, (result.output, result.exception)
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
        left = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "cache")}
        assert left <= before
        return result.stderr.removeprefix("Error: ").strip()

    return call
