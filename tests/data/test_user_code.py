"""Objects named by a dotted path or by a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_data import has_module, import_object


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_here.py").write_text("import beside_it\nclass Kind:\n    size = beside_it.SIZE\n")
    (tmp_path / "beside_it.py").write_text("SIZE = 3\n")


def test_a_name_is_found_in_a_file_and_in_a_module(tmp_path: Path) -> None:
    by_file = import_object(f"{tmp_path}/mine_here.py:Kind", what="setting")
    assert by_file.size == 3 and import_object("mine_here.py:Kind.size", what="setting") == 3
    assert import_object("mine_here.py:Kind", what="setting") is by_file  # the file ran once
    assert import_object("os.path:join", what="setting") is import_object("os.path.join", what="setting")
    assert has_module("mine_here") and not has_module("nowhere_at_all")


@pytest.mark.parametrize(
    ("path", "code", "fields"),
    [
        ("mine_here.py:Knid", "missing_attribute", {"name": "Knid"}),
        ("gone.py:Kind", "file_not_found", {}),
        ("broken_here.py:Kind", "import_failed", {}),
        ("no_such_package.at_all:Kind", "import_failed", {}),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, path: str, code: str, fields: dict[str, str]) -> None:
    (tmp_path / "broken_here.py").write_text("raise SystemExit(3)\n")
    with raises_error(code, **fields):
        import_object(path, what="setting")
    assert not [name for name in sys.modules if name.startswith("user_file_broken")]
