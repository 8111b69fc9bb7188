"""The result on disk: layout, how it gets its name, and what it must not replace."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from raises import raises_error
from rlhf_merge.errors import MergeError
from rlhf_merge.files.weight_file import DTYPES
from rlhf_merge.files.writer import (
    DTYPE_NAMES,
    OutputTensor,
    PartialModel,
    check_output,
    index_of,
    lay_out,
    write_json,
)

PLAN = {"config": {"method": "linear"}, "files": {"a": [["0/model.safetensors", 3, 4]]}}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.tensor([1, -1])}


def described(tensors: dict[str, Tensor]) -> list[OutputTensor]:
    return [OutputTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def begun(out: Path, plan: dict[str, Any] = PLAN, limit: int = 20, **options: Any) -> PartialModel:
    return PartialModel(out, lay_out(described(TENSORS), limit), plan, **options)


def write(partial: PartialModel, *names: str) -> None:
    for name in names:
        values = TENSORS[name].flatten()
        partial.write(name, 1, values[1:])
        partial.write(name, 0, values[:1])
        partial.tensor_finished(name, coefficients=[0.1, len(name)])


def leftovers(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {out.name}


def begun_and_closed(out: Path, **options: Any) -> PartialModel:
    partial = begun(out, **options)
    partial.close()
    return partial


def assert_whole(out: Path) -> None:
    """The folder has all of `TENSORS`."""
    loaded = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_fill_files_in_order():
    tensors = [OutputTensor(name, (size,), torch.uint8) for name, size in zip("abcde", [4, 5, 12, 1, 9])]  # noqa: B905
    shards = lay_out(tensors, 10)
    assert [list(shard.places) for shard in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert [shard.file for shard in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    whole = lay_out(tensors, 31)
    assert [shard.file for shard in whole] == ["model.safetensors"] and list(whole[0].places) == list("abcde")
    assert len(lay_out(tensors, 30)) == 2
    index = index_of(shards, 31)
    assert index["metadata"] == {"total_size": 31}
    assert index["weight_map"]["d"] == "model-00003-of-00003.safetensors"
    assert list(index["weight_map"]) == sorted("abcde")


def test_files_are_safetensors(tmp_path: Path):
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "naïve ✓": torch.ones(1).half()}
    shards = lay_out(described(tensors), 10**9)
    partial = PartialModel(tmp_path / "out", shards, PLAN)
    for name, tensor in tensors.items():
        partial.write(name, 0, tensor.flatten())
    partial.publish()
    path = tmp_path / "out" / "model.safetensors"
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert path.stat().st_size == shards[0].size
    for name, place in shards[0].places.items():
        assert place % tensors[name].element_size() == 0, "tensors begin at multiples of their items' size"


def test_every_type_that_is_read_can_be_written():
    assert {name: dtype for dtype, name in DTYPE_NAMES.items()} == DTYPES


def test_the_result_has_its_name_only_when_it_is_whole(tmp_path: Path):
    out = tmp_path / "new" / "folder" / "out"
    partial = begun(out)
    write(partial, "a", "b", "c")
    partial.flush()
    assert not out.exists() and leftovers(out) == {".out.merging"}
    (partial.folder / "config.json").write_text("{}")
    partial.publish()
    assert leftovers(out) == set()
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    ]
    assert_whole(out)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_nothing_is_promised_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tensors before the journal that names them, all files before the name of the folder."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        journal = tmp_path / ".out.merging" / "journal.jsonl"
        calls.append(f"{path.name} {journal.stat().st_size}" if path != journal else "journal")
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        calls.append(f"{old.name} is {new.name}")
        rename(old, new)
        journal = tmp_path / ".out.merging"
        assert journal.is_dir()

    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    partial.flush()
    assert calls == [*(f"{file} 0" for file in files), "journal"]
    (partial.folder / "chat").mkdir()
    (partial.folder / "chat" / "x.txt").write_text("x")
    calls.clear()
    size = (partial.root / "journal.jsonl").stat().st_size
    partial.publish()
    assert sorted(calls[:4]) == sorted(f"{file} {size}" for file in [*files, "x.txt"])
    assert calls[-3:] == [f"model {size}", "model is out", f"{tmp_path.name} {size}"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_files_are_closed(tmp_path: Path):
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    partial = begun(tmp_path / "out")
    assert opened() == before + 5  # three files, the journal and the lock
    partial.close()
    assert opened() == before
    with pytest.raises(MergeError):
        begun(tmp_path / "out", {"other": 1})
    assert opened() == before
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.publish()
    assert opened() == before


def test_an_empty_folder_is_replaced(tmp_path: Path):
    (tmp_path / "out").mkdir()
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.publish()
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_json_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_json(tmp_path / "x.json", {"ü": 1})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"ü": 1}

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "x.json", {"new": 1})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"ü": 1}


def test_a_folder_that_holds_something_is_refused(tmp_path: Path):
    (tmp_path / "out").mkdir()
    check_output(tmp_path / "out")
    (tmp_path / "out" / ".hidden").touch()
    with raises_error("folder_not_empty"):
        begun(tmp_path / "out")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with raises_error("not_a_folder"):
            begun(tmp_path / name)
    with raises_error("mount_point"):
        check_output(Path("/"))
    assert leftovers(tmp_path / "out") == {"file", "link"}


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with raises_error("unwritable"):
        begun(tmp_path / "file" / "out")


def test_a_disk_that_is_too_small_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Usage:
        free = 1500

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    assert sum(shard.size for shard in lay_out(described(TENSORS), 10**9)) < 1500
    begun_and_closed(tmp_path / "fits", limit=10**9)
    Usage.free = 100
    with raises_error("disk_full"):
        begun(tmp_path / "out")
    assert not (tmp_path / ".out.merging").exists(), "nothing was written, so nothing is left"


def test_what_is_on_the_disk_already_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.flush()
    partial.close()

    class Usage:
        free = 0

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    begun(tmp_path / "out").publish()
    assert_whole(tmp_path / "out")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EIO, "unwritable"),
    ],
)
def test_errors_of_writing_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
):
    partial = begun(tmp_path / "out")
    write(partial, "a")
    partial.flush()

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with raises_error(code):
            partial.write("b", 0, TENSORS["b"])
        patch.setattr(os, "fsync", failing)
        partial.tensor_finished("b")
        with raises_error(code):
            partial.flush()
    assert list(partial.finished) == ["a"]
    partial.close()
    assert list(begun_and_closed(tmp_path / "out").finished) == ["a"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pwrite = os.pwrite
    partial = begun(tmp_path / "out")
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    write(partial, "a", "b", "c")
    partial.publish()
    loaded = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")
    assert torch.equal(loaded["a"], TENSORS["a"])
