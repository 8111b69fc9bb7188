"""Whatever a folder holds, merging it succeeds or ends in a `MergeError`, never in anything else."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mutated_json import mutated
from proofs import by_default
from rlhf_merge import ModelMerger
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, new_workshop: Any) -> Path:
    """A base, a fine-tune in two shards with a tokenizer, an adapter of the base, and two configs."""
    workshop = new_workshop(tmp_path_factory.mktemp("pristine"))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.up.weight": (6, 4)}
    shapes |= {"model.layers.1.mlp.up.weight": (6, 4), "lm_head.weight": (8, 4)}
    flags = {"special": True, "single_word": False, "lstrip": False}
    added = {"id": 7, "content": "<x>", **flags}
    vocab = {token: index for index, token in enumerate("abcdefg")}
    config = {
        **{"num_hidden_layers": 2, "vocab_size": 8, "hidden_size": 4, "eos_token_id": [7, 1]},
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "text_config": {"num_hidden_layers": 2, "vocab_size": 8},
    }
    small = {
        "generation_config": {"eos_token_id": 7, "max_length": 20},
        "tokenizer": {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [added]},
        "tokenizer_config": {"added_tokens_decoder": {"7": added}, "auto_map": {"x": "y"}},
        "added_tokens": {"<x>": 7},
    }
    for name, shards in (("base", 1), ("tune", 2)):
        tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        folder = Path(workshop.save(name, tensors, shards=shards, **config))
        for file, content in small.items():
            (folder / f"{file}.json").write_text(json.dumps(content))
    key = "model.layers.0.mlp.up.lora_{}.weight"
    parts = {key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(6, 2)}
    lora = {"base_model_name_or_path": "../base", "rank_pattern": {"x": 3}, "alpha_pattern": {}}
    workshop.adapter("adapter", parts, **lora, use_dora=False, fan_in_fan_out=False)
    ours = {"method": "ties", "base": "base", "models": [{"model": "tune", "weight": [0.2, 0.8]}, "adapter"]}
    ours |= {"density": {"mlp": 0.5, "*": 1}, "dtype": "bfloat16", "vocab": "union", "seed": 1}
    (workshop.root / "ours.json").write_text(json.dumps(ours))
    theirs: dict[str, Any] = {"merge_method": "linear", "dtype": "float32", "tokenizer_source": "union"}
    source = [{"model": "base", "layer_range": [0, 2]}, {"model": "tune", "layer_range": [0, 2]}]
    theirs["slices"] = [{"sources": source, "parameters": {"weight": [{"filter": "mlp", "value": 1}, 0.5]}}]
    (workshop.root / "theirs.yaml").write_text(json.dumps(theirs))
    return workshop.root


TARGETS = (
    *(f"base/{name}" for name in ("config.json", "tokenizer.json", "tokenizer_config.json")),
    *(f"tune/{name}" for name in ("config.json", "tokenizer.json", "generation_config.json")),
    *("tune/model.safetensors.index.json", "adapter/adapter_config.json", "base/model.safetensors"),
    *("ours.json", "theirs.yaml", "slow/tokenizer_config.json", "slow/added_tokens.json"),
)


def damage(root: Path, target: str, rng: random.Random) -> None:
    """Damage one file; `slow` is the base with a tokenizer that is not in one file."""
    if target.startswith("slow/"):
        vocab = json.loads((root / "base" / "tokenizer.json").read_text())["model"]["vocab"]
        (root / "base" / "vocab.json").write_text(json.dumps(vocab))
        (root / "base" / "tokenizer.json").unlink()
        target = target.replace("slow", "base")
    path = root / target
    if path.suffix != ".safetensors":
        path.write_bytes(mutated(path.read_text(), rng))
        return
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = mutated(raw[8 : 8 + length].decode(), rng)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def outcome(work: Callable[[], object]) -> str:
    """`merged`, or the message of the refusal; any other error passes on."""
    try:
        work()
    except MergeError as error:
        assert str(error).strip() and "\n" not in str(error)
        return str(error)
    return "merged"


@pytest.mark.parametrize(
    "cases", by_default([range(30), range(30, 150), range(150, 1150)], range(30), proofs=[range(150, 1150)])
)
def test_damaged_json(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: range) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    for seed in cases:
        rng = random.Random(seed)
        target = TARGETS[seed % len(TARGETS)]
        for name in os.listdir(tmp_path):
            path = tmp_path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
        damage(tmp_path, target, rng)
        config = "theirs.yaml" if target == "theirs.yaml" else "ours.json"
        try:
            found.append(outcome(lambda config=config: ModelMerger(config).merge("out")))
        except BaseException as error:
            error.add_note(f"case {seed}: {target}")
            raise
    # The mutations are neither all harmless nor all fatal.
    assert 0.1 < found.count("merged") / len(found) < 0.6
    assert len(set(found)) > len(found) / 4


def test_weights_that_are_no_files(pristine: Path, tmp_path: Path) -> None:
    root = tmp_path / "r"
    shutil.copytree(pristine, root)
    weights = root / "base" / "model.safetensors"
    weights.unlink()
    for make in (weights.mkdir, lambda: weights.symlink_to(weights.name)):
        make()
        assert "base" in outcome(lambda: open_checkpoint(str(root / "base")))
        weights.unlink() if weights.is_symlink() else weights.rmdir()
    (root / "loop").symlink_to("loop")
    assert "loop" in outcome(lambda: open_checkpoint(str(root / "loop")))


@pytest.mark.parametrize("place", ["base", "base/model.safetensors", "base/config.json"])
def test_what_may_not_be_read(pristine: Path, tmp_path: Path, place: str) -> None:
    root = tmp_path / "r"
    shutil.copytree(pristine, root)
    (root / place).chmod(0)
    rights = os.geteuid()
    for folder in (root, tmp_path, *tmp_path.parents[:2]):
        if rights == 0:
            folder.chmod(0o755)
    try:
        if rights == 0:  # nobody, for whom the rights hold
            os.seteuid(65534)
        said = outcome(lambda: open_checkpoint(str(root / "base")))
    finally:
        os.seteuid(rights)
        (root / place).chmod(0o755)
    assert "cannot be read (Permission denied)" in said and str(root / "base") in said
