"""Example rows: every file is read by the method it is meant for, and is the same for equal arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from raises import raises_error
from rlhf_data import load_qa, load_records, write_dummy_data

_KINDS = {
    **{"sft": "sft", "preference": "preference", "test": "preference", "kto": "kto"},
    **{"prompts": "prompt", "prm": "steps"},
}


@pytest.mark.parametrize("kind", ["story", "arithmetic", "chat"])
def test_every_file_is_read(kind, tmp_path: Path) -> None:
    written = write_dummy_data(tmp_path / "data", 20, kind=kind)
    assert set(written) == {
        str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*.jsonl")
    }
    for name, rows in written.items():
        path = tmp_path / "data" / name
        if path.stem.startswith("qa"):
            assert len(load_qa(path)) == rows == (20 if name == "qa.jsonl" else 5)
            continue
        method = path.stem.partition("-")[0]
        assert len(load_records(path, _KINDS[method]).records) == rows
    assert ("prm.jsonl" in written) == (kind != "arithmetic")
    assert written["test.jsonl"] == 5 and (tmp_path / "data" / "model_config.yaml").exists()


def test_the_forms_hold_the_same_rows(tmp_path: Path) -> None:
    """An implicit prompt goes up to the last white space that both share: ` it is` belongs to it."""
    write_dummy_data(tmp_path / "data", 20)
    pairs = load_records(tmp_path / "data" / "preference.jsonl", "preference").records[:16]
    for form in ("ultrafeedback", "pku_saferlhf"):
        read = load_records(tmp_path / "data" / "forms" / f"preference-{form}.jsonl", "preference").records
        assert [(r.prompt, r.chosen, r.rejected) for r in read] == [
            (r.prompt, r.chosen.strip(), r.rejected.strip()) for r in pairs
        ]
    for form in ("conversational", "helpsteer3"):
        read = load_records(tmp_path / "data" / "forms" / f"preference-{form}.jsonl", "preference").records
        assert [r.chosen[0]["content"] for r in read] == [r.chosen.strip() for r in pairs]
    read = load_records(tmp_path / "data/forms/preference-implicit_prompt.jsonl", "preference").records
    assert [r.prompt + r.chosen for r in read] == [r.prompt + r.chosen for r in pairs]


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_dummy_data(tmp_path / name / "data", 8, seed=seed)
    first, same, other = ({p.name: p.read_bytes() for p in (tmp_path / name).rglob("*.*")} for name in "abc")
    assert first == same and first["sft.jsonl"] != other["sft.jsonl"]


def test_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with raises_error("folder_not_empty"):
        write_dummy_data(tmp_path)
    with raises_error("folder_not_empty"):
        write_dummy_data(tmp_path / "file")
    with raises_error("unknown_kind"):
        write_dummy_data(tmp_path / "a", kind="x")  # pyright: ignore[reportArgumentType]
    with raises_error("invalid_value", key="rows"):
        write_dummy_data(tmp_path / "a", 1)
    with raises_error("too_few_records"):
        write_dummy_data(tmp_path / "a", 3000, kind="arithmetic")
    assert not (tmp_path / "a").exists()
