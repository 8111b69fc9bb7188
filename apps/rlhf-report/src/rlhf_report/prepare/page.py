"""The page of a preparation: counts, lengths before and after, strata, and the rows that changed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from rlhf_eval.html import page, section, table, text, verbatim
from rlhf_report.prepare.words import REASON_WORDS, opening, said_of_lengths

_LONGEST = 1500
_AROUND = 60


def prepare_page(report: dict[str, Any]) -> str:
    """One HTML file that loads nothing from outside."""
    rows = report["rows"]
    body = f"<h1>{rows['train']:,} rows to train on</h1>\n<p>{text(opening(report))}</p>\n"
    body += section("Left out", _left_out(report))
    body += section("Lengths", _lengths(report))
    body += section("Held out", _strata(report))
    changed = report["shown"]["changed"]
    if changed:
        cards = "".join(_change(each) for each in changed)
        body += section(
            "Rows that changed", f"<p>{len(changed)} of {report['changed']['rows']:,}.</p>{cards}"
        )
    settings = [[text(key), f"<code>{text(value)}</code>"] for key, value in report["settings"].items()]
    body += section("Settings", table(["setting", "value"], settings, narrow=True) + _tokenizer(report))
    return page("Prepared data", body)


def _left_out(report: dict[str, Any]) -> str:
    if not report["left_out"]:
        return "<p>No row was left out.</p>"
    total = report["rows"]["read"]
    counts = [
        [text(REASON_WORDS[name]), f"{count:,}", _share(count, total)]
        for name, count in report["left_out"].items()
    ]
    found = table(["reason", "rows", "of all"], counts, numeric=True, narrow=True)
    for name, entries in report["shown"]["dropped"].items():
        shown = "".join(f"<p><code>{text(e['where'])}</code></p>{verbatim(_dropped(e))}" for e in entries)
        count = report["left_out"][name]
        title = f"{REASON_WORDS[name]}: the first {len(entries)} of {count:,}"
        found += f"<details><summary>{text(title)}</summary>{shown}</details>"
    return found + "<p>All of them, with file and line, are in <code>dropped.jsonl</code>.</p>"


def _dropped(entry: dict[str, Any]) -> str:
    if "problem" in entry:
        return entry["problem"]
    return "\n".join(f"{name}: {_short(_plain(value))}" for name, value in entry["row"].items())


def _lengths(report: dict[str, Any]) -> str:
    lengths = report["lengths"]
    figures = [
        f"<div><h3>{text(title)}</h3>{_histogram(lengths['edges'], lengths[side], lengths['unit'])}</div>"
        for side, title in (("before", "before"), ("after", "after, of the rows that are kept"))
    ]
    found = f"<p>{text(said_of_lengths(report))}</p>" + f'<div class="grid">{"".join(figures)}</div>'
    over = [
        [
            text(name or "all"),
            *(f"{each[key]:,}" for key in ("rows", "over")),
            _share(each["over"], each["rows"]),
        ]
        for name, each in report["over_max_length"].items()
        if each["rows"]
    ]
    if over:
        limit = report["settings"]["max_length"]
        found += table(["source", "rows", f"over {limit}", "share"], over, numeric=True, narrow=True)
    return found


def _histogram(edges: Sequence[int], counts: Sequence[int], unit: str) -> str:
    """Bars over bins of equal width; the last has all that is longer."""
    highest, width, height, left = max([*counts, 1]), 640, 200, 56
    step = (width - left - 10) / len(counts)
    bars = []
    for number, count in enumerate(counts):
        tall = count / highest * (height - 20)
        behind = f"{edges[number]} to {edges[number + 1] - 1}"
        bars.append(
            f'<rect x="{left + number * step:.1f}" y="{height - tall:.1f}" width="{step * 0.85:.1f}" '
            f'height="{tall:.1f}" fill="var(--blue)"><title>{behind} {unit}: {count:,} rows</title></rect>'
        )
    ticks = [
        f'<text class="tick" x="{left + number * step:.1f}" y="{height + 18}">{edges[number]}</text>'
        for number in range(0, len(counts), max(1, len(counts) // 5))
    ]
    axis = f'<line class="rule" x1="{left}" x2="{width}" y1="{height}" y2="{height}"/>'
    top = f'<text class="tick" x="{left - 8}" y="26" text-anchor="end">{highest:,}</text>'
    name = f'<text class="tick" x="{width}" y="{height + 38}" text-anchor="end">{text(unit)}</text>'
    label = f"Rows by their length in {unit}, {sum(counts):,} in all"
    return (
        f'<svg class="plot" role="img" aria-label="{text(label)}" viewBox="0 0 {width} {height + 46}">'
        f"{axis}{''.join(bars)}{''.join(ticks)}{top}{name}</svg>"
    )


def _strata(report: dict[str, Any]) -> str:
    rows = report["rows"]
    if not rows["eval"]:
        return "<p>No row is held out.</p>"
    several = len({each["source"] for each in report["strata"]}) > 1
    unit = report["lengths"]["unit"]
    head = [*(["source"] if several else []), unit, "rows", "share due", "held out"]
    lines = []
    for each in report["strata"]:
        lengths = f"{each['shortest']} to {each['longest']}"
        cells = [lengths, *(f"{each[key]:,}" for key in ("rows", "due", "eval"))]
        lines.append([text(each["source"]), *cells] if several else cells)
    what = f"{rows['eval']:,} rows are held out; no prompt stands on both sides."
    return f"<p>{what}</p>{table(head, lines, numeric=True, narrow=True)}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%"


def _tokenizer(report: dict[str, Any]) -> str:
    found = report["tokenizer"]
    if found is None:
        return "<p>Lengths are in words; with a tokenizer they are in its tokens.</p>"
    return (
        f"<p>Tokenizer: <code>{text(found['name'])}</code>, SHA-256 <code>{text(found['sha256'])}</code></p>"
    )


def _change(change: dict[str, Any]) -> str:
    parts = []
    for name, before in change["before"].items():
        after = change["after"].get(name)
        if after is not None and _plain(before) != _plain(after):
            parts.append(f"<h3>{text(name)}</h3><pre>{_marked(_plain(before), _plain(after))}</pre>")
    where = f"<p><code>{text(change['where'])}</code></p>"
    return f'<div class="card">{where}{"".join(parts) or "<p>The columns have other names.</p>"}</div>'


def _marked(before: str, after: str) -> str:
    """The text before, with what was taken out struck through and what came in marked."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    shown = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        gone, come = "".join(old[i1:i2]), "".join(new[j1:j2])
        if kind == "equal":
            shown.append(text(_short(gone)))
        elif gone.endswith(come):
            shown.append(_del(gone.removesuffix(come)) + text(_short(come)))
        else:
            shown.append(_del(gone) + (f"<mark>{text(_short(come))}</mark>" if come else ""))
    return "".join(shown)


def _del(gone: str) -> str:
    return f'<del class="bad-text">{text(_short(gone))}</del>' if gone else ""


def _short(value: str) -> str:
    if len(value) <= _LONGEST:
        return value
    return f"{value[: _LONGEST - _AROUND]} […] {value[-_AROUND:]}"


def _plain(value: Any) -> str:
    """A text, or messages as one says them."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return "".join(f"{each.get('role', '')}: {each.get('content', '')}\n" for each in value)
    return value if isinstance(value, str) else str(value)
