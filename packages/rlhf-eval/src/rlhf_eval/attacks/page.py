"""The page of attacks on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_eval.attacks.transforms import CONTROL, TRANSFORMS
from rlhf_eval.evaluation.findings import percent_text
from rlhf_eval.html import findings_list, number, page, paragraphs, section, table, text, verbatim

_SHOWN = 3
"""Succeeded attacks of each kind."""
_HEAD = (
    *("change of the prompt", "rows", "right before", "became wrong", "success rate [95%]", "became right"),
    *("drop of the score [95%]", "p (Holm)"),
)


def attack_sentence(result: Mapping[str, Any]) -> str:
    """One result of `AttackReport.to_dict` in words."""
    name, right = result["transform"], result["right_before"]
    if not result["rows"]:
        return f"{name}: no row can be changed in this way"
    if not right:
        return f"{name}: none of {result['rows']} answers was right before, so that no attack can succeed"
    rate = percent_text(result["success"])
    found = f"{name}: {result['became_wrong']} of {right} right answers became wrong, {rate}"
    others = f"{result['became_right']} of {result['rows'] - right} others became right"
    if name == CONTROL:
        return f"{found}; the same prompts, so that anything but 0 is the noise of the machine"
    return f"{found}; {others}; p = {result['p_holm']:.2g}"


def attack_page(results: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], **names: str) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        results: `transforms` of `AttackReport.to_dict`.
        rows: of the report.
        names: `model`, `data` and how an answer is `right`.
    """
    title = f"Attacks on {names['model']}"
    body = (
        f"<h1>{text(title)}</h1>\n<p>{text(names['data'])}; an answer is right {text(names['right'])}.</p>\n"
    )
    body += findings_list(text(attack_sentence(each)) for each in results)
    body += section("How often does an attack succeed?", table(_HEAD, [_row(each) for each in results]))
    cases = [
        case for each in results for case in _cases(each["transform"], rows) if each["transform"] != CONTROL
    ]
    if cases:
        body += section("Answers that became wrong", "".join(cases))
    return page(title, body + section("How it was computed", _notes(results)), sortable=True)


def _row(result: Mapping[str, Any]) -> list[str]:
    drop = result["drop"]
    ends = "" if drop["low"] is None else f" [{number(drop['low'])}, {number(drop['high'])}]"
    return [
        text(result["transform"]),
        str(result["rows"]),
        str(result["right_before"]),
        str(result["became_wrong"]),
        percent_text(result["success"]),
        str(result["became_right"]),
        number(drop["estimate"]) + ends,
        f"{result['p_holm']:.2g}",
    ]


def _cases(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [row for row in rows if row["transform"] == name and row["succeeded"]]
    return [
        f'<div class="card"><h3>{text(name)}</h3>{verbatim(row["attacked"])}<div class="turns">'
        f'<div class="turn good"><h4>before</h4>{verbatim(row["before"]["written"])}</div>'
        f'<div class="turn bad"><h4>after</h4>{verbatim(row["after"]["written"])}</div></div></div>'
        for row in found[:_SHOWN]
    ]


def _notes(results: Sequence[Mapping[str, Any]]) -> str:
    left_out = [
        f"{each['transform']}: {each['not_applicable']} cannot be changed so, {each['too_long']} are too long"
        for each in results
        if each["not_applicable"] or each["too_long"]
    ]
    what = "; ".join(
        f"{each['transform']}: {(TRANSFORMS[each['transform']].__doc__ or '').partition('.')[0].strip()}"
        for each in results
    )
    notes = [
        "Success rate: of the rows that were right before, the share that is wrong after, with Wilson's "
        "interval. p: McNemar's exact test of rows that became wrong against rows that became right, "
        "corrected by Holm over all changes but the control. Answers are greedy; choices are "
        "taken by likelihood.",
        what + ".",
        *(["Rows left out: " + "; ".join(left_out) + "."] if left_out else []),
    ]
    return paragraphs(notes)
