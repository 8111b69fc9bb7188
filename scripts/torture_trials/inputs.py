"""Mutated rows, settings and headers: refused with a sentence or used, never a traceback."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from mutated_json import mutated
from rlhf_data.worlds.story_tasks import story_records
from torture_trials.commands import Ended
from torture_trials.damage import HOWS, damage, drawn
from torture_trials.place import Place, cleared
from torture_trials.trial import Trial, judged, went_wrong

_BATCH = 4
"""Mutants of a trial."""
_BOUNDED = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))\n"
"""A mutated number may ask for more memory than the machine has."""
_CORPUS = {"training": "settings", "merge": "merges", "model": "descriptions"}
"""Kinds of the corpus of bad inputs by what is mutated."""
_KINDS = {"sft": "sft", "dpo": "preference", "reward": "preference", "kto": "kto"}


def _rows(method: str) -> list[dict[str, Any]]:
    records = story_records(_KINDS[method], 24, split="train", seed=3)
    return [{k: v for k, v in dataclasses.asdict(each).items() if v is not None} for each in records]


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


_FORMS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": _jsonl,
    "csv": _csv,
    "parquet": _parquet,
}


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to three of them, or of their stretches, changed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        start = rng.randrange(len(changed) + 1)
        end = start + rng.choice((1, 2, 16, 200))
        match rng.randrange(6):
            case 0:
                del changed[start:end]
            case 1:
                changed[start:start] = rng.randbytes(rng.choice((1, 3, 40)))
            case 2:
                changed[start:start] = changed[start:end]
            case 3:
                del changed[start:]
            case 4:
                changed[start:end] = bytes(end - start)
            case _ if start < len(changed):
                changed[start] ^= 1 << rng.randrange(8)
            case _:
                pass
    return bytes(changed)


def _finished(place: Place, words: list[Any], kind: str, mutant: Path) -> tuple[Ended, tuple[int, ...]]:
    """The end of a command that reads a mutant, which is kept if that is a bad one."""
    bound, codes = place.file("bound.py", _BOUNDED), (0, 2)
    end = place.commands.finish(words, prelude=bound)
    if went_wrong(end, codes) and mutant.exists():  # damage may have deleted it
        place.keep(kind, mutant.name if kind == "models" else mutant.suffix[1:], mutant.read_bytes())
    return end, codes


def _short(place: Place, method: str, out: Path, rng: random.Random) -> list[Any]:
    words = place.training(method, out, max_steps=1, stage_samples=0, eval_steps=0)
    return [*words, "--dry-run"] if rng.random() < 0.5 else words


def mutated_rows(place: Place, rng: random.Random) -> Trial:
    """Rows as JSON lines, CSV or Parquet."""
    form, method = rng.choice([*_FORMS]), rng.choice([*_KINDS])
    ends, data = [], _FORMS[form](_rows(method))
    for _ in range(_BATCH):
        out = place.new("run")
        file = place.folder / f"rows.{form}"
        if form == "jsonl" and rng.random() < 0.5:
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutated(lines[at].decode(), rng)
            file.write_bytes(b"\n".join(lines) + b"\n")
        else:
            file.write_bytes(spoiled(data, rng))
        words = [*_short(place, method, out, rng), "--train-data", file]
        words += rng.choice(([], ["--on-bad-row", "skip"]))
        ends.append(_finished(place, words, "rows", file))
        cleared(out)
    return _batch(f"mutated {form} rows", method, ends)


def mutated_settings(place: Place, rng: random.Random) -> Trial:
    """A config of a training or a merge as YAML or JSON, and the description of a model."""
    which = rng.choice(("training", "merge", "model"))
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-3, "story_rows": 26, "lora_r": 2}
    settings |= {"columns": {"prompt": "prompt"}, "optim": "adamw", "model_config": "model.yaml"}
    content: dict[str, Any] = {
        "training": settings,
        "merge": {"method": "ties", "base": place.models[0], "models": place.models[1:], "density": 0.5},
        "model": yaml.safe_load((place.folder / "model.yaml").read_text()),
    }[which]
    ends, form = [], rng.choice(("yaml", "json"))
    for _ in range(_BATCH):
        file, out = place.folder / f"mutant.{form}", place.new("out")
        if form == "json":
            file.write_bytes(mutated(json.dumps(content), rng))
        else:
            file.write_bytes(spoiled(yaml.safe_dump(content).encode(), rng))
        words: list[Any] = ["rlhf-train", "sft", "--config", file, "--output-dir", out, "--dry-run"]
        if which == "merge":
            words = ["rlhf-merge", "run", file, out, "--dry-run"]
        ends.append(_finished(place, words, _CORPUS[which], file))
        cleared(out)
    tried = f"mutated {form} of a {which}"
    return _batch(tried, which, ends)


def mutated_model(place: Place, rng: random.Random) -> Trial:
    """Files of a model: the header of its weights, its config, its tokenizer; it is trained, or asked."""
    ends, tried = [], rng.choice(("rlhf-train", "rlhf-serve generate"))
    prompts = place.file("prompts.jsonl", '{"prompt": "where is mary ?"}\n')
    for _ in range(_BATCH):
        model, out = place.new("model"), place.new("out")
        shutil.copytree(place.served / "policy", model)
        path = drawn(model, rng)
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = mutated(data[8 : 8 + length].decode(), rng)
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        elif path.suffix == ".json" and rng.random() < 0.7:
            path.write_bytes(mutated(path.read_text(), rng))
        else:
            damage(path, rng, HOWS)
        words: list[Any] = ["rlhf-train", "dpo", "--model", model, "--output-dir", out, "--max-steps", 1]
        words += ["--set", "story_rows=26", "--set", "per_device_train_batch_size=4"]
        if tried != "rlhf-train":
            words = ["rlhf-serve", "generate", "--model", model, "--input", prompts, "--output", out]
            words += ["--max-tokens", 4]
        ends.append(_finished(place, words, "models", path))
        cleared(model)
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    return _batch(f"mutated model, {tried}", "", ends)


def _batch(tried: str, what: str, ends: list[tuple[Ended, tuple[int, ...]]]) -> Trial:
    detail = f"{what} exit codes {[end.code for end, _ in ends]}".strip()
    return dataclasses.replace(judged(tried, ends, detail=detail), count=_BATCH)
