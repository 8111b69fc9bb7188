"""From the options of `rlhf-report compare` to its three files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_data import UserError, atomic_write_json, atomic_write_text, ensure_writable_folder
from rlhf_eval.answers import encodable
from rlhf_report.compare.compute import compare
from rlhf_report.compare.page import comparison_page
from rlhf_report.compare.table import PREFERENCE, Options, Table, name_of, read_table, texts_of
from rlhf_report.compare.words import amount, is_rate, label, left_out, opening, text_report, verdict
from rlhf_report.options import split_name

_CASES = 4
_JSON, _TEXT, _PAGE = "comparison.json", "comparison.txt", "comparison.html"


def run_compare(given: dict[str, Any]) -> None:
    """Read, compare, write, and say what came out."""
    options = _options(given)
    table = read_table(options)
    if len(options.files) == 1 and table.metric != PREFERENCE:
        raise UserError(
            f"{options.files[0]} has no preferences, and nothing to compare it with; give two files",
            code="too_few_rows",
        )
    found = compare(table, options)
    cases = _cases(table, options, found)
    said = [opening(found), *verdict(found), *left_out(found)]
    page = comparison_page(found, cases)
    write_comparison(given["output_dir"], found | {"cases": cases}, text_report(found), page, said)


def write_comparison(
    output_dir: str, numbers: dict[str, Any], tables: str, page: str, said: Sequence[str]
) -> None:
    """Write the three files of a comparison, and print what came out and where they are."""
    folder = ensure_writable_folder(output_dir)
    atomic_write_json(folder / _JSON, numbers)
    atomic_write_text(folder / _TEXT, tables)
    atomic_write_text(folder / _PAGE, page)
    print("\n".join(said))
    print(f"The page: {folder / _PAGE}; the numbers: {_JSON}; the tables: {_TEXT}")


def _options(given: dict[str, Any]) -> Options:
    if math.isnan(given["level"]):
        raise UserError("--level nan: expected a number between 0 and 1, such as 0.95", code="invalid_option")
    if given["threshold"] is not None:
        raise UserError(
            "--threshold is for training runs, and these are files of answers; leave it out",
            code="unused_option",
        )
    entries = [split_name(entry) for entry in given["files"]]
    names = [encodable(name or name_of(path)) for name, path in entries]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two files are called {name}; tell them apart with NAME=FILE", code="repeated_name"
            )
    return Options(
        files=tuple(path for _, path in entries),
        names=tuple(names),
        baseline=given["baseline"],
        metric=given["metric"],
        slice=given["slice_by"],
        cluster=given["cluster"],
        lower_is_better=given["lower_is_better"],
        level=given["level"],
        cases=_CASES if given["cases"] is None else given["cases"],
    )


def _cases(table: Table, options: Options, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompts where the best model and the next, or the baseline, differ most, either way."""
    best, *others = (options.names.index(model["name"]) for model in found["models"])
    if table.texts is None or not options.cases or not (others or options.baseline):
        return []
    first = table.scores[:, best]
    if others:
        other, second = (options.names[others[0]], options.files[others[0]]), table.scores[:, others[0]]
    else:
        other, second = (name_of(str(options.baseline)), str(options.baseline)), 1 - first
    sides = [(options.names[best], options.files[best]), other]
    ranked = np.argsort(second - first, kind="stable").tolist()
    won = [i for i in ranked[: options.cases] if first[i] > second[i]]
    lost = [i for i in ranked[::-1][: options.cases] if first[i] < second[i]]
    texts = texts_of([path for _, path in sides], [table.keys[i] for i in (*won, *lost)])
    sign = -1 if options.lower_is_better else 1
    preferred = table.metric == PREFERENCE
    shown, unit = ("win probability", "%") if preferred else (label(found), "%" * is_rate(found))
    cases = []
    for i in (*won, *lost):
        answers = [
            {
                "name": name,
                "score": f"{shown} {amount(found, sign * float(score))}{unit}",
                "output": texts[path, table.keys[i]][1],
            }
            for (name, path), score in zip(sides, (first[i], second[i]), strict=True)
        ]
        prompt = texts[sides[0][1], table.keys[i]][0]
        heading = f"{sides[0][0]} {'wins' if i in won else 'loses'}"
        cases.append({"prompt": prompt, "heading": heading, "won": i in won, "answers": answers})
    return cases
