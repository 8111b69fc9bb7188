"""The rooms of every package: their size, and that its README names each as its docstring does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("*/*/src/rlhf_*"))
FOLDERS = sorted({path.parent for source in SOURCES for path in source.rglob("*.py")})
LARGEST = 15

each_package = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)


def summary(path: Path) -> str:
    """First line of a module's or a package's docstring."""
    path = path / "__init__.py" if path.is_dir() else path
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0].rstrip(".")


def entries(source: Path) -> dict[str, str]:
    """Rooms, then modules beside them, with what each is for."""
    rooms = [path for path in sorted(source.iterdir()) if (path / "__init__.py").exists()]
    modules = [path for path in sorted(source.glob("*.py")) if not path.name.startswith("_")]
    return {path.name + "/" * path.is_dir(): summary(path) for path in [*rooms, *modules]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_folder_has_more_modules_than_one_can_take_in(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= LARGEST


@each_package
def test_every_room_says_what_it_is_for(source: Path) -> None:
    assert all(entries(source).values())


@each_package
def test_the_readme_shows_the_rooms(source: Path) -> None:
    text = (source.parents[1] / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## Rooms\n\n```\n(.*?)```", text, re.M | re.S)
    expected = entries(source)
    if block is None:
        assert not expected
    else:
        shown = dict(line.split(maxsplit=1) for line in block[1].splitlines())
        assert shown == expected
