"""The sample exchanges of a report: one card per question, the stages of training side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_eval._html import number, text

_STAGES = {"start": "Start", "plain": "Plain RLHF", "minmax": "MinMax"}
_VERDICTS = {True: "right", False: "wrong", None: "not readable"}


def exchange_cards(samples: Sequence[dict[str, Any]], *, limit: int) -> str:
    """Return the first `limit` questions as cards, HTML.

    Args:
        samples: Rows of samples.jsonl; rows of one story and question share a card.
        limit: The largest number of cards.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in samples:
        groups.setdefault((str(row.get("story")), str(row.get("question"))), []).append(row)
    if not groups:
        return '<p class="soft">The run wrote no sample exchanges.</p>'
    shown = list(groups.values())[:limit]
    more = f"{len(shown)} of {len(groups)} questions; all are in <code>samples.jsonl</code>."
    return "".join(map(_card, shown)) + f'<p class="soft">{more}</p>'


def _card(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    choices, gold = list(first.get("choices") or []), _gold(first)
    items = "".join(
        f'<li class="gold">✓ {text(choice)} <small>(gold)</small></li>'
        if choice == gold
        else f"<li>{text(choice)}</li>"
        for choice in choices
    )
    return (
        f'<article class="card"><p class="story" dir="auto">{text(first.get("story", ""))}</p>'
        f'<p dir="auto"><b>{text(first.get("question", ""))}</b></p>'
        f'<ul class="choices">{items}</ul><div class="turns">{"".join(map(_turn, rows))}</div></article>\n'
    )


def _gold(row: dict[str, Any]) -> Any:
    gold, choices = row.get("gold"), row.get("choices") or []
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        return choices[gold]
    return gold


def _turn(row: dict[str, Any]) -> str:
    correct, stage = row.get("correct"), str(row.get("stage", ""))
    kind = "good" if correct else "bad"
    outcome = "✓ right answer" if correct else "✗ wrong answer"
    facts = (
        ("answer", text(row.get("answer", ""))),
        ("critique", text(row.get("critique", ""))),
        ("verdict", _verdict(row.get("verdict"), bool(correct))),
        ("confidence", number(row.get("confidence"), 2)),
        ("reward", number(row.get("reward_score"), 2)),
        ("judge", number(row.get("judge_score"), 2)),
    )
    listed = "".join(f'<dt>{name}</dt><dd dir="auto">{value}</dd>' for name, value in facts)
    return (
        f'<div class="turn {kind}"><h4>{text(_STAGES.get(stage, stage))} '
        f'<span class="{kind}-text">{outcome}</span></h4><dl>{listed}</dl></div>'
    )


def _verdict(verdict: Any, correct: bool) -> str:
    said = {"right": True, "wrong": False}.get(verdict) if isinstance(verdict, str) else verdict
    truthful = said is not None and bool(said) == correct
    kind, mark = ("good", " (truthful)") if truthful else ("bad", " (untruthful)" if said is not None else "")
    return f'<span class="{kind}-text">{_VERDICTS[said]}{mark}</span>'
