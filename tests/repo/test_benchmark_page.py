"""The tables of docs/benchmarks.md and the README are those that benchmarks/page.py makes of the results."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("page")


def test_the_pages_show_the_committed_results(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        page.main(["--check"])
    except SystemExit:
        pytest.fail(f"{capsys.readouterr().out}write them: uv run python benchmarks/page.py")


def test_every_table_is_made_by_the_script(page: Any) -> None:
    texts = [path.read_text(encoding="utf-8") for path in page.PAGES]
    marks = [name for text in texts for name in page.marks(text)]
    assert sorted(marks) == sorted(page.TABLES)
    benchmarks = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", texts[0], flags=re.S)
    assert "|---" not in benchmarks, "a table of docs/benchmarks.md has no marks"


def test_an_old_table_is_named_and_written(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "page.md"
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    copy.write_text(text.replace("| share of the limit | **", "| share of the limit | **1"), encoding="utf-8")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGES", (copy,))
    with pytest.raises(SystemExit) as stopped:
        page.main(["--check"])
    assert stopped.value.code == 1
    assert capsys.readouterr().out == "page.md: would change: roofline\n"
    page.main([])
    assert copy.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<!-- roofline -->\n| old |\n", "end"), ("<!-- rofline -->\n<!-- end -->\n", "'rofline'.*roofline")],
)
def test_marks_that_lead_nowhere_are_refused(page: Any, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        page.renew(text)


def test_ratios_of_merges_that_differ_are_void(page: Any) -> None:
    side = {"seconds": 2.0, "peak_rss_mb": 300.0}
    other = {"seconds": 8.0, "peak_rss_mb": 900.0, "agree": False}
    same = other | {"agree": True, "speedup": 4.0, "peak_rss_mb_share": 1 / 3, "peak_anonymous_mb_share": 0.5}
    row = {"method": "ties", "ours": side, "mergekit": {"default": other, "low memory": same}}
    lines = page.merge_vs_mergekit({"methods": [row]}).splitlines()
    assert lines[2] == "| TIES | default | 2.0 / 8.0 | void | 300 / 900 | void | void |"
    assert lines[3] == "| TIES | low memory | 2.0 / 8.0 | **4.0x** | 300 / 900 | 0.33x | 0.50x |"
