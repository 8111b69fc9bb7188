"""The page about a set of preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_eval.exploration.analysis import KINDS
from rlhf_eval.exploration.figures import FIGURES, panels, subset_figure
from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.sentences import Sentence, percent
from rlhf_eval.exploration.subsets import subsets_section
from rlhf_eval.figures import can_draw, figure_grid
from rlhf_eval.html import findings_list, number, page, section, svg_figure, table, text, verbatim

_SHOWN_PHRASES = 25
_MOST_TEXT = 4000
"""Characters of a text that the page shows; the whole is in samples.jsonl."""
_ROWS_NOTE = "Duplicates are looked for in lower case with single spaces. Every row is in findings.jsonl."
_FLOOR_NOTE = (
    "Each predictor is fitted on half of the prompts and measured on the other; no prompt is on both sides. "
    "A pair that it cannot tell apart counts one half. A reward model that does no better than the last line "
    "may have learned nothing else."
)
_ODDS_NOTE = (
    "One logistic model of all features; the ratio is by how much the odds of being chosen rise with one "
    "standard deviation of the difference, the other features held equal. Intervals are 95% and take pairs "
    "of one prompt together."
)
_PHRASES_NOTE = (
    "Weighted log-odds that a completion has the phrase, with an informative Dirichlet prior (Monroe et al. "
    "2008). Shown are phrases of at least ten completions with |z| above 1.96 whose p-value, corrected "
    "for all that were tested (Benjamini and Hochberg 1995), is below 5%."
)


def exploration_page(
    results: Mapping[str, Any],
    findings: Sequence[Sentence],
    samples: Sequence[Mapping[str, Any]],
    *,
    title: str,
) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        results: of `explore_pairs`, with `sets`, the names of the data sets.
        findings: of `sentences`.
        samples: pairs to read, with `kind`, `where`, `prompt`, `chosen`, `rejected` and `note`.
        title: name of the data.
    """
    groups = results["prompt_groups"]
    body = (
        f"<h1>What is in the preference data</h1>\n<p>{text(title)}: {results['pairs']:,} pairs on "
        f"{results['prompts']:,} prompts. Intervals are 95% and take {text(groups['made_of'])} as one unit "
        f"({groups['count']:,} of them).</p>\n"
    )
    body += _findings(findings)
    drawn = panels(results) if can_draw() else {}
    body += figure_grid([drawn[name] for name in FIGURES if name in drawn])
    for at, column in enumerate(results["by"]):
        panel = drawn.get(subset_figure(at))
        figure = f"<div>{svg_figure(panel.svg, panel.caption)}</div>" if panel else ""
        body += section(f"By {column['column']}", subsets_section(column, figure))
    body += section("What predicts the label", _predictors(results))
    body += section("Features side by side", _odds(results))
    body += section("Phrases", _phrases(results))
    body += section("Lengths", _lengths(results))
    body += section("Is the longer one chosen?", _bias(results) + _bins(results))
    body += section("Rows to look at", _rows(results))
    if len(results["sets"]) > 1:
        body += section("Prompts in several sets", _leaks(results))
    body += section("Scripts", _scripts(results))
    for kind, heading in KINDS.items():
        if chosen := [sample for sample in samples if sample["kind"] == kind]:
            body += section(heading, "".join(map(_card, chosen)))
    return page("What is in the preference data", body)


def _findings(findings: Sequence[Sentence]) -> str:
    marks = {True: '<span class="bad-text">look at</span>', False: '<span class="good-text">noted</span>'}
    return findings_list(f"{marks[each.problem]}: {text(each.text)}" for each in findings)


def _ends(share: Mapping[str, Any]) -> list[str]:
    return [_percentage(share[name], 1) for name in ("estimate", "low", "high")]


def _percentage(share: float | None, digits: int) -> str:
    return number(None if share is None else 100 * share, digits)


def _predictors(results: Mapping[str, Any]) -> str:
    rows = [
        [
            text(each["name"]),
            *_ends(each["accuracy"]),
            _percentage(each["decided"], 0),
            f"{each['fitted']:,}",
        ]
        for each in results["shortcuts"]["predictors"]
    ]
    head = ["", "right, %", "from", "to", "tells apart, %", "fitted on, pairs"]
    return f"<p>{text(_FLOOR_NOTE)}</p>{table(head, rows, numeric=True)}"


