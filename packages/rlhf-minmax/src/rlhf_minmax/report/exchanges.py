"""The sample exchanges of a report: one card per question, the stages of training below each other."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf_eval.html import number, text

_STAGES = {"start": "Start", "plain": "Plain RLHF", "minmax": "MinMax"}
_SAID = {True: "right", False: "wrong"}
_EVIDENCE = re.compile(r"\s*(\S.*?) so (?:right|wrong)\b")
"""Matches a critique in the format `<evidence> so right|wrong` (docs/minmax.md)."""
_MIN_EVIDENCE_WORDS = 2
_NOTHING = "(empty)"
_MAX_TURNS, _UNFOLDED = 8, 3

_Span = tuple[int, int]


def exchange_cards(samples: Sequence[dict[str, Any]], *, limit: int) -> str:
    """Return the first `limit` questions as cards, HTML.

    Rows of one story and question share a card, ordered by stage and, if they have one, by `step`; of many
    rows, evenly spread ones are shown.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in samples:
        groups.setdefault((str(row.get("story")), str(row.get("question"))), []).append(row)
    if not groups:
        return '<p class="soft">The run wrote no sample exchanges.</p>'
    shown = list(groups.values())[:limit]
    legend = (
        '<p class="soft"><mark>Marked</mark> in a story: evidence that a critique quotes from it, with the '
        "numbers of the stages that do. ✓ right answer, true verdict; ✗ wrong answer, false verdict.</p>"
    )
    cards = [_card(rows) for rows in shown]
    folded = cards[_UNFOLDED:]
    summary = f"<summary>{len(folded)} more questions</summary>"
    rest = f"<details>{summary}{''.join(folded)}</details>" if folded else ""
    more = f"{len(shown)} of {len(groups)} questions; all are in <code>samples.jsonl</code>."
    return legend + "".join(cards[:_UNFOLDED]) + rest + f'<p class="soft">{more}</p>'


def evidence_spans(story: str, row: dict[str, Any]) -> list[_Span] | None:
    """Places of a critique's evidence in the story, case and punctuation aside.

    Returns:
        (start, end) of each place, none if it is not quoted or shorter than two words; None if the
        critique could not be parsed.
    """
    match = _EVIDENCE.match(str(row.get("critique", "")))
    if row.get("verdict") is None or match is None:
        return None
    words = re.findall(r"\w+", match[1])
    if len(words) < _MIN_EVIDENCE_WORDS:
        return []
    quoted = r"(?<!\w)" + r"\W+".join(map(re.escape, words)) + r"(?!\w)"
    return [found.span() for found in re.finditer(quoted, story, re.IGNORECASE)]


def _card(rows: Sequence[dict[str, Any]]) -> str:
    rows = _some(sorted(rows, key=_time))
    first = rows[0]
    choices, gold = list(first.get("choices") or []), _gold(first)
    items = "".join(
        f'<li class="gold">✓ {text(choice)} <small>(gold)</small></li>'
        if choice == gold
        else f"<li>{text(choice)}</li>"
        for choice in choices
    )
    story = str(first.get("story", ""))
    spans = [evidence_spans(story, row) for row in rows]
    turns = [
        _turn(number, row, found) for number, (row, found) in enumerate(zip(rows, spans, strict=True), 1)
    ]
    return (
        f'<article class="card"><p class="story" dir="auto">{_marked(story, spans)}</p>'
        f'<p dir="auto"><b>{text(first.get("question", ""))}</b></p>'
        f'<ul class="choices">{items}</ul><div class="turns">{"".join(turns)}</div></article>\n'
    )


def _time(row: dict[str, Any]) -> tuple[int, float]:
    """The position of a row in a run: start, plain RLHF, the game by its steps, the end."""
    rank = {"start": 0, "plain": 1}.get(str(row.get("stage")), 2)
    step = row.get("step")
    return rank, step if isinstance(step, int) else math.inf


def _some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last and evenly spread ones between them, if there are many."""
    if len(rows) <= _MAX_TURNS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (_MAX_TURNS - 1))] for i in range(_MAX_TURNS)]


def _marked(story: str, spans: Sequence[list[_Span] | None]) -> str:
    """The story with all evidence marked, each piece followed by the numbers of the stages that quote it."""
    found = [(start, end, stage) for stage, own in enumerate(spans, 1) for start, end in own or []]
    cuts = sorted({0, len(story)} | {cut for start, end, _ in found for cut in (start, end)})
    pieces = []
    for start, end in itertools.pairwise(cuts):
        inside = any(first <= start and end <= last for first, last, _ in found)
        stages = ", ".join(str(stage) for _, last, stage in found if last == end)
        piece = text(story[start:end])
        pieces.append(f"<mark>{piece}</mark>" if inside else piece)
        pieces.append(f"<sup>{stages}</sup>" if stages else "")
    return "".join(pieces)


def _gold(row: dict[str, Any]) -> Any:
    gold, choices = row.get("gold"), row.get("choices") or []
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        return choices[gold]
    return gold


def _turn(place: int, row: dict[str, Any], spans: list[_Span] | None) -> str:
    correct = bool(row.get("correct"))
    kind = "good" if correct else "bad"
    facts = (
        ("answer", text(row.get("answer") or _NOTHING)),
        ("critique", text(row.get("critique") or _NOTHING)),
        ("verdict", _verdict(row.get("verdict"), correct)),
        ("evidence", _evidence(spans)),
        ("confidence", number(row.get("confidence"), 2)),
        ("reward", number(row.get("reward_score"), 2)),
        ("judge", number(row.get("judge_score"), 2)),
    )
    listed = "".join(f'<div><dt>{name}</dt><dd dir="auto">{value}</dd></div>' for name, value in facts)
    outcome = _sign(correct, "right answer" if correct else "wrong answer")
    return f'<div class="turn {kind}"><h4>{place} · {text(_title(row))} {outcome}</h4><dl>{listed}</dl></div>'


def _title(row: dict[str, Any]) -> str:
    stage, step = str(row.get("stage", "")), row.get("step")
    return _STAGES.get(stage, stage) + (f", step {step}" if step else "")


def _verdict(verdict: Any, correct: bool) -> str:
    said = {"right": True, "wrong": False}.get(verdict) if isinstance(verdict, str) else verdict
    if said is None:
        return _sign(False, "not readable")
    truthful = bool(said) == correct
    return _sign(truthful, f"{_SAID[bool(said)]} ({'truthful' if truthful else 'untruthful'})")


def _evidence(spans: list[_Span] | None) -> str:
    if spans is None:
        return "–"
    return _sign(True, "in the story") if spans else _sign(False, "not in the story")


def _sign(good: bool, label: str) -> str:
    """A label that is coloured and has a sign, for those who do not see the colour."""
    return f'<span class="{"good" if good else "bad"}-text">{"✓" if good else "✗"} {label}</span>'
