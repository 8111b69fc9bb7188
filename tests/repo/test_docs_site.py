"""The site of the documentation: what its navigation lists, its API reference, its tutorials, its build."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
FASTEST = "serving"
LARGEST = 400_000
"""Bytes of a tutorial with its pictures."""


def needs(module: str) -> None:
    """Skips a test without the tools of the site."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is missing: install the docs group, uv sync --group docs")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, and makes none of the Python objects that it asks for."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
PAGES = CONFIG["extra"]["pages"]


def listed(entry: Any) -> Iterator[str]:
    """The pages of a navigation, in their order."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from listed(part)


def test_the_navigation_lists_every_page_once() -> None:
    pages = [path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)]
    assert sorted(listed(CONFIG["nav"])) == sorted(pages)


def test_lists_are_written_for_both_renderers() -> None:
    """The site's takes only four spaces for a level of a list, and a blank line before its first item."""
    wrong = {
        path.relative_to(ROOT).as_posix(): found
        for pattern in PAGES
        for path in ROOT.glob(pattern)
        if path.suffix == ".md"
        and (
            found := re.findall(
                r"^ {1,3}(?:[-*] |```).*|^\S.*:(?:\*\*)?\n(?:-|1\.) .*", without_code(path), re.M
            )
        )
    }
    assert wrong == {}


def without_code(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def api_pages() -> ModuleType:
    needs("griffe")
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "scripts" / "api_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_pages"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_public_name_has_a_docstring() -> None:
    assert api_pages().missing_docstrings() == []


def test_a_public_name_without_a_docstring_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rlhf_planted"
    package.mkdir()
    (package / "__init__.py").write_text("")
    lines = [f"from rlhf_planted.room import {name} as {name}\n" for name in ("Bare", "Kept", "known")]
    (package / "__init__.pyi").write_text("".join(lines))
    (package / "room.py").write_text(
        'class Bare:\n    x = 1\n\nclass Kept:\n    """Known."""\n    def act(self): ...\n\n'
        'def known():\n    """Known."""\n'
    )
    pages = api_pages()
    monkeypatch.setattr(pages, "SOURCES", [package])
    assert pages.missing_docstrings() == ["rlhf_planted.Bare", "rlhf_planted.Kept.act"]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_its_outputs_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) <= LARGEST
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    printed = json.dumps([{**output, "data": output.get("data", {}).get("text/plain")} for output in outputs])
    assert re.findall(r"/(?:tmp|root|home|work)/\S+", printed) == []


def test_links_of_tutorials_lead_somewhere() -> None:
    for path in TUTORIALS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        links = [link for link in re.findall(r"\]\(([^)\s#]+)", text) if not link.startswith("http")]
        assert links and [link for link in links if not (path.parent / link).is_file()] == []


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    needs("mkdocs")
    done = subprocess.run(
        [ROOT / "scripts" / "build_docs.sh", tmp_path / "site"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<(?:script|img|iframe)[^>]*src=[\"']?(?:https?:)?//", home) == []
    assert re.findall(r"<link[^>]*stylesheet[^>]*href=[\"']?(?:https?:)?//", home) == []
    reference = tmp_path / "site" / "docs" / "api" / "rlhf_algos" / "losses.html"
    assert 'id="rlhf_algos.losses.policy_loss"' in reference.read_text(encoding="utf-8")
    assert (tmp_path / "site" / "docs" / "tutorials" / f"{FASTEST}.html").is_file()


@pytest.mark.slow
def test_a_tutorial_runs() -> None:
    needs("nbclient")
    command = [sys.executable, str(ROOT / "scripts" / "run_tutorials.py"), FASTEST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
