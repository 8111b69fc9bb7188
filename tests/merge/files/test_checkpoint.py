"""Models on disk: how one is named, which of its files are read, and what is refused."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from raises import raises_error
from rlhf_merge.files.checkpoint import open_checkpoint

TEN = {"fc.weight": torch.full((2, 3), 10.0)}


def write(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name) if name.endswith(".safetensors") else torch.save(tensors, folder / name)
    return folder


def write_shards(folder: Path, shards: list[dict[str, Tensor]], kind: str = "safetensors") -> Path:
    stem, last = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.{last}"
        write(folder, tensors, name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / f"{stem}.{last}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def value(spec: Any, name: str = "fc.weight") -> float:
    """The one value of three numbers of a tensor."""
    out = torch.empty(3)
    with open_checkpoint(str(spec)) as model:
        model.tensors[name].read(0, 3, out)
    assert out.unique().numel() == 1
    return out[0].item()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_one_model(tmp_path: Path, kind: str) -> None:
    shards = [{"b": torch.full((3,), 5.0), "d": torch.ones(2).half()}, {"a": torch.ones(3)}]
    with open_checkpoint(str(write_shards(tmp_path, shards, kind))) as model:
        assert list(model.tensors) == ["b", "d", "a"]
        files = [name for name, *_ in model.identity]
    assert value(tmp_path, "b") == 5
    assert len(files) == 3 and files[0].endswith(".index.json")
    assert all(name.startswith("0/") for name in files)


def test_of_two_copies_the_one_the_index_names_is_read(tmp_path: Path) -> None:
    """The map has the last of both shards for b; then the first."""
    shards = [{"b": torch.ones(3), "a": torch.ones(1)}, {"b": torch.zeros(3), "c": torch.ones(1)}]
    index = write_shards(tmp_path, shards) / "model.safetensors.index.json"
    for number, expected in ((2, 0), (1, 1)):
        weight_map = json.loads(index.read_text())["weight_map"]
        weight_map["b"] = f"model-0000{number}-of-00002.safetensors"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert value(tmp_path, "b") == expected


def test_one_file_and_its_identity(tmp_path: Path) -> None:
    """Safetensors go before bin; of any name, if it is the only file."""
    write(tmp_path, {"a": torch.zeros(2)}, "pytorch_model.bin")
    status = (write(tmp_path, {"a": torch.ones(3)}) / "model.safetensors").stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    with open_checkpoint(str(tmp_path)) as model:
        assert model.identity == [("0/model.safetensors", status.st_size, *times, status.st_ino)]
        assert (model.folder, model.tokenizer_folder, model.adapter_folders) == (tmp_path, tmp_path, ())
        assert model.config == {} and list(model.tensors) == ["a"]
    assert list(model.tensors) == []
    assert value(tmp_path, "a") == 1
    assert value(write(tmp_path / "m", TEN, "consolidated.safetensors")) == 10


def test_a_file_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    weights = write(tmp_path, TEN) / "model.safetensors"
    good = weights.read_bytes()
    entry = {"size": len(good), "crc32": f"{zlib.crc32(good):08x}"}
    listed = tmp_path / "checksums.json"
    listed.write_text(json.dumps({"files": {weights.name: entry}}))
    assert value(tmp_path) == 10
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good + b" "):
        weights.write_bytes(damaged)
        with raises_error("damaged_model"):
            open_checkpoint(str(tmp_path))
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for of_others in ([], {}, {"files": []}, {"files": {weights.name: "abc"}}, {"files": {"other": entry}}):
        listed.write_text(json.dumps(of_others))
        assert value(tmp_path) == 10  # of its first numbers; the flipped bit is in the last one
    ours = json.dumps({"files": {weights.name: {"size": 1}, "other": entry}})
    for damaged in ("", ours[:-1], ours):
        listed.write_text(damaged)
        with raises_error("damaged_model", path=str(listed)):
            open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (None, "damaged_file"),
        ({"b": "../other.safetensors"}, "file_outside_folder"),
        ({"b": ""}, "file_outside_folder"),
        ({"b": "model-3.safetensors"}, "missing_value"),
        ({"b": "x" * 300 + ".safetensors"}, "unreadable_file"),
        ({"b": "config.json"}, "unknown_file_type"),
        ({"d": "model-00002-of-00002.safetensors"}, "damaged_file"),  # which has no d
        ({"c": None}, "damaged_file"),  # which the first file holds
    ],
)
def test_damaged_indices(tmp_path: Path, changes: dict[str, Any] | None, code: str) -> None:
    index = write_shards(tmp_path, [{"a": torch.ones(2), "c": torch.ones(2)}, {"b": torch.ones(3)}])
    index /= "model.safetensors.index.json"
    (tmp_path / "config.json").write_text("{}")
    weight_map = json.loads(index.read_text())["weight_map"] | (changes or {})
    kept = {name: file for name, file in weight_map.items() if file is not None}
    index.write_text(json.dumps({"weight_map": {} if changes is None else kept}))
    with raises_error(code):
        open_checkpoint(str(tmp_path))


def test_folders_in_which_the_weights_are_not_found(tmp_path: Path) -> None:
    for name in (None, "model.Q4.gguf"):
        (tmp_path / name).touch() if name else None
        with raises_error("no_weights", path=str(tmp_path)) as error:
            open_checkpoint(str(tmp_path))
        assert name is None or name in str(error.value)
    for number in (1, 2):
        write(tmp_path, {"a": torch.ones(1)}, f"model-0000{number}-of-00002.safetensors")
        with raises_error("missing_index"):
            open_checkpoint(str(tmp_path))
    write_shards(tmp_path, [{"a": torch.ones(1)}])
    write(tmp_path, {"a": torch.ones(1)})
    with raises_error("ambiguous_weights"):
        open_checkpoint(str(tmp_path))


def test_quantised_models(tmp_path: Path) -> None:
    write(tmp_path, {"h.0.fc.qweight": torch.ones(2).int()})
    for config in ("{}", '{"quantization_config": {"quant_method": "gptq"}}'):
        (tmp_path / "config.json").write_text(config)
        with raises_error("quantized_model", path=str(tmp_path)):
            open_checkpoint(str(tmp_path))


def adding(workshop: Any, name: str, base: Any = None, added: float = 1.0) -> Path:
    """A LoRA of rank 1 that adds `added` to a 2 x 3 `fc`."""
    parts = {"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.full((2, 1), added)}
    return Path(workshop.adapter(name, parts, r=1, lora_alpha=1, base_model_name_or_path=base))


def test_specs(workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten in the base; adapters add 1 and 2; folders are found wherever a + may stand in their names."""
    base = write(tmp_path / "base", TEN)
    one, two = adding(workshop, "one"), adding(workshop, "two", added=2)
    odd = Path(shutil.copytree(base, tmp_path / "base+one"))
    assert [value(base), value(f"{base}+{one}"), value(f"{base}+{one}+{two}")] == [10, 11, 13]
    assert [value(odd), value(f"{odd}+{two}")] == [10, 12]
    monkeypatch.chdir(tmp_path)
    assert [value("base+one"), value("base+two"), value("base+one+two")] == [10, 12, 12]


