"""What a stopped merge left: the journal of finished tensors, and the lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raises import raises_error
from rlhf_merge.errors import MergeError
from rlhf_merge.files import writer as output
from rlhf_merge.files.writer import OutputTensor, PartialModel, lay_out, write_json

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


def test_some_tensors_of_a_file_are_found_again(tmp_path: Path):
    partial = begun(tmp_path / "out", limit=10**9)
    write(partial, "c")  # which comes first in the file, as its items are the largest
    partial.flush()
    partial.close()
    assert list(begun_and_closed(tmp_path / "out", limit=10**9).finished) == ["c"]


def test_what_was_flushed_is_found_again(tmp_path: Path):
    partial = begun(tmp_path / "out")
    write(partial, "a", "c")
    partial.flush()
    write(partial, "b")
    partial.close()  # b was written and not flushed
    partial.close()
    again = begun(tmp_path / "out")
    assert again.finished == {
        "a": {"tensor": "a", "coefficients": [0.1, 1]},
        "c": {"tensor": "c", "coefficients": [0.1, 1]},
    }
    write(again, "b")
    again.publish()
    loaded = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")
    assert torch.equal(loaded["a"], TENSORS["a"])


@pytest.mark.parametrize("cut", [1, 20, 37])
def test_a_line_that_a_kill_cut_off_is_forgotten(tmp_path: Path, cut: int):
    partial = begun(tmp_path / "out")
    write(partial, "a")
    partial.flush()
    journal = partial.root / "journal.jsonl"
    whole = journal.read_bytes()
    write(partial, "b")
    partial.flush()
    partial.close()
    assert len(journal.read_bytes()) > len(whole) + cut
    with open(journal, "r+b") as file:
        file.truncate(len(whole) + cut)
    again = begun(tmp_path / "out")
    assert list(again.finished) == ["a"] and journal.read_bytes() == whole
    write(again, "c")
    again.flush()
    again.close()
    assert list(begun_and_closed(tmp_path / "out").finished) == ["a", "c"]


def test_tensors_of_a_file_that_is_gone_are_merged_again(tmp_path: Path):
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.flush()
    partial.close()
    assert list(begun_and_closed(tmp_path / "out").finished) == ["a", "b", "c"]
    (partial.folder / "model-00001-of-00003.safetensors").unlink()  # that of a
    assert list(begun_and_closed(tmp_path / "out").finished) == ["b", "c"]
    assert list(begun_and_closed(tmp_path / "out").finished) == ["b", "c"], "the journal forgets it too"
    with open(partial.folder / "model-00002-of-00003.safetensors", "r+b") as file:
        file.truncate(50)
    assert list(begun_and_closed(tmp_path / "out").finished) == ["c"]


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[1]\n", b'{"tensor": \n', b"\xff\xfe\n"])
def test_what_follows_a_damaged_line_is_merged_again(tmp_path: Path, damage: bytes):
    partial = begun(tmp_path / "out")
    journal = partial.root / "journal.jsonl"
    write(partial, "a")
    partial.flush()
    whole = journal.read_bytes()
    write(partial, "b")
    partial.flush()
    partial.close()
    journal.write_bytes(whole + damage + journal.read_bytes()[len(whole) :])
    assert list(begun_and_closed(tmp_path / "out").finished) == ["a"]
    assert journal.read_bytes() == whole


def test_a_merge_of_something_else_is_not_gone_on_with(tmp_path: Path):
    partial = begun(tmp_path / "out")
    write(partial, "a")
    partial.flush()
    partial.close()
    other = PLAN | {"version": "2"}
    with raises_error("other_merge_interrupted"):
        begun(tmp_path / "out", other)
    assert list(begun_and_closed(tmp_path / "out").finished) == ["a"], "a refusal discards nothing"
    fresh = begun_and_closed(tmp_path / "out", plan=other, restart=True)
    assert fresh.finished == {}
    with raises_error("other_merge_interrupted"):
        begun(tmp_path / "out")


def test_restart_discards_what_was_written(tmp_path: Path):
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.flush()
    (partial.folder / "old.txt").write_text("x")
    partial.close()
    again = begun_and_closed(tmp_path / "out", restart=True)
    assert again.finished == {} and not (again.folder / "old.txt").exists()
    assert begun_and_closed(tmp_path / "out").finished == {}, "the old journal is gone"


@pytest.mark.parametrize("stage", ["nothing", "lock", "folder", "half a plan", "no folder", "no journal"])
def test_a_kill_while_it_begins_or_ends_does_no_harm(tmp_path: Path, stage: str):
    """What the steps leave behind that lie between: none of it is taken for a merge with finished tensors."""
    root = tmp_path / ".out.merging"
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
    for _ in range(2):
        assert begun_and_closed(tmp_path / "out").finished == {}
    partial = begun(tmp_path / "out")
    write(partial, "a", "b", "c")
    partial.publish()
    assert leftovers(tmp_path / "out") == set()


def test_a_second_process_is_refused(tmp_path: Path):
    partial = begun(tmp_path / "out")
    with raises_error("folder_in_use"):
        begun(tmp_path / "out")
    with raises_error("folder_in_use"):
        begun(tmp_path / "out", restart=True)
    begun_and_closed(tmp_path / "out2")
    partial.close()
    begun_and_closed(tmp_path / "out")


def test_a_refusal_lets_go_of_the_lock(tmp_path: Path):
    begun_and_closed(tmp_path / "out")
    with pytest.raises(MergeError) as caught:
        begun(tmp_path / "out", {"other": 1})
    assert caught.value.__traceback__ is not None, "which keeps the refused object alive"
    begun_and_closed(tmp_path / "out")


def test_one_that_waited_for_the_lock_sees_the_finished_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    locked = output.locked

    def finished_meanwhile(path: Path, out: Path) -> Any:
        (out / "model").mkdir(parents=True)
        return locked(path, out)

    monkeypatch.setattr(output, "locked", finished_meanwhile)
    with raises_error("folder_not_empty"):
        begun(tmp_path / "out")
