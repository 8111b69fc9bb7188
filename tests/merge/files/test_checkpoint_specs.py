"""How a model is named: folders, hub ids, and either with adapters behind it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def write_adapter(folder: Path, base: Any = None, added: float = 1.0) -> Path:
    """A LoRA of rank 1 that adds `added` to a 2 x 3 `fc`."""
    parts = {"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.full((2, 1), added)}
    write(
        folder,
        {f"base_model.model.{name}": part for name, part in parts.items()},
        "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def value(spec: Path | str) -> float:
    """The first row of `fc`, all of it one value."""
    out = torch.empty(3)
    with open_checkpoint(str(spec)) as model:
        model.tensors["fc.weight"].read(0, 3, out)
    assert out.unique().numel() == 1
    return out[0].item()


def refusal(spec: Path | str) -> str:
    with pytest.raises(MergeError) as caught:
        open_checkpoint(str(spec))
    return str(caught.value)


def test_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten in the base; adapters add 1 and 2; folders are found wherever a + may stand in their names."""
    base = write(tmp_path / "base", {"fc.weight": torch.full((2, 3), 10.0)})
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", added=2)
    odd = Path(shutil.copytree(base, tmp_path / "base+one"))
    assert [value(base), value(f"{base}+{one}"), value(f"{base}+{one}+{two}")] == [10, 11, 13]
    assert [value(odd), value(f"{odd}+{two}")] == [10, 12]
    monkeypatch.chdir(tmp_path)
    assert [value("base+one"), value("base+two"), value("base+one+two")] == [10, 12, 12]


@pytest.mark.parametrize("name", ["{}/base", "base", "../base"])
def test_an_adapter_alone_stands_for_its_base_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    base = write(tmp_path / "base", {"fc.weight": torch.full((2, 3), 10.0)})
    (base / "config.json").write_text('{"model_type": "x"}')
    adapter = write_adapter(tmp_path / "adapter", name.format(tmp_path))
    second = write_adapter(tmp_path / "second", str(adapter), added=4)
    if name == "base":
        monkeypatch.chdir(tmp_path)
    assert [value(adapter), value(second), value(f"{adapter}+{adapter}")] == [11, 15, 12]
    with open_checkpoint(str(second)) as model:
        assert model.config == {"model_type": "x"}
        assert model.folder.resolve() == base
        assert model.adapter_folders == (adapter, second)
        assert model.tokenizer_folder.resolve() == base
        assert [name for name, *_ in model.identity] == [
            "0/model.safetensors",
            "1/adapter_config.json",
            "1/adapter_model.safetensors",
            "2/adapter_config.json",
            "2/adapter_model.safetensors",
        ]
    (adapter / "tokenizer.json").touch()
    with open_checkpoint(str(second)) as model:
        assert (model.tokenizer_folder, model.adapter_folders[-1]) == (adapter, second)


def test_refused_specs(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"fc.weight": torch.ones(2, 3)})
    adapter = write_adapter(tmp_path / "adapter")
    assert "is a file; give the folder" in refusal(base / "model.safetensors")
    assert "has an empty part" in refusal(f"{base}+")
    assert f"{tmp_path}/none is not a folder here, and cannot be a hub id" in refusal(tmp_path / "none")
    assert "holds no LoRA adapter" in refusal(f"{base}+{base}")
    assert f"{adapter} is an adapter that names no base model; write BASE+{adapter}" in refusal(adapter)
    write_adapter(adapter, "/no/such/base")
    assert f"{adapter} is an adapter of /no/such/base, which is not a folder here" in refusal(adapter)
    write_adapter(adapter, str(adapter))
    assert f"{adapter} names itself as its base model" in refusal(adapter)


def test_hub_ids_in_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write(tmp_path / "base", {"fc.weight": torch.full((2, 3), 10.0)})
    adapter = write_adapter(tmp_path / "adapter", "org/base")
    asked = []

    def download(repository: str, revision: str | None) -> Path:
        asked.append((repository, revision))
        return {"org/base": base, "org/adapter": adapter}[repository]

    monkeypatch.setattr("rlhf_merge.files.checkpoint.download", download)
    assert [value("org/base@v1+org/adapter"), value("org/adapter@v2"), value(f"{base}+org/adapter")] == [
        11
    ] * 3
    assert asked == [
        *[("org/base", "v1"), ("org/adapter", None)],
        *[("org/adapter", "v2"), ("org/base", None)],
        ("org/adapter", None),
    ]


def test_the_folder_of_a_training_run_means_its_final_model(tmp_path: Path) -> None:
    """Its config.json holds the settings of the training; a model's names its type."""
    run = tmp_path / "run"
    write(run / "final", {"fc.weight": torch.full((2, 3), 10.0)})
    for text in ('{"learning_rate": 0.1}', None):
        (run / "config.json").write_text(text) if text else (run / "config.json").unlink()
        with open_checkpoint(str(run)) as model:
            assert model.folder == run / "final"
    write_adapter(run / "final" / "adapter", "..")
    assert value(f"{run}+{run / 'final' / 'adapter'}") == 11
    (run / "config.json").write_text('{"model_type": "x"}')
    assert f"{run} holds no weights" in refusal(run)
