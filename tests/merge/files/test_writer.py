"""The result on disk: layout, how it gets its name, what a stopped merge left, what must not be replaced."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from raises import raises_error
from rlhf_merge.files import writer as output
from rlhf_merge.files.weights import DTYPES
from rlhf_merge.files.writer import OutputTensor, PartialModel, check_output, index_of, lay_out, write_json

PLAN = {"config": {"method": "linear"}, "files": {"a": [["0/model.safetensors", 3, 4]]}}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.tensor([1, -1])}
FILES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


def described(tensors: dict[str, Tensor]) -> list[OutputTensor]:
    return [OutputTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def begun(out: Path, plan: dict[str, Any] = PLAN, limit: int = 20, **options: Any) -> PartialModel:
    """Begin to write `TENSORS`, each to a file of its own."""
    return PartialModel(out, lay_out(described(TENSORS), limit), plan, **options)


def write(partial: PartialModel, *names: str) -> None:
    for name in names:
        values = TENSORS[name].flatten()
        partial.write(name, 1, values[1:])
        partial.write(name, 0, values[:1])
        partial.note({name: (0.1, len(name))})


def stopped(out: Path, *names: str, **options: Any) -> PartialModel:
    """A merge that wrote and flushed some tensors, and was stopped."""
    partial = begun(out, **options)
    write(partial, *names)
    partial.flush()
    partial.close()
    return partial


def finished(out: Path, **options: Any) -> list[str]:
    """The tensors that a merge that goes on finds finished; it is stopped at once."""
    return list(stopped(out, **options).finished)


def leftovers(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {out.name}


def assert_whole(out: Path) -> None:
    """The folder has all of `TENSORS`."""
    loaded = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_tensors_fill_files_in_order() -> None:
    sizes = {"a": 4, "b": 5, "c": 12, "d": 1, "e": 9}
    tensors = [OutputTensor(name, (size,), torch.uint8) for name, size in sizes.items()]
    shards = lay_out(tensors, 10)
    assert [list(shard.places) for shard in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert [shard.file for shard in shards] == FILES
    (whole,) = lay_out(tensors, 31)
    assert whole.file == "model.safetensors" and list(whole.places) == list("abcde")
    assert len(lay_out(tensors, 30)) == 2
    index = index_of(shards, 31)
    assert index["metadata"] == {"total_size": 31} and index["weight_map"]["d"] == FILES[2]
    assert list(index["weight_map"]) == sorted("abcde")


def test_files_are_safetensors(out: Path) -> None:
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES.values()}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "naïve ✓": torch.ones(1).half()}
    shards = lay_out(described(tensors), 10**9)
    partial = PartialModel(out, shards, PLAN)
    for name, tensor in tensors.items():
        partial.write(name, 0, tensor.flatten())
    partial.publish()
    path = out / "model.safetensors"
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert shards[0].places[name] % tensor.element_size() == 0, (
            "it begins at a multiple of its items' size"
        )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert path.stat().st_size == shards[0].size


@pytest.mark.parametrize("exists", [True, False])
def test_the_result_has_its_name_only_when_it_is_whole(tmp_path: Path, exists: bool) -> None:
    """An empty folder is replaced."""
    out = tmp_path / "new" / "folder" / "out"
    out.mkdir(parents=True) if exists else None
    partial = begun(out)
    write(partial, "a", "b", "c")
    partial.flush()
    assert (not out.exists() or not list(out.iterdir())) and leftovers(out) == {".out.merging"}
    (partial.folder / "config.json").write_text("{}")
    partial.publish()
    assert leftovers(out) == set()
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *FILES]
    assert_whole(out)


@needs_proc
def test_nothing_is_promised_before_it_is_on_the_disk(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors before the journal that names them, all files before the name of the folder."""
    calls: list[str] = []
    fsync, rename, journal = os.fsync, os.rename, out.parent / ".out.merging" / "journal.jsonl"

    def synced(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        calls.append("journal" if path == journal else f"{path.name} {journal.stat().st_size}")
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        calls.append(f"{old.name} is {new.name}")
        rename(old, new)
        assert journal.parent.is_dir()

    partial = begun(out)
    write(partial, "a", "b", "c")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    partial.flush()
    assert calls == [*(f"{file} 0" for file in FILES), "journal"]
    (partial.folder / "chat").mkdir()
    (partial.folder / "chat" / "x.txt").write_text("x")
    calls.clear()
    size = journal.stat().st_size
    partial.publish()
    assert sorted(calls[:4]) == sorted(f"{file} {size}" for file in [*FILES, "x.txt"])
    assert calls[-3:] == [f"model {size}", "model is out", f"{out.parent.name} {size}"]


@needs_proc
def test_files_are_closed(out: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    partial = begun(out)
    assert opened() == before + 5  # three files, the journal and the lock
    partial.close()
    assert opened() == before
    with raises_error("other_merge_interrupted") as refused:
        begun(out, {"other": 1})
    assert opened() == before and refused.value.__traceback__, "which keeps the refused object alive"
    partial = begun(out)
    write(partial, "a", "b", "c")
    partial.publish()
    assert opened() == before


def test_json_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"ü": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ü": 1}

    def stopping(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ü": 1}


def test_what_must_not_be_replaced(tmp_path: Path, out: Path) -> None:
    out.mkdir()
    check_output(out)
    (out / ".hidden").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, code in {
        out: "folder_not_empty",
        tmp_path / "file": "not_a_folder",
        tmp_path / "link": "not_a_folder",
        tmp_path / "file" / "out": "unwritable",
        tmp_path / ("x" * 300): "unwritable",
        tmp_path / "a\0b": "invalid_name",
    }.items():
        with raises_error(code, path=str(path)):
            begun(path)
    with raises_error("mount_point"):
        check_output(Path("/"))
    assert leftovers(out) == {"file", "link"}


def test_a_disk_that_is_too_small_is_refused_beforehand(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(free=1500)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    size = sum(shard.size for shard in lay_out(described(TENSORS), 10**9))
    assert 100 < size < 1500
    stopped(out.with_name("fits"), limit=10**9)
    disk.free = 100
    with raises_error("disk_full", needed=size, free=100):
        begun(out, limit=10**9)
    assert not (out.parent / ".out.merging").exists(), "nothing was written, so nothing is left"
    disk.free = 1500
    stopped(out, "a", "b", "c")
    disk.free = 0  # what is on the disk already needs no space
    begun(out).publish()
    assert_whole(out)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "unwritable")],
)
def test_errors_of_writing_are_sentences(
    out: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    partial = begun(out)
    write(partial, "a")
    partial.flush()

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with raises_error(code):
            partial.write("b", 0, TENSORS["b"])
        patch.setattr(os, "fsync", failing)
        partial.note({"b": ()})
        with raises_error(code):
            partial.flush()
    assert list(partial.finished) == ["a"]
    partial.close()
    assert finished(out) == ["a"]


def test_short_writes_are_gone_on_with(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    partial = begun(out)
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    write(partial, "a", "b", "c")
    partial.publish()
    assert_whole(out)


def test_what_is_noted_is_flushed_every_few_seconds(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = begun(out)
    write(partial, "a")
    assert partial.finished == {}, "two seconds have not passed"
    monkeypatch.setattr(output, "_FLUSH_SECONDS", 0.0)
    partial.note({})
    assert list(partial.finished) == ["a"], "those noted before too, though no tensor was finished since"
    partial.close()


def test_what_was_flushed_is_found_again(out: Path) -> None:
    partial = begun(out)
    write(partial, "a", "c")
    partial.flush()
    write(partial, "b")
    partial.close()  # b was written and not flushed
    partial.close()
    again = begun(out)
    assert again.finished == {name: (0.1, 1) for name in "ac"}
    write(again, "b")
    again.publish()
    assert_whole(out)


def test_some_tensors_of_a_file_are_found_again(out: Path) -> None:
    stopped(out, "c", limit=10**9)  # which comes first in the file, as its items are the largest
    assert finished(out, limit=10**9) == ["c"]


@pytest.mark.parametrize("cut", [1, 20, 37])
def test_a_line_that_a_kill_cut_off_is_forgotten(out: Path, cut: int) -> None:
    journal = stopped(out, "a").root / "journal.jsonl"
    whole = journal.read_bytes()
    stopped(out, "b")
    assert journal.stat().st_size > len(whole) + cut
    os.truncate(journal, len(whole) + cut)
    assert finished(out) == ["a"] and journal.read_bytes() == whole
    stopped(out, "c")
    assert finished(out) == ["a", "c"]


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[1]\n", b'{"tensor": \n', b"\xff\xfe\n"])
def test_what_follows_a_damaged_line_is_merged_again(out: Path, damage: bytes) -> None:
    journal = stopped(out, "a").root / "journal.jsonl"
    whole = journal.read_bytes()
    stopped(out, "b")
    journal.write_bytes(whole + damage + journal.read_bytes()[len(whole) :])
    assert finished(out) == ["a"] and journal.read_bytes() == whole


def test_tensors_of_a_file_that_is_gone_are_merged_again(out: Path) -> None:
    folder = stopped(out, "a", "b", "c").folder
    assert finished(out) == ["a", "b", "c"]
    (folder / FILES[0]).unlink()  # that of a
    assert finished(out) == ["b", "c"]
    assert finished(out) == ["b", "c"], "the journal forgets it too"
    os.truncate(folder / FILES[1], 50)
    assert finished(out) == ["c"]


def test_a_merge_of_something_else_is_not_gone_on_with(out: Path) -> None:
    stopped(out, "a")
    other = PLAN | {"version": "2"}
    with raises_error("other_merge_interrupted"):
        begun(out, other)
    assert finished(out) == ["a"], "a refusal discards nothing, and lets go of the lock"
    assert finished(out, plan=other, restart=True) == []
    with raises_error("other_merge_interrupted"):
        begun(out)


def test_restart_discards_what_was_written(out: Path) -> None:
    folder = stopped(out, "a", "b", "c").folder
    (folder / "old.txt").write_text("x")
    assert finished(out, restart=True) == [] and not (folder / "old.txt").exists()
    assert finished(out) == [], "the old journal is gone"


@pytest.mark.parametrize("stage", ["nothing", "lock", "folder", "half a plan", "no folder", "no journal"])
def test_a_kill_while_it_begins_or_ends_does_no_harm(out: Path, stage: str) -> None:
    """What the steps leave behind that lie between: none of it is taken for a merge with finished tensors."""
    root = out.parent / ".out.merging"
    if stage != "nothing":
        root.mkdir()
        (root / "lock").touch()
    if stage in ("folder", "half a plan", "no journal"):
        (root / "model").mkdir()
    if stage == "half a plan":
        (root / ".plan.json.part").write_text('{"config": {"me')
    if stage in ("no folder", "no journal"):
        write_json(root / "plan.json", PLAN)
    if stage == "no folder":  # it had been renamed, and the model was then moved away
        (root / "journal.jsonl").write_text('{"tensor":"a","coefficients":[]}\n')
    assert finished(out) == [] == finished(out)
    partial = begun(out)
    write(partial, "a", "b", "c")
    partial.publish()
    assert leftovers(out) == set()


def test_a_second_process_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = begun(out)
    for restart in (False, True):
        with raises_error("folder_in_use"):
            begun(out, restart=restart)
    stopped(out.with_name("out2"))
    partial.close()
    stopped(out)
    locked = output.locked

    def finished_meanwhile(path: Path, out: Path) -> Any:
        (out / "model").mkdir(parents=True)
        return locked(path, out)

    monkeypatch.setattr(output, "locked", finished_meanwhile)
    with raises_error("folder_not_empty"):
        begun(out)
