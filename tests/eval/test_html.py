"""Pieces of HTML for reports."""

from __future__ import annotations

import base64
import hashlib
import re

from rlhf_eval.html import page


def test_a_page_runs_the_script_that_sorts_and_no_other() -> None:
    plain, sortable = page("a", "<p>b</p>"), page("a", "<p>b</p>", sortable=True)
    assert "<script" not in plain and "script-src" not in plain
    (script,) = re.findall(r"<script>(.*?)</script>", sortable, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
        in sortable
    )
