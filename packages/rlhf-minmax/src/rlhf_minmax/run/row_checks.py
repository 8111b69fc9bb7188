"""Checks of the user's own rows: contradictions, and whether models that are built can learn from them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from rlhf_data import QARecord, UserError, json_hash
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.scorers.loading import needs_demo

_TO_MARK = "give a column with the words that show the answer (data.columns.evidence_column)"
_MARKED = "fill more of its cells"


def row_warnings(config: MinMaxConfig, stories: Stories) -> list[str]:
    """Warnings about a run's rows; empty for the worlds."""
    found = (
        *(_skipped(stories), _contradictory(stories), _unlabelled(stories)),
        *(_named(config, stories), _built(config, stories)),
    )
    return [text for text in found if text]


def check_same_beginning(preflight: Path, stories: Stories) -> dict[str, str]:
    """Refuse to resume a run with other stories or rules than it began with.

    Its start was measured with those, and its models may have been built from them.

    Args:
        preflight: the file that the run wrote before its first step; it need not exist.
        stories: the present stories, with their rules.

    Returns:
        Hashes of stories and rules, for that file.

    Raises:
        UserError: stories, rules or templates of prompts have changed.
    """
    records = [record.contents() for record in (*stories.train, *stories.held_out)]
    now = {"texts": json_hash(stories.prompts.fingerprint()), "data": json_hash(records)}
    before = json.loads(preflight.read_text(encoding="utf-8")) if preflight.exists() else {}
    for key, code, what in (
        ("texts", "rules_changed", "the rules (data.rules) or templates of prompts"),
        ("data", "different_training_data", "the stories"),
    ):
        if before.get(key, now[key]) != now[key]:
            raise UserError(
                f"{what} have changed since the run in {preflight.parent} began, and its start was measured "
                "with the former ones; put them back as they were, or begin another run with the new ones",
                code=code,
            )
    return now


def _skipped(stories: Stories) -> str | None:
    if not stories.skipped:
        return None
    return f"rows left out: {len(stories.skipped)}; the first: {stories.skipped[0]}"


def _contradictory(stories: Stories) -> str | None:
    """A warning if a row's right answer is a wrong choice in another row with the same story and question."""
    rows: dict[tuple[str, str], list[tuple[str, QARecord]]] = defaultdict(list)
    for what, part in (("training", stories.building), ("held-out", stories.held_out)):
        for number, record in enumerate(part, start=1):
            where = record.where or f"{what} story {number}"
            rows[record.story, record.question].append((where, record))
    disputed = [pair for same in rows.values() if (pair := _disagreeing(same)) is not None]
    if not disputed:
        return None
    (first, a), (second, b) = disputed[0]
    one = len(disputed) == 1
    return (
        f"{len(disputed):,} {'story has' if one else 'stories have'} different right answers to the same "
        f"question in different rows{'' if one else ', the first of them'}: {a.answer_text!r} in {first}, "
        f"{b.answer_text!r} in {second}; the game takes each for the truth, so correct one or leave it out"
    )


def _disagreeing(
    same: list[tuple[str, QARecord]],
) -> tuple[tuple[str, QARecord], tuple[str, QARecord]] | None:
    """The first row whose right answer is a wrong choice of a later one, and that; None if there is none."""
    known: dict[str, tuple[str, QARecord]] = {}
    for row in same:
        record = row[1]
        for choice in record.choices:
            if choice != record.answer_text and choice in known:
                return known[choice], row
        known.setdefault(record.answer_text, row)
    return None


def _unlabelled(stories: Stories) -> str | None:
    """A warning about training rows without an answer; with `data.label_share` below 1 see `_share`."""
    count = len(stories.train) - len(stories.labelled)
    if stories.label_share < 1:
        return _share(stories)
    if not count:
        return None
    return (
        f"{count:,} of {len(stories.train):,} training rows have no answer (field "
        f"{stories.prompts.dataset.answer_column}): the policy plays them, and verdicts on them are not "
        "checked"
    )


def _share(stories: Stories) -> str | None:
    """A warning if hiding answers hid none, since rows without one are the first to count as hidden."""
    count = len(stories.train)
    if len(stories.labelled) < len(stories.building) or len(stories.building) == count:
        return None
    return (
        f"data.label_share {stories.label_share:g} hides no answer: it is a share of all {count:,} training "
        f"rows, and no more than {len(stories.labelled):,} have one"
    )


def _named(config: MinMaxConfig, stories: Stories) -> str | None:
    """A warning if some stories do not name their right choice: they cannot have truthful critiques.

    Where models are built, too few that do are an error.
    """
    rules, count = stories.prompts.rules, len(stories.building)
    judged = stories.judged
    if needs_demo(config) and judged and all(rules.correct_evidence(record) is None for record in judged):
        raise UserError(
            f"none of the {len(judged):,} training rows whose answers data.label_share "
            f"{stories.label_share:g} leaves names its right choice in the story, and the judge learns from "
            "those alone; raise it, or give --judge-model",
            code="too_little_evidence",
        )
    evident = sum(rules.correct_evidence(record) is not None for record in stories.building)
    if evident == count:
        return None
    share, least = evident / count, config.demo.min_evidence_share
    column = stories.prompts.dataset.evidence_column
    says = f"only {evident:,} of {count:,} training rows ({share:.0%}) name their right choice in the story"
    says += f" or have evidence in {column}" if column else ""
    if not needs_demo(config):
        return f"{says}: the break-even check has truthful critiques of those alone"
    if evident == 0 or (share < least and not config.force):
        raise UserError(
            f"{says}, and base and judge learn truthful critiques from those alone (demo.min_evidence_share "
            f"{least:g}); {_MARKED if column else _TO_MARK}, or give --model, --reward-model and "
            "--judge-model, or lower it",
            code="too_little_evidence",
        )
    return f"{says}: base and judge are built from those, and the break-even check measured on them"


def _built(config: MinMaxConfig, stories: Stories) -> str | None:
    """A warning that the tiny models built from a file are too small to read prose."""
    if config.data.train_data is None or not needs_demo(config):
        return None
    return (
        f"models that the config does not name are built from {len(stories.building):,} rows, with "
        f"{config.demo.num_layers} layers of width {config.demo.hidden_size}, too small to read prose; "
        "give --model, --reward-model and --judge-model for results that mean something"
    )