@pytest.mark.parametrize("name", ["{}/base", "base", "../base"])
def test_an_adapter_alone_stands_for_its_base_and_itself(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    base = write(tmp_path / "base", TEN)
    (base / "config.json").write_text('{"model_type": "x"}')
    adapter = adding(workshop, "adapter", name.format(tmp_path))
    second = adding(workshop, "second", str(adapter), added=4)
    if name == "base":
        monkeypatch.chdir(tmp_path)
    assert [value(adapter), value(second), value(f"{adapter}+{adapter}")] == [11, 15, 12]
    with open_checkpoint(str(second)) as model:
        assert model.config == {"model_type": "x"} and model.adapter_folders == (adapter, second)
        assert model.folder.resolve() == base == model.tokenizer_folder.resolve()
        adapted = [
            f"{i}/{file}" for i in (1, 2) for file in ("adapter_config.json", "adapter_model.safetensors")
        ]
        assert [name for name, *_ in model.identity] == ["0/model.safetensors", *adapted]
    (adapter / "tokenizer.json").touch()
    with open_checkpoint(str(second)) as model:
        assert (model.tokenizer_folder, model.adapter_folders[-1]) == (adapter, second)


def test_refused_specs(workshop: Any, tmp_path: Path) -> None:
    base, adapter = write(tmp_path / "base", TEN), adding(workshop, "adapter")
    itself = adding(workshop, "itself", str(tmp_path / "itself"))
    lost = adding(workshop, "lost", "/no/such/base")
    for spec, code in {
        base / "model.safetensors": "not_a_folder",
        f"{base}+": "invalid_name",
        tmp_path / "none": "model_not_found",
        f"{base}+{base}": "missing_adapter",
        adapter: "missing_value",
        lost: "model_not_found",
        itself: "invalid_name",
        tmp_path / ("x" * 300): "model_not_found",
    }.items():
        with raises_error(code):
            open_checkpoint(str(spec))


def test_parts_may_be_on_the_hub(workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = write(tmp_path / "base", TEN), adding(workshop, "adapter", "org/base")
    asked = []

    def download(repository: str, revision: str | None) -> Path:
        asked.append((repository, revision))
        return {"org/base": base, "org/adapter": adapter}[repository]

    monkeypatch.setattr("rlhf_merge.files.checkpoint.download", download)
    specs = ("org/base@v1+org/adapter", "org/adapter@v2", f"{base}+org/adapter")
    assert [value(spec) for spec in specs] == [11, 11, 11]
    first, second = [("org/base", "v1"), ("org/adapter", None)], [("org/adapter", "v2"), ("org/base", None)]
    assert asked == [*first, *second, ("org/adapter", None)]


def test_the_folder_of_a_training_run_means_its_final_model(workshop: Any, tmp_path: Path) -> None:
    """Its config.json holds the settings of the training; a model's names its type."""
    run = tmp_path / "run"
    write(run / "final", TEN)
    for text in ('{"learning_rate": 0.1}', None):
        (run / "config.json").write_text(text) if text else (run / "config.json").unlink()
        with open_checkpoint(str(run)) as model:
            assert model.folder == run / "final"
    adapter = adding(workshop, "run/final/adapter", "..")
    assert value(f"{run}+{adapter}") == 11
    (run / "config.json").write_text('{"model_type": "x"}')
    with raises_error("no_weights", path=str(run)):
        open_checkpoint(str(run))
