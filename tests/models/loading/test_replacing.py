"""Weights written over others: what is loaded afterwards is what was written last, at every moment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_algos import save_pretrained
from rlhf_data import write_checksums
from rlhf_models import load_causal_lm, save_weights, tiny_model, write_files
from rlhf_models.loading import saving
from rlhf_models.loading.replacing import replacing_weights

INDEX = "model.safetensors.index.json"


def model(seed: int):
    return tiny_model("llama", vocab_size=64, seed=seed)


def first(folder: Path) -> Tensor:
    return next(AutoModelForCausalLM.from_pretrained(folder).parameters()).detach()


def in_shards(folder: Path, seed: int, size: str = "20KB") -> None:
    with replacing_weights(folder) as place:
        model(seed).save_pretrained(place, max_shard_size=size)


@pytest.mark.slow
@pytest.mark.parametrize("old", ["one file", "shards", "same shards", "bin", "adapter"])
@pytest.mark.parametrize("new", ["one file", "shards"])
def test_the_new_weights_are_loaded_and_no_others_are_left(tmp_path: Path, old: str, new: str) -> None:
    folder = tmp_path / "model"
    if old == "adapter":
        adapted = get_peft_model(model(0), LoraConfig(target_modules=["q_proj"]))
        adapted.save_pretrained(str(folder))
    elif old == "bin":
        folder.mkdir()
        torch.save(model(0).state_dict(), folder / "pytorch_model.bin")
    elif old == "one file":
        save_weights(model(0), folder)
    else:
        in_shards(folder, 0, "20KB" if old == "same shards" else "40KB")
    (folder / "notes.txt").write_text("mine")
    write_checksums(folder)
    save_weights(model(1), folder) if new == "one file" else in_shards(folder, 1)
    assert torch.equal(first(folder), next(model(1).parameters()))
    load_causal_lm(folder)
    names = {path.name for path in folder.iterdir()} - {"config.json", "generation_config.json", "notes.txt"}
    listed = {"model.safetensors"}
    if new == "shards":
        listed = {INDEX, *json.loads((folder / INDEX).read_text())["weight_map"].values()}
    assert names - {"README.md"} == listed and (folder / "notes.txt").exists()


def test_an_adapter_takes_the_place_of_a_model_unless_that_is_its_base(tmp_path: Path) -> None:
    for base in ("elsewhere", "here"):
        save_weights(model(0), tmp_path / base)
        save_weights(model(1), tmp_path / "here")
        start = AutoModelForCausalLM.from_pretrained(tmp_path / base)
        save_pretrained(get_peft_model(start, LoraConfig(target_modules=["q_proj"])), None, tmp_path / "here")
        assert (tmp_path / "here" / "model.safetensors").exists() == (base == "here")
        assert torch.equal(first(tmp_path / "here"), next(model(1 if base == "here" else 0).parameters()))


def test_files_of_many_weights_replace_a_single_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights(model(0), tmp_path)
    monkeypatch.setattr(saving, "FILE_BYTES", 20_000)
    write_files(model(1).state_dict().items(), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(first(tmp_path), next(model(1).parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("1GB", "20KB"), ("20KB", "1GB"), ("40KB", "20KB")])
def test_a_kill_leaves_the_old_or_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, str]
) -> None:
    """Looks at the folder before every rename and removal."""
    in_shards(tmp_path, 0, sizes[0])
    seen: list[int] = []
    wanted = [next(model(seed).parameters()) for seed in (0, 1)]

    def look() -> None:
        loaded = first(tmp_path)
        seen.append(next(seed for seed in (0, 1) if torch.equal(loaded, wanted[seed])))

    replace, unlink = os.replace, Path.unlink

    def observed_replace(source: Path, target: Path) -> None:
        look()
        replace(source, target)

    def observed_unlink(path: Path, missing_ok: bool = False) -> None:
        look()
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "replace", observed_replace)
    monkeypatch.setattr(Path, "unlink", observed_unlink)
    in_shards(tmp_path, 1, sizes[1])
    look()
    assert seen == sorted(seen) and seen[-1] == 1
