"""Where trials take place: inputs, undisturbed results, and what a disturbed one may differ in."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import corpus
from files import metrics_of, read_json
from killed_runs import MODEL
from rlhf_data.runs.checksums import find_damage
from rlhf_models import RewardModel, build_tiny_llama, train_byte_tokenizer
from torture_trials.commands import Commands, Ended, Started

_SETTINGS: dict[str, Any] = {
    "story_rows": 26,
    "story_eval_rows": 6,
    "per_device_train_batch_size": 4,
    "max_tokens_per_batch": 200,
    "learning_rate": 3e-3,
    "eval_steps": 4,
    "save_steps": 2,
    "max_steps": 10,
}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {},
    "dpo": {},
    "kto": {},
    "grpo": {"num_generations": 2, "max_completion_length": 12, "max_tokens_per_batch": 600},
}
"""Methods with their settings beside those of all."""
_TEXTS = ["mary went to kitchen . gossip says in garden . where is mary ?", "ball moved to shed . so wrong"]
MERGES = ("ties", "dare_ties", "model_stock", "linear")


class Place:
    """A folder with the inputs of all trials.

    Args:
        folder: for everything.
        commands: starts commands.
        kept: where inputs that something failed on are kept; None for nowhere.
    """

    def __init__(self, folder: Path, commands: Commands, kept: Path | None = None) -> None:
        self.folder, self.commands, self.kept = folder, commands, kept
        self._count = 0
        self._whole: dict[str, tuple[Path, float]] = {}
        (folder / "model.yaml").write_text(MODEL)

    def new(self, name: str) -> Path:
        """A new folder's path, which does not exist."""
        self._count += 1
        return self.folder / f"{name}-{self._count}"

    def file(self, name: str, text: str) -> Path:
        """A file with this text."""
        path = self.folder / name
        path.write_text(text)
        return path

    def keep(self, kind: str, name: str, data: bytes) -> None:
        """Save an input that something failed on, in the form that the corpus of bad inputs has.

        Args:
            kind: of the corpus.
            name: the end of the file's name, such as `config.json`; none for a request.
            data: its content; models of this place get the names that the corpus has for them.
        """
        if self.kept is not None:
            data = data.replace(f"{self.folder}/".encode(), b"")
            found = f"found_{hashlib.sha256(data).hexdigest()[:8]}"
            corpus.keep(self.kept, kind, f"{found}.{name}" if name else found, data)

    def training(self, method: str, run: Path, **settings: Any) -> list[Any]:
        """The command that starts a run in a folder, or resumes it as the guide says."""
        if (run / "config.json").exists():
            return ["rlhf-train", method, "--resume", run]
        values = {**_SETTINGS, **METHODS[method], "model_config": self.folder / "model.yaml", **settings}
        words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        reward = ["--reward", "length:target=60,unit=characters"] if method == "grpo" else []
        return ["rlhf-train", method, *words, *reward, "--output-dir", run]

    def resumed(self, method: str, run: Path) -> list[tuple[Ended, tuple[int, ...]]]:
        """Resume a run, or start it again where nothing was written; the good end that it must come to.

        Empty where the run is finished, which `--resume` says.
        """
        if (run / "results.json").exists():
            return []
        return [(self.commands.finish(self.training(method, run)), (0,))]

    def merging(self, method: str, out: Path) -> list[Any]:
        """The command that merges into a folder, or goes on with it."""
        config = self.folder / f"{method}.json"
        if not config.exists():
            base, *models = self.models
            values: dict[str, Any] = {"method": method, "base": base, "models": models}
            values |= {"density": 0.5} if "ties" in method else {}
            config.write_text(json.dumps(values))
        return ["rlhf-merge", "run", config, out, "--max-shard-size", "4MB"]

    @cached_property
    def models(self) -> list[str]:
        """A base and two fine-tunes of it, of 6 MB each."""
        generator = torch.Generator().manual_seed(0)
        names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(6) for part in ("up", "down")]
        base = {name: torch.randn(512, 512, generator=generator) for name in names}
        found = []
        for name in ("base", "math", "code"):
            folder = self.folder / "models" / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 6}')
            (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
            scale = 0.0 if name == "base" else 0.1
            tensors = {
                key: (tensor + scale * torch.randn(512, 512, generator=generator)).bfloat16()
                for key, tensor in base.items()
            }
            save_file(tensors, folder / "model.safetensors")
            found.append(str(folder))
        return found

    @cached_property
    def served(self) -> Path:
        """`policy`, `reward` and `template` of a tiny server."""
        folder = self.folder / "served"
        tokenizer = train_byte_tokenizer(_TEXTS, vocab_size=300)
        options: dict[str, Any] = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "max_positions": 512,
            "initializer_range": 0.3,
        }
        build_tiny_llama(len(tokenizer), seed=1, **options).save_pretrained(folder / "policy")
        tokenizer.save_pretrained(folder / "policy")
        backbone = build_tiny_llama(len(tokenizer), seed=2, **options)
        RewardModel.from_backbone(backbone, tokenizer, seed=3).save_pretrained(folder / "reward")
        (folder / "template").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
        return folder

    def whole(self, name: str, command: Callable[[Path], list[Any]]) -> tuple[Path, float]:
        """An undisturbed result, made once, and the seconds it took."""
        if name not in self._whole:
            for _ in range(2):  # the first one loads what later ones find in memory
                path = self.new(f"whole-{name}")
                end = self.commands.finish(command(path))
                if end.code:
                    raise RuntimeError(f"the undisturbed {name} failed:\n{end.said[-3000:]}")
                self._whole[name] = path, end.seconds
        return self._whole[name]

    def whole_run(self, method: str) -> tuple[Path, float]:
        """An undisturbed training."""
        return self.whole(method, lambda path: self.training(method, path))

    def whole_merge(self, method: str) -> tuple[Path, float]:
        """An undisturbed merge."""
        return self.whole(f"merge-{method}", lambda path: self.merging(method, path))


