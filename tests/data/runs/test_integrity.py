"""Damage of every kind is found and named; whole folders are left in peace."""

import json

import pytest

from rlhf_data.runs.checksums import find_damage, write_checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "trainer_state.json").write_text('{"step": 1}')
    write_checksums(tmp_path)
    return tmp_path


def test_a_whole_folder_has_no_damage(folder):
    entries = json.loads((folder / "checksums.json").read_text())["files"]
    assert list(entries) == ["policy/model.safetensors", "trainer_state.json"]
    # CRC-32 of b'{"step": 1}', from `printf '{"step": 1}' | gzip -c | tail -c8 | od -An -tx4 -N4`
    assert entries["trainer_state.json"] == {"size": 11, "crc32": "3a87913d"}
    (folder / "README.md").write_text("added later")
    assert find_damage(folder) is None
    write_checksums(folder)
    assert find_damage(folder) is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "has 25599 bytes, 25600 were written"),
        (lambda f: f.write_bytes(b"\0" * 25600), "is not what was written"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\0"), "is not what was written"),
        (lambda f: f.unlink(), "is missing"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, said):
    damage(folder / "policy" / "model.safetensors")
    assert find_damage(folder) == f"policy/model.safetensors {said}"


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"files": 3}', '{"files": {"a": 1}}', ""])
def test_damaged_checksums_are_damage(folder, text):
    (folder / "a").write_text("")
    (folder / "checksums.json").write_text(text)
    assert find_damage(folder) == "checksums.json is not what was written"
    (folder / "checksums.json").unlink()
    assert find_damage(folder) == "checksums.json is missing"
