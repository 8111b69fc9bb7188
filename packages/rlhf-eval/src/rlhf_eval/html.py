"""Small pieces of HTML for reports: escaping, numbers, tables, sections and the page around them.

Everything named `*_html` or returned from here is HTML; everything else is text and goes through `text`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "breakable",
    "findings_list",
    "number",
    "page",
    "paragraphs",
    "section",
    "svg_figure",
    "table",
    "text",
    "verbatim",
    "written_by",
]

_COMMAND: ContextVar[str] = ContextVar("_COMMAND", default="")

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5a6472; --line: #dfe3e8;
  --panel: #f6f7f9; --good: #00694e; --good-bg: #e6f4ee; --bad: #a83400; --bad-bg: #fcece4; --blue: #0072b2;
  --orange: #d55e00; --grey: #666; --mark: #fff0b3; --mark-line: #b98900; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161d; --ink: #e6e9ee; --soft: #a3abb8;
  --line: #303743; --panel: #1a2029; --good: #5fd3a8; --good-bg: #12302a; --bad: #ff9d76; --bad-bg: #3a1f17;
  --blue: #56b4e9; --orange: #f08a3c; --grey: #a3abb8; --mark: #4a3d0c; --mark-line: #e5b93c; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 20px 64px; overflow-wrap: break-word; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.25rem; margin: 44px 0 12px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 20px 0 6px; }
p { margin: 8px 0; max-width: 75ch; }
a { color: var(--blue); }
.soft, small, figcaption, .key { color: var(--soft); }
.key, code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85em; }
.key { display: block; font-size: .75rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
table.narrow { width: auto; } table.narrow .number { padding-left: 2.5em; }
th, td { text-align: left; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-size: .85rem; font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 8.5em; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.grid.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
.grid > div { min-width: 0; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(3, 1fr); margin: 20px 0; }
.tile { background: var(--panel); border-radius: 8px; border-top: 4px solid var(--grey); padding: 12px 16px; }
.tile.plain { border-color: var(--orange); } .tile.minmax { border-color: var(--blue); }
.tile b { display: block; font-size: 2rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile small { display: block; line-height: 1.4; }
[aria-sort] { color: var(--ink); } th[role] { cursor: pointer; }
[aria-sort="ascending"]::after { content: " ↑"; } [aria-sort="descending"]::after { content: " ↓"; }
svg.plot { width: 100%; height: auto; display: block; margin-bottom: 14px; } svg.narrow { display: none; }
svg text { fill: var(--ink); font-size: 14px; } svg .tick { fill: var(--soft); font-size: 13px; }
svg .name { font-weight: 600; } svg .rule { stroke: var(--line); } svg .estimate { fill: var(--blue); }
svg .interval { stroke: var(--blue); stroke-width: 3; stroke-linecap: round; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; }
.note { border-left: 4px solid var(--blue); background: var(--panel); padding: 10px 16px;
  border-radius: 0 8px 8px 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px; margin: 0 0 18px; }
.story { font-size: 1.05rem; }
.choices { list-style: none; display: flex; flex-wrap: wrap; gap: 8px; padding: 0; margin: 10px 0 14px; }
.choices li { min-width: 0; border: 1px solid var(--line); border-radius: 999px; padding: 1px 12px; }
.choices .gold { border-color: var(--good); background: var(--good-bg); color: var(--good);
  font-weight: 600; }
.turns { display: grid; gap: 10px; }
.turn { border-left: 4px solid var(--grey); background: var(--panel); border-radius: 0 8px 8px 0;
  padding: 10px 14px; min-width: 0; }
.turn.good { border-color: var(--good); background: var(--good-bg); }
.turn.bad { border-color: var(--bad); background: var(--bad-bg); }
.turn h4 { margin: 0; font-size: .95rem; }
dl { margin: 6px 0 0; display: flex; flex-wrap: wrap; gap: 3px 24px; }
dl div { display: flex; gap: 8px; min-width: 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--mark-line); }
sup { color: var(--soft); line-height: 0; margin-left: 1px; }
.findings { padding-left: 1.2em; max-width: 80ch; } .findings li { margin: 6px 0; }
.good-text { color: var(--good); font-weight: 600; } .bad-text { color: var(--bad); font-weight: 600; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; margin: 12px 0;
  background: var(--line); }
.bar span { min-width: 1px; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
summary { cursor: pointer; padding: 6px 0; color: var(--blue); }
@media (max-width: 600px) {
  svg.narrow { display: block; } svg.wide { display: none; }
  main { padding: 16px 14px 48px; } h1 { font-size: 1.45rem; }
  th, td { padding: 7px 5px; } td { font-size: .95rem; } tbody th { min-width: 5.5em; }
  table.narrow .number { padding-left: 1.2em; }
  .tiles { gap: 8px; } .tile { padding: 8px 10px; } .tile b { font-size: 1.45rem; }
  .tile small { font-size: .75rem; }
  .card { padding: 12px; }
}
footer { margin-top: 44px; border-top: 1px solid var(--line); padding-top: 6px; }
@media print { .card, .turn, figure, tr { break-inside: avoid; } }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_SORT = """
for (const head of document.querySelectorAll("thead th")) {
  head.tabIndex = 0; head.setAttribute("role", "button"); head.title = "Sort by this column";
  const value = row => row.cells[head.cellIndex].textContent.trim().replace(/\u2212/g, "-");
  const numeric = text => parseFloat(text.replace(/^[^0-9.+-]+/, "").replace(/,/g, ""));
  const sort = () => {
    const down = head.getAttribute("aria-sort") === "ascending", body = head.closest("table").tBodies[0];
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => { const x = numeric(value(a)), y = numeric(value(b));
      return isNaN(x) || isNaN(y) ? value(a).localeCompare(value(b)) : x - y; };
    for (const row of [...body.rows].sort((a, b) => down ? order(b, a) : order(a, b))) body.append(row);
  };
  head.onclick = sort; head.onkeydown = event => { if (event.key === "Enter") sort(); };
}
"""
"""Sorts a table by the column whose title is clicked; the page allows this script alone, by its hash."""


def text(value: Any) -> str:
    """Return `value` as escaped HTML text, safe in elements and quoted attributes.

    Characters that UTF-8 cannot hold (lone surrogates) are shown as backslash escapes.
    """
    readable = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return html.escape(readable, quote=True).replace("\r", "&#13;")


def breakable(key: str) -> str:
    """Return the name of a metric as HTML that may break after its slashes and underscores."""
    return text(key).replace("/", "/<wbr>").replace("_", "_<wbr>")


def number(value: Any, digits: int = 3) -> str:
    """Return a number with `digits` decimals, and "–" for one that is missing, null or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:z.{digits}f}".replace("-", "−")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = False, narrow: bool = False
) -> str:
    """Return a table that scrolls sideways where the screen is too narrow.

    Args:
        head: Column titles, text.
        rows: Cells, HTML; the first cell of a row is its heading.
        numeric: Whether the cells after the first are right-aligned numbers.
        narrow: Whether the table is as wide as its content, not as the page.
    """
    kind = ' class="number"' if numeric else ""
    titles = "".join(
        f'<th scope="col"{kind if index else ""}>{text(title)}</th>' for index, title in enumerate(head)
    )
    lines = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td{kind}>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    ]
    size = ' class="narrow"' if narrow else ""
    return (
        f'<div class="scroll"><table{size}><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def section(title: str, body_html: str) -> str:
    """Return a titled section of the page."""
    return f"<section><h2>{text(title)}</h2>\n{body_html}\n</section>\n"


def verbatim(value: Any) -> str:
    """Return text in a block that keeps every space and line break.

    The line break after `<pre>` is the one HTML ignores, so that a leading one of the text survives.
    """
    return f'<pre dir="auto">\n{text(value)}</pre>'


def svg_figure(svg: str, caption: str) -> str:
    """Return an SVG document as a figure embedded in the page, as wide as its place allows."""
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return (
        f'<figure><img alt="{text(caption)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def findings_list(items_html: Iterable[str]) -> str:
    """Return a list of what was found."""
    return f'<ul class="findings">{"".join(f"<li>{item}</li>" for item in items_html)}</ul>\n'


def paragraphs(sentences: Iterable[str]) -> str:
    """Return texts as paragraphs."""
    return "".join(f"<p>{text(sentence)}</p>\n" for sentence in sentences)


@contextmanager
def written_by(command: Sequence[str]) -> Iterator[None]:
    """Within this context every page ends with the command line that wrote it, given as words."""
    token = _COMMAND.set(shlex.join(command))
    try:
        yield
    finally:
        _COMMAND.reset(token)


def page(title: str, body_html: str, *, refresh: int | None = None, sortable: bool = False) -> str:
    """Return the whole document; its content security policy forbids loading anything from outside.

    It ends with the command that wrote it, where there is one, see `written_by`.

    Args:
        title: Title of the document, as text.
        body_html: What it shows.
        refresh: Seconds after which a browser asks for it again; None for never.
        sortable: Whether a click on the title of a column sorts its table.
    """
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    policy, script, command = _POLICY, "", _COMMAND.get()
    footer = f"<footer><small>Written by <code>{text(command)}</code></small></footer>\n" if command else ""
    if sortable:
        digest = base64.b64encode(hashlib.sha256(_SORT.encode("utf-8")).digest()).decode("ascii")
        policy, script = f"{_POLICY}; script-src 'sha256-{digest}'", f"<script>{_SORT}</script>\n"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{again}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body_html}{footer}"
        "</main>\n"
        f"{script}</body>\n</html>\n"
    )
