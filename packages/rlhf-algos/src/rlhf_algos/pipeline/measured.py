"""Measures of stages' results: metrics for the manifest, scores by row for gates, signs of collapse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data import RunFolder, Text, UserError, read_rows

_SUITES = "items.jsonl"
"""Of a report of kind capability: a row for every item."""
COMPARED_WITH = ("start", "previous", "baseline")
"""A gate's settings that name what its candidate is compared with."""
RATING = "rating"
"""Metric of a file of ratings: 1 where an answer was liked, else 0."""
_RESULT = re.compile(r"(?:^|/)results/([a-z_]+-[0-9a-f]{16})(?:/|$)")
_COLUMNS = ("reward", "held_out_reward", "kl", "length")
_LEAST, _MOST = 0.5, 2.0
"""A measure of texts raises an alarm below or above these multiples of its value in the first round."""


def metrics_of(folder: Path) -> dict[str, Any]:
    """Numbers about a finished stage, the same whenever and however often it was interrupted."""
    for path, read in _READERS.items():
        if (folder / path).is_file():
            return read(folder)
    return {}


@dataclass
class Scores:
    """Scores of an evaluation, row by row.

    Attributes:
        metrics: the scores of each metric, by row.
        suites: names of the metrics that are capability suites.
        unpaired: names of the metrics whose rows no other evaluation shares, such as users' ratings.
        left_out: number of ratings of other models.
    """

    metrics: dict[str, dict[str, float]]
    suites: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    left_out: int = 0


def scores_of(report: Path, of: Callable[[str | None], bool] = lambda _: True) -> Scores:
    """Scores of a report of `evaluate` or `capability`, or of a file of ratings of `rlhf-serve --feedback`.

    Args:
        report: the folder, or the file.
        of: whether ratings of the model in a folder count; None where the row does not say.

    Raises:
        UserError: it is none of these.
    """
    if report.is_file():
        ratings, left_out = _ratings(report, of)
        return Scores({RATING: ratings}, unpaired=(RATING,), left_out=left_out)
    run = RunFolder(report)
    if (report / _SUITES).is_file():
        found: dict[str, dict[str, float]] = {}
        for row in run.read_lines(_SUITES):
            found.setdefault(row["suite"], {})[row["id"]] = float(row["score"])
        return Scores(found, suites=tuple(found))
    completions = report / "completions" / "policy.jsonl"
    if not completions.is_file():
        problem = "holds no evaluation" if report.exists() else "does not exist"
        raise UserError(
            f"{report} {problem}; name the report of a stage of kind evaluate, capability or lm_eval, or a "
            "file of ratings",
            code="no_evaluation" if report.exists() else "file_not_found",
            path=str(report),
        )
    rows = RunFolder(completions.parent).read_lines(completions.name)
    return Scores({**_by_prompt(rows), **_accuracies(report)})


def same_result(one: str, other: str) -> bool | None:
    """Whether two paths lead into the same result of a pipeline; None if one leads into none.

    Where the pipelines' folders lie does not matter.
    """
    found = [_RESULT.search(Path(path).as_posix()) for path in (one, other)]
    if None in found:
        return None
    first, second = (match[1] for match in found if match)
    return first == second


def check_ratings(settings: Mapping[str, Any]) -> None:
    """Refuse files among a gate's settings that do not hold ratings; other reports are passed over.

    Raises:
        UserError: a row has no label.
    """
    for name in ("measured", *COMPARED_WITH):
        given = settings.get(name)
        for report in given if isinstance(given, list) else [given]:
            if report and Path(report).is_file():
                scores_of(Path(report))


