"""Cases as Markdown, JSON lines, CSV and HTML; nothing in a completion is taken for markup or a formula."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from statistics import fmean

from rlhf_eval.html import number, page, table, text, verbatim
from rlhf_eval.samples.sources import Case, Completion

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Characters that a spreadsheet reads as the start of a formula."""


def models_of(cases: Sequence[Case]) -> list[str]:
    """Names of the models, in order."""
    return list(cases[0].completions) if cases else []


def to_jsonl(cases: Sequence[Case], title: str, note: str) -> str:
    """One object per prompt: `prompt`, and by model `completion`, `score` and what else is known."""
    rows = [
        {
            "prompt": case.prompt,
            "models": {
                name: {"completion": each.text, "score": each.score, **each.facts}
                for name, each in case.completions.items()
            },
        }
        for case in cases
    ]
    return "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)


def to_csv(cases: Sequence[Case], title: str, note: str) -> str:
    """One line per prompt; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = models_of(cases)
    writer.writerow(
        ["prompt", *(_cell(f"{name} {part}") for name in names for part in ("completion", "score"))]
    )
    for case in cases:
        cells: list[str | float | None] = [_cell(case.prompt)]
        for each in case.completions.values():
            cells += [_cell(each.text), each.score]
        writer.writerow(cells)
    return _readable(buffer.getvalue())


def to_markdown(cases: Sequence[Case], title: str, note: str) -> str:
    """A section per prompt; every text is in a fenced block whose fence is longer than any within it."""
    parts = [f"# {_inline(title)}\n\n{_inline(note)}\n"]
    for index, case in enumerate(cases, start=1):
        parts.append(f"## {index}\n\n{_fenced(case.prompt)}\n")
        parts += [
            f"**{_inline(name)}**{_inline(_facts(each))}\n\n{_fenced(each.text)}\n"
            for name, each in case.completions.items()
        ]
    return _readable("\n".join(parts))


def to_html(cases: Sequence[Case], title: str, note: str) -> str:
    """One page that loads nothing: the mean scores, then a card per prompt."""
    body = f"<h1>{text(title)}</h1>\n<p>{text(note)}</p>\n"
    means = [(name, _mean(cases, name)) for name in models_of(cases)]
    if any(mean is not None for _, mean in means):
        rows = [[text(name), number(mean)] for name, mean in means]
        body += table(["", "mean score of these"], rows, numeric=True, narrow=True)
    for index, case in enumerate(cases, start=1):
        body += f'<h2>{index}</h2><div class="card">{verbatim(case.prompt)}<div class="grid small">'
        for name, each in case.completions.items():
            heading = f'<h3>{text(name)}<span class="soft">{text(_facts(each))}</span></h3>'
            body += f"<div>{heading}{verbatim(each.text)}</div>"
        body += "</div></div>\n"
    return page(title, body)


def _mean(cases: Sequence[Case], name: str) -> float | None:
    scores = [case.completions[name].score for case in cases]
    known = [score for score in scores if score is not None]
    return fmean(known) if known else None


def _facts(completion: Completion) -> str:
    known = [] if completion.score is None else [f"score {completion.score:.4g}"]
    known += [f"{name.replace('_', ' ')} {_short(value)}" for name, value in completion.facts.items()]
    return f", {', '.join(known)}" if known else ""


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: str) -> str:
    return f"'{value}" if value.lstrip(" ").startswith(_FORMULA) else value


def _inline(value: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>~&$-])", r"\\\1", " ".join(value.split()))


def _fenced(value: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{value}\n{fence}"


def _readable(value: str) -> str:
    """Characters that UTF-8 cannot hold (lone surrogates) as backslash escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


FORMATS: dict[str, Callable[[Sequence[Case], str, str], str]] = {
    "md": to_markdown,
    "jsonl": to_jsonl,
    "csv": to_csv,
    "html": to_html,
}
"""Writers by the end of the file's name; each takes the cases, a title and a note on what they are."""
