"""Pieces of HTML for reports."""

from __future__ import annotations

import base64
import hashlib
import re

from rlhf_eval.html import page, written_by


def test_a_page_runs_the_script_that_sorts_and_no_other() -> None:
    plain, sortable = page("a", "<p>b</p>"), page("a", "<p>b</p>", sortable=True)
    assert "<script" not in plain and "script-src" not in plain
    (script,) = re.findall(r"<script>(.*?)</script>", sortable, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
        in sortable
    )


def test_a_page_names_the_command_that_wrote_it() -> None:
    with written_by(["rlhf-report", "compare", "a b.jsonl", "<c>"]):
        assert "<code>rlhf-report compare &#x27;a b.jsonl&#x27; &#x27;&lt;c&gt;&#x27;</code>" in page(
            "a", "<p>b</p>"
        )
    assert "<footer" not in page("a", "<p>b</p>")
