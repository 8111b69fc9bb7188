"""One page of a pipeline: its stages and rounds, gates, promotions, alarms, from what its folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlhf_algos.pipeline.results import HISTORY, ResultStore
from rlhf_algos.pipeline.times import in_words, seconds_of
from rlhf_data import RunFolder, atomic_write_text
from rlhf_eval.html import number, page, section, table, text

PAGE = "pipeline.html"
_SHOWN = (
    *("eval_loss", "eval_accuracy", "eval_rewards/accuracies", "eval_reward", "eval_mean_reward"),
    *("score", "reward", "words"),
    *("distinct_2", "unique", "entropy", "rows"),
)
"""Numbers of a stage that the page shows, as far as it has them."""
_PAGES = (
    *("log.txt", "run/training_curves.png", "run/samples.html", "run/report.html"),
    *("report/evaluation.html", "report/samples.html"),
)
"""Files of a stage that the page leads to."""
_GOOD = ("accepted", "pass")
_BAD = ("rejected", "fail", "failed")


def write_page(root: Path) -> Path:
    """Write `pipeline.html` from the manifest and the history; where it is."""
    manifest = ResultStore(root).read_manifest() or {"stages": {}, "current": {}}
    history = RunFolder(root).read_lines(HISTORY)
    stages: Mapping[str, Any] = manifest["stages"]
    parts = [
        f"<h1>{text(root.resolve().name)}</h1>\n<p class='soft'>{_summary(stages, history)}</p>\n",
        section("Promotions and gates", _decisions(stages, manifest["current"])),
        section("Stages", _stages(stages, history, root)),
    ]
    rounds = _rounds(stages)
    if rounds:
        parts.insert(2, section("Rounds", rounds))
    path = root / PAGE
    atomic_write_text(path, page(f"Pipeline {root.resolve().name}", "".join(parts)))
    return path


def _summary(stages: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for entry in stages.values():
        counts[entry.get("status", "?")] = counts.get(entry.get("status", "?"), 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    rejected = sum(entry.get("decision") == "rejected" for entry in stages.values())
    alarms = sum(len(entry.get("alarms", ())) for entry in stages.values())
    more = [f"{rejected} rejected by a gate"] * bool(rejected) + [f"{alarms} alarms"] * bool(alarms)
    used = {entry.get("address") for entry in stages.values()}
    seconds = sum(each for address, each in seconds_of(history).items() if address in used)
    took = f" Its results took {in_words(seconds)} to make." if seconds else ""
    return text(f"{len(stages)} stages: {'; '.join([said, *more])}.{took}")


def _decisions(stages: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The current artefacts, and every gate with its reasons."""
    html = "".join(
        f"<p>Current <b>{text(role)}</b>: <code>{text(each['artefact']['path'])}</code>, "
        f"{'promoted by ' + text(each['stage']) if each['stage'] else 'the model it began with'}</p>"
        for role, each in current.items()
    )
    rows = []
    for name, entry in stages.items():
        if entry["kind"] != "gate" or "metrics" not in entry:
            continue
        reasons = "".join(f"<div>{text(reason)}</div>" for reason in entry["metrics"]["reasons"])
        rows.append([text(name), _coloured(entry["decision"]), reasons])
    if not rows:
        return f"{html}<p>No gate has run.</p>"
    return html + table(["gate", "decision", "what the tests say"], rows)


def _stages(stages: Mapping[str, Any], history: Sequence[Mapping[str, Any]], root: Path) -> str:
    seconds = seconds_of(history)
    rows = []
    for name, entry in stages.items():
        alarms = "".join(f"<div class='bad-text'>{text(alarm)}</div>" for alarm in entry.get("alarms", ()))
        rows.append(
            [
                text(name),
                text(entry["kind"]),
                _coloured(entry.get("decision") or entry.get("status", "")),
                in_words(seconds.get(entry.get("address"))),
                _numbers(entry) + alarms,
                _links(root, entry),
            ]
        )
    return table(["stage", "kind", "status", "time", "numbers", "what it left"], rows)


def _links(root: Path, entry: Mapping[str, Any]) -> str:
    """Links to the folder of a result, its log and its pages, as far as they are there."""
    folder = entry.get("folder")
    if not folder:
        return ""
    pages = [f"{folder}/{path}" for path in _PAGES if (root / folder / path).is_file()]
    found = " · ".join(f"<a href='{text(quote(path))}'>{text(Path(path).name)}</a>" for path in pages)
    return f"<div><a href='{text(quote(folder))}/'><code>{text(folder)}</code></a></div><div>{found}</div>"


def _rounds(stages: Mapping[str, Any]) -> str:
    """For each stage of a loop its numbers, a column for each round."""
    grouped: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for name, entry in stages.items():
        loop, dash, rest = name.partition("-")
        count, _, stage = rest.partition("-")
        if dash:
            grouped.setdefault((loop, stage), {})[int(count)] = entry
    if not grouped:
        return ""
    most = max(max(rounds) for rounds in grouped.values())
    rows = []
    for (loop, stage), rounds in grouped.items():
        for key in _SHOWN:
            values = [_value(rounds.get(count, {}), key) for count in range(1, most + 1)]
            if any(value is not None for value in values):
                shown = [number(value, _digits(key)) for value in values]
                rows.append([text(f"{loop}, {stage}: {key}"), *shown])
        decisions = [rounds.get(count, {}).get("decision", "") for count in range(1, most + 1)]
        if any(decisions):
            rows.append([text(f"{loop}, {stage}: decision"), *map(_coloured, decisions)])
    return table(["", *(f"round {count}" for count in range(1, most + 1))], rows, numeric=True, narrow=True)


def _numbers(entry: Mapping[str, Any]) -> str:
    shown = []
    for key in _SHOWN:
        value = _value(entry, key)
        if value is not None:
            before = ((entry.get("metrics") or {}).get("before") or {}).get(key)
            was = f"{number(before)} → " if before is not None else ""
            shown.append(f"<div>{text(key)}: {was}{number(value, _digits(key))}</div>")
    for suite, measured in ((entry.get("metrics") or {}).get("suites") or {}).items():
        shown.append(f"<div>{text(suite)}: {number(measured['mean'])}</div>")
    return "".join(shown)


def _digits(key: str) -> int:
    return 0 if key == "rows" else 3


def _value(entry: Mapping[str, Any], key: str) -> Any:
    metrics = entry.get("metrics") or {}
    after = metrics.get("after") or {}
    return after.get(key) if key in after else metrics.get(key)


def _coloured(status: str) -> str:
    kind = "good-text" if status in _GOOD else "bad-text" if status in _BAD else ""
    return f"<span class='{kind}'>{text(status)}</span>" if kind else text(status)