def _odds(results: Mapping[str, Any]) -> str:
    found = results["odds_ratios"]
    rows = [
        [
            text(each["name"]),
            *(number(each[key], 2) for key in ("ratio", "low", "high")),
            f"{each['differs']:,}",
        ]
        for each in found["features"]
    ]
    rare = f"<p>Too rare to say: {text(', '.join(found['too_rare']))}.</p>" if found["too_rare"] else ""
    head = ["", "odds ratio", "from", "to", "pairs that differ"]
    return f"<p>{text(_ODDS_NOTE)}</p>{table(head, rows, numeric=True)}{rare}"


def _phrases(results: Mapping[str, Any]) -> str:
    body = f"<p>{text(_PHRASES_NOTE)}</p>"
    for place, heading in (("opening", "In the first eight words"), ("anywhere", "Anywhere")):
        found = results["phrases"][place]
        body += f"<h3>{heading}: {found['found']:,} of {found['tested']:,}, in {found['pairs']:,} pairs</h3>"
        rows = [
            [
                f'<span dir="auto">{text(each["text"])}</span>',
                f"{each['chosen']:,}",
                f"{each['rejected']:,}",
                number(each["log_odds"], 2),
                number(each["z"], 1),
                f"{each['p_value']:.1g}",
            ]
            for each in found["phrases"][:_SHOWN_PHRASES]
        ]
        body += table(["", "chosen", "rejected", "log-odds", "z", "p"], rows, numeric=True) if rows else ""
    return body


def _lengths(results: Mapping[str, Any]) -> str:
    names = ("mean", "std", "min", "p5", "p25", "median", "p75", "p95", "p99", "max")
    body = ""
    for unit, parts in results["lengths"].items():
        limits = list(next(iter(parts.values()))["over"])
        rows = [
            [
                text(part),
                *(number(found[name], 1 if name in ("mean", "std") else 0) for name in names),
                *(number(100 * found["over"][limit], 1) for limit in limits),
            ]
            for part, found in parts.items()
        ]
        head = ["", *names, *(f"% over {limit}" for limit in limits)]
        body += f"<h3>{text(unit.capitalize())}</h3>{table(head, rows, numeric=True)}"
    return body


def _bias(results: Mapping[str, Any]) -> str:
    rows = [
        [text(unit), *(percent(found[name]) for name in ("longer", "equal", "shorter"))]
        for unit, found in results["label_bias"].items()
    ]
    return table(["", "chosen is longer", "equally long", "chosen is shorter"], rows, numeric=True)


def _bins(results: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{number(each['from'], 2)} to {number(each['to'], 2)}",
            f"{each['rows']:,}",
            *_ends(each),
        ]
        for each in results["length_bins"]
    ]
    return table(
        ["times as long as the other", "completions", "preferred, %", "from", "to"], rows, numeric=True
    )


def _rows(results: Mapping[str, Any]) -> str:
    rows = [
        [text(ROW_RULES[rule].text), f"{found['rows']:,}", found["severity"]]
        for rule, found in results["hygiene"].items()
    ]
    return f"<p>{_ROWS_NOTE}</p>{table(['', 'rows', ''], rows, numeric=True)}"


def _leaks(results: Mapping[str, Any]) -> str:
    names = results["sets"]
    rows = [
        [
            text(names[each["set"]]),
            text(names[each["also_in"]]),
            *(f"{each[key]:,}" for key in ("rows", "prompts", "near_prompts", "whole_rows")),
        ]
        for each in results["leaks"]
    ]
    head = ["rows of", "that are also in", "of", "same prompt", "nearly the same prompt", "same row"]
    return table(head, rows, numeric=True)


def _scripts(results: Mapping[str, Any]) -> str:
    rows = [
        [text(name), f"{found['chosen']:,}", f"{found['rejected']:,}"]
        for name, found in results["scripts"].items()
    ]
    return table(["most letters", "chosen", "rejected"], rows, numeric=True, narrow=True)


def _card(sample: Mapping[str, Any]) -> str:
    sides = "".join(
        f"<div><h3>{side}</h3>{verbatim(_head(sample[side]))}</div>" for side in ("chosen", "rejected")
    )
    note = f"{sample['where']}{'; ' + sample['note'] if sample['note'] else ''}"
    return (
        f'<div class="card"><p class="soft">{text(note)}</p>{verbatim(_head(sample["prompt"], end=True))}'
        f'<div class="grid">{sides}</div></div>\n'
    )


def _head(said: str, *, end: bool = False) -> str:
    if len(said) <= _MOST_TEXT:
        return said
    left_out = f"[{len(said) - _MOST_TEXT:,} characters left out]"
    return f"{left_out} {said[-_MOST_TEXT:]}" if end else f"{said[:_MOST_TEXT]} {left_out}"