def collapse_alarms(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs that the policy has collapsed in a later round, compared with the first round.

    The share of distinct 2-grams, of distinct texts, or the entropy per token fell below half; the mean
    length more than doubled or halved; most texts are cut off at the maximum length and were not before.

    Args:
        rounds: measures of the texts of each round, see `text_measures`.
    """
    alarms = []
    for number, now in enumerate(rounds[1:], 2):
        for key, (what, low, high) in _WATCHED.items():
            first, value = rounds[0].get(key), now.get(key)
            if not first or value is None:
                continue
            if value < low * first or value > high * first:
                alarms.append(f"round {number}: {what} went from {first:.3g} to {value:.3g}")
        if (now.get("truncated") or 0) > 0.5 >= (rounds[0].get("truncated") or 0):
            alarms.append(f"round {number}: {now['truncated']:.0%} of the texts are cut off at their longest")
    return alarms


_WATCHED = {
    "distinct_2": ("the share of different 2-grams", _LEAST, float("inf")),
    "unique": ("the share of different texts", _LEAST, float("inf")),
    "words": ("the mean number of words", _LEAST, _MOST),
    "entropy": ("the entropy of the policy per token", _LEAST, float("inf")),
}


def text_measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Length, diversity, truncation and score of completions."""
    from rlhf_eval.evaluation.texts import distinct_share

    texts = [text for row in rows for text in _texts(row)]
    scores = [row["score"] for row in rows if isinstance(row.get("score"), int | float)]
    cut = [row["finish_reason"] == "length" for row in rows if row.get("finish_reason") is not None]
    return {
        "rows": len(rows),
        "words": _mean([len(text.split()) for text in texts]),
        "distinct_2": distinct_share(texts, 2) if texts else None,
        "unique": len(set(texts)) / len(texts) if texts else None,
        "truncated": _mean(cut),
        "score": _mean(scores),
    }


def _texts(row: Mapping[str, Any]) -> list[str]:
    candidates = row.get("candidates")
    if isinstance(candidates, list):
        return [str(each.get("text", "")) for each in candidates]
    said = row.get("completion")
    return [said] if isinstance(said, str) else [text_of(said)] if isinstance(said, list) else []


def text_of(said: Text) -> str:
    """The words of a text or of messages, and the tools that these call, without white space around them."""
    if isinstance(said, str):
        return said.strip()
    parts = [str(each.get(key) or "") for each in said for key in ("content", "tool_calls")]
    return "\n".join(part.strip() for part in parts if part.strip())


def _of_run(folder: Path) -> dict[str, Any]:
    results = RunFolder(folder / "run").read_results() or {}
    return {key: results.get(key) for key in ("before", "after", "steps")}


def _of_rows(folder: Path) -> dict[str, Any]:
    rows = [row for _, row in read_rows(folder / "rows.jsonl")]
    if rows and "completion" not in rows[0]:
        return {"rows": len(rows)}
    return text_measures(rows)


def _of_report(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "report" / "results.json").read_text(encoding="utf-8"))
    if "suites" in results:
        return {"suites": results["suites"]}
    policy = next((each for each in results["models"] if each["name"] == "policy"), {})
    found = {kind: policy[kind]["mean"]["estimate"] for kind in _COLUMNS[:2] if kind in policy}
    if "kl" in policy:
        found |= {"kl": policy["kl"]["kl"]["estimate"], "entropy": policy["kl"]["entropy_per_token"]}
    if "tokens" in policy:
        found["tokens"] = policy["tokens"]["estimate"]
    return found | {key: policy["diversity"].get(key) for key in ("distinct_2", "unique")}


def _of_verdict(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    return {key: found[key] for key in ("outcome", "reasons")}


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "verdict.json": _of_verdict,
    "run/results.json": _of_run,
    "report/results.json": _of_report,
    "rows.jsonl": _of_rows,
}


def _ratings(path: Path, of: Callable[[str | None], bool]) -> tuple[dict[str, float], int]:
    """The ratings that count, by row, and how many others there are."""
    found: dict[str, float] = {}
    left_out = 0
    if not path.stat().st_size:  # a server has begun it, and nobody has rated
        return found, left_out
    for number, row in read_rows(path):
        if not isinstance(row.get("label"), bool):
            raise UserError(
                f"{path}, row {number}: no label that is true or false; expected ratings as rlhf-serve "
                "--feedback writes them",
                code="missing_value",
                path=str(path),
            )
        folder = row.get("folder")
        if of(folder if isinstance(folder, str) else None):
            found[str(number)] = float(row["label"])
        else:
            left_out += 1
    return found, left_out


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the completions of each prompt."""
    sums: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values = {key: row.get(key) for key in _COLUMNS}
        if row.get("finish_reason") is not None:
            values["truncated"] = float(row["finish_reason"] == "length")
        for key, value in values.items():
            if isinstance(value, int | float):
                sums.setdefault(key, {}).setdefault(row["prompt"], []).append(float(value))
    return {
        key: {prompt: sum(each) / len(each) for prompt, each in by_prompt.items()}
        for key, by_prompt in sums.items()
    }


def _accuracies(report: Path) -> dict[str, dict[str, float]]:
    """Accuracy of the reward on pairs; the report has its mean only, so its rows pair with no other's."""
    results = json.loads((report / "results.json").read_text(encoding="utf-8"))
    found = {}
    for each in results.get("reward_accuracy", ()):
        right = round(each["accuracy"]["estimate"] * each["pairs"])
        names = {f"{report} {i}": float(i < right) for i in range(each["pairs"])}
        found[f"{each['by']}_accuracy"] = names
    return found


def _mean(values: Sequence[Any]) -> float | None:
    return sum(values) / len(values) if values else None