def wait_until(condition: Callable[[], bool], started: Started) -> None:
    """Wait until a condition holds or a command has ended."""
    while started.running() and not condition():
        time.sleep(0.002)


def moment(rng: random.Random, seconds: float) -> None:
    """Wait for a random part of some seconds, and a little beyond them."""
    time.sleep(rng.uniform(0, 1.1 * seconds))


def run_differences(run: Path, other: Path) -> list[str]:
    """Results of a training that differ from those of another or are missing."""
    if not (run / "results.json").exists() or not (run / "final").is_dir():
        return [f"{run.name} has no results or no final model"]
    found = [] if metrics_of(run) == metrics_of(other) else ["metrics.jsonl differs"]
    mine, its = read_json(run / "results.json"), read_json(other / "results.json")
    found += [
        f"{key} of results.json differs" for key in ("before", "after", "steps") if mine[key] != its[key]
    ]
    found += folder_differences(run / "final", other / "final", but=("README.md",))
    if (other / "samples.jsonl").exists():
        same = (run / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
        found += [] if same else ["samples.jsonl differs"]
    return found


def folder_differences(folder: Path, other: Path, *, but: tuple[str, ...] = ()) -> list[str]:
    """Files that differ between two folders, or are in one only."""
    mine, its = contents(folder), contents(other)
    names = sorted((mine.keys() | its.keys()) - set(but))
    return [f"{folder.name}/{name} differs" for name in names if mine.get(name) != its.get(name)]


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of a folder's files by path; empty if the folder is missing."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def half_written(run: Path, other: Path) -> list[str]:
    """Files of an interrupted training that have their final name and are not whole."""
    found = []
    for checkpoint in run.glob("checkpoint-*"):
        damage = find_damage(checkpoint)
        found += [f"half-written {checkpoint.name}: {damage}"] if damage else []
    if (run / "final").exists():
        found += folder_differences(run / "final", other / "final", but=("README.md",))
    for path in run.glob("*.json"):
        try:
            read_json(path)
        except ValueError:
            found.append(f"half-written {path.name}")
    return found


def left_over(folder: Path) -> list[str]:
    """Temporary files that a finished command left."""
    return [f"{path.name} is left" for path in folder.glob(".*tmp*")]


def cleared(*paths: Path) -> None:
    """Remove what a trial made."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
