import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from raises import raises_error
from rlhf_data import (
    UserError,
    atomic_folder,
    atomic_write_json,
    atomic_write_text,
    ensure_writable_folder,
    json_hash,
)
from rlhf_data.runs.atomic import explain_full_disk, finite, remove_folder, remove_stale_temps


def test_write_replaces_whole_content(tmp_path):
    path = tmp_path / "a" / "b.txt"
    atomic_write_text(path, "one\nlong line")
    atomic_write_text(path, "zwei ü\n")
    assert path.read_bytes() == "zwei ü\n".encode()
    assert os.listdir(path.parent) == ["b.txt"]


def test_failed_write_keeps_the_old_content(tmp_path):
    path = tmp_path / "a.json"
    atomic_write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic_write_json(path, {"x": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_folder_appears_only_on_success(tmp_path):
    target = tmp_path / "checkpoint-1"
    with atomic_folder(target) as temp:
        (temp / "sub").mkdir()
        (temp / "sub" / "x").write_text("1", encoding="utf-8")
        assert not target.exists()
    assert (target / "sub" / "x").read_text(encoding="utf-8") == "1"
    with atomic_folder(target) as temp:
        (temp / "y").write_text("2", encoding="utf-8")
    assert os.listdir(target) == ["y"]
    with pytest.raises(RuntimeError), atomic_folder(target) as temp:
        (temp / "z").write_text("3", encoding="utf-8")
        raise RuntimeError
    assert os.listdir(target) == ["y"]
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_stale_temps_of_a_killed_process_are_removed(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from rlhf_data.runs.atomic import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as temp:\n"
        "    (temp / 'x').write_text('1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "checkpoint-1")], check=False)
    assert done.returncode == -9
    with atomic_folder(tmp_path / "checkpoint-2") as own:
        removed = remove_stale_temps(tmp_path)
        assert own.exists()
    assert any(path.name.startswith(".checkpoint-1.tmp-") for path in removed)
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_stale_temp_under_our_own_process_number_is_removed(tmp_path):
    (tmp_path / f".config.json.tmp-{os.getpid()}-otherlife-0").write_text("", encoding="utf-8")
    (tmp_path / ".config.json.tmp-notes").write_text("", encoding="utf-8")
    remove_stale_temps(tmp_path)
    assert os.listdir(tmp_path) == [".config.json.tmp-notes"]


def test_what_another_machine_may_be_writing_stays(tmp_path):
    """A process of another machine has a number that no process has here."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, new, own = (
        tmp_path / f".{name}.tmp-{pid}-a-0"
        for name, pid in (("old", ended.pid), ("new", ended.pid), ("own", os.getppid()))
    )
    for path in (old, new, own):
        (path / "base").mkdir(parents=True)
        (path / "base" / "x").write_text("", encoding="utf-8")
        for each in (path / "base" / "x", path / "base", path):
            os.utime(each, (0, 0))
    os.utime(new / "base" / "x")
    assert remove_stale_temps(tmp_path, untouched_s=60) == [old]
    assert sorted(tmp_path.iterdir()) == [new, own]
    assert remove_stale_temps(tmp_path) == [new]


def test_remove_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_folder(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_json_hash_ignores_key_order_only():
    # printf '{"a":1,"b":[2,"ü"]}' | sha256sum
    golden = "987340c884d22298"
    assert json_hash({"b": [2, "ü"], "a": 1}) == json_hash({"a": 1, "b": [2, "ü"]})
    assert json_hash({"b": [2, "ü"], "a": 1}).startswith(golden)
    assert json_hash({"a": 1}) != json_hash({"a": 1.5})


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for bad in (tmp_path / "file", tmp_path / "file" / "sub"):
        with raises_error("folder_not_writable"):
            ensure_writable_folder(bad)
    assert ensure_writable_folder(tmp_path / "x" / "y").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        # safetensors 0.8 and torch 2.13 in their own words
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError(
            "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"
        ),
    ],
)
def test_a_full_disk_is_a_sentence_about_the_outermost_path(tmp_path, error):
    with (
        raises_error("disk_full"),
        explain_full_disk("final"),
        explain_full_disk("final/config.json"),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "denied"), ValueError("os error 280"), UserError("x")]
)
def test_other_errors_pass_a_full_disk_check(error):
    with pytest.raises(type(error)) as caught, explain_full_disk("final"):
        raise error
    assert caught.value is error


def test_finite_replaces_what_json_lacks():
    assert finite({"a": [1, float("nan")], "b": (float("inf"), "x", True)}) == {
        "a": [1, None],
        "b": [None, "x", True],
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets folders change places")
def test_an_existing_folder_is_never_missing_while_it_is_replaced(tmp_path, monkeypatch):
    """Looks at the folder before every rename and removal that Python does."""
    target = tmp_path / "final"
    with atomic_folder(target) as temp:
        (temp / "old").write_text("1", encoding="utf-8")
    seen = []
    for name in ("rename", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real: (seen.append(os.listdir(target)), real(*args))[1]
        )
    removal = shutil.rmtree

    def observed(path, **options):
        seen.append(os.listdir(target))
        removal(path, **options)

    monkeypatch.setattr(shutil, "rmtree", observed)
    with atomic_folder(target) as temp:
        (temp / "new").write_text("2", encoding="utf-8")
    assert seen == [["new"]] and os.listdir(tmp_path) == ["final"]
