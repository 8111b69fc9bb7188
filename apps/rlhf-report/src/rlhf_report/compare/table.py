"""The table of scores, prompts by models, joined from all files, with the texts' lengths and hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlhf_data import UserError
from rlhf_eval.answers import Answer, default_metric, encodable, read_answers
from rlhf_eval.stats import style_counts
from rlhf_eval.stats.differences import VERDICTS

PREFERENCE = "preference"


@dataclass(frozen=True)
class Options:
    """Settings of a comparison.

    `baseline` is the file of the outputs that preferences are against; prompts of one value of `cluster`
    belong together.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    baseline: str | None = None
    metric: str | None = None
    slice: str | None = None
    cluster: str | None = None
    lower_is_better: bool = False
    level: float = 0.95
    cases: int = 4


@dataclass
class Column:
    """One file, by prompt; a prompt with several rows counts with their mean."""

    totals: dict[bytes, list[float]] = field(default_factory=dict)
    """Number of rows, and the sums of what `_sums` has of each."""
    rows: int = 0
    without_score: int = 0
    has_outputs: bool = True
    has_baseline: bool = True
    only_verdicts: bool = True
    """Whether each score is true or false, or a grade."""
    like_verdicts: bool = True
    """Whether each score is 0, ½ or 1."""


@dataclass
class Table:
    """All files, on the prompts that all have.

    Attributes:
        metric: Name of the score.
        keys: Keys of the n prompts.
        scores: (n, models), more is better.
        texts: (n, models, 4) characters, headings, list items, bold passages; None without outputs.
        baseline: (n, models, 4) of what each was compared with; None if not all are known.
        slices: (n,) of the named column; None without.
        clusters: (n,) of the cluster column.
        rows: Rows in each file.
        unmatched: Prompts of each file that not all others have.
        unscored: Rows of each file without the metric.
        kinds: The kind of each file's scores: `verdicts` are true or false, `numbers` are others than 0, ½
            and 1,
            `either` may be both.
    """

    metric: str
    keys: list[bytes]
    scores: np.ndarray
    texts: np.ndarray | None
    baseline: np.ndarray | None
    slices: list[str] | None
    clusters: list[str] | None
    rows: list[int]
    unmatched: list[int]
    unscored: list[int]
    kinds: list[str]


def key_of(prompt: str) -> bytes:
    """The key that joins prompts: a hash of the text without surrounding space."""
    return hashlib.blake2b(prompt.strip().encode("utf-8", "backslashreplace"), digest_size=12).digest()


def read_table(options: Options) -> Table:
    """Read and join all files."""
    metric = options.metric or _common_metric(options.files)
    labels: dict[bytes, tuple[str, str]] = {}
    columns = [_read_column(path, metric, options, labels) for path in options.files]
    baseline = None if options.baseline is None else _read_outputs(options.baseline)
    keys = [key for key in columns[0].totals if all(key in column.totals for column in columns)]
    if not keys:
        shown = " and ".join(options.files[:2]) + " and others" * (len(options.files) > 2)
        raise UserError(
            f"no prompt is in all of {shown}; files are joined by the text of their prompts",
            code="no_common_prompt",
        )
    groups = {labels[key][1] for key in keys} if options.cluster else keys
    if len(groups) < 2:
        unit = options.cluster or "prompt"
        raise UserError(
            f"all that the files share is one {unit}; an interval needs two at the least", code="too_few_rows"
        )
    cells = np.array([[column.totals[key] for column in columns] for key in keys])
    count = cells[:, :, :1]
    means = cells[:, :, 1:] / count
    scores = means[:, :, 0]
    if metric == PREFERENCE:
        scores = _as_probability(scores, options.files)
    else:
        _check_kinds(metric, options, [_kind(column) for column in columns], scores)
    against = means[:, :, 5:9] if all(column.has_baseline for column in columns) else None
    if baseline is not None:
        missing = [key for key in keys if key not in baseline]
        if missing:
            raise UserError(
                f"{options.baseline} has no output for {len(missing)} of the {len(keys)} prompts; "
                "give the baseline's outputs of all of them",
                code="missing_value",
            )
        against = np.repeat(np.array([baseline[key] for key in keys])[:, None], len(columns), axis=1)
    return Table(
        metric=metric,
        keys=keys,
        scores=-scores if options.lower_is_better else scores,
        texts=means[:, :, 1:5] if all(column.has_outputs for column in columns) else None,
        baseline=against,
        slices=[labels[key][0] for key in keys] if options.slice else None,
        clusters=[labels[key][1] for key in keys] if options.cluster else None,
        rows=[column.rows for column in columns],
        unmatched=[len(column.totals) - len(keys) for column in columns],
        unscored=[column.without_score for column in columns],
        kinds=[_kind(column) for column in columns],
    )


def texts_of(files: Sequence[str], wanted: Sequence[bytes]) -> dict[tuple[str, bytes], tuple[str, str]]:
    """Prompt and output of some prompts, by file and key; the files are read again, as texts are not kept."""
    left, found = set(wanted), {}
    for path in files:
        for answer in read_answers(path):
            key = key_of(answer.prompt)
            if key in left and (path, key) not in found:
                found[path, key] = (encodable(answer.prompt), encodable(answer.output or ""))
    return found


def _common_metric(files: Sequence[str]) -> str:
    names: set[str] | None = None
    for path in files:
        found: set[str] = set()
        for number, answer in enumerate(read_answers(path)):
            found |= set(answer.scores)
            if number >= 100:
                break
        names = found if names is None else names & found
    metric = default_metric(names or set())
    if metric is None:
        seen = f"they share {', '.join(sorted(names))}" if names else "they share none"
        raise UserError(f"which score should be compared? {seen}; name one with --metric")
    return metric


def _read_column(path: str, metric: str, options: Options, labels: dict[bytes, tuple[str, str]]) -> Column:
    column = Column()
    for answer in read_answers(path):
        column.rows += 1
        if metric not in answer.scores:
            column.without_score += 1
            continue
        key = key_of(answer.prompt)
        column.has_outputs &= answer.output is not None
        column.has_baseline &= answer.baseline is not None
        column.only_verdicts &= metric in answer.verdicts
        column.like_verdicts &= answer.scores[metric] in VERDICTS
        new = _sums(answer, metric)
        old = column.totals.get(key)
        column.totals[key] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
        if options.slice or options.cluster:
            labels.setdefault(key, (_label(answer, options.slice), _label(answer, options.cluster)))
    if not column.totals:
        raise UserError(
            f"{path} has no row with a number for {metric!r}; name another with --metric",
            code="missing_column",
        )
    return column


def _sums(answer: Answer, metric: str) -> list[float]:
    """One, the score, characters, headings, items and bold passages, and those of the baseline."""
    return [1.0, answer.scores[metric], *_measured(answer.output), *_measured(answer.baseline)]


def _read_outputs(path: str) -> dict[bytes, tuple[float, ...]]:
    found = {}
    for answer in read_answers(path):
        if answer.output is None:
            raise UserError(
                f"{answer.place}: no output; the baseline's rows need what it wrote", code="missing_value"
            )
        found[key_of(answer.prompt)] = _measured(answer.output)
    return found


def _measured(text: str | None) -> tuple[float, ...]:
    return (0.0,) * 4 if text is None else (float(len(text)), *map(float, style_counts(text)))


def _label(answer: Answer, name: str | None) -> str:
    if name is None:
        return ""
    found = answer.columns.get(name)
    if found is None:
        raise UserError(
            f"{answer.place}: no column {name!r}; the first file's rows need it", code="missing_column"
        )
    return encodable(str(found))


def _kind(column: Column) -> str:
    if column.only_verdicts:
        return "verdicts"
    return "either" if column.like_verdicts else "numbers"


def _check_kinds(metric: str, options: Options, kinds: Sequence[str], scores: np.ndarray) -> None:
    """Refuse true and false together with numbers that cannot be rates: their means cannot be compared."""
    of_verdicts = [name for name, kind in zip(options.names, kinds, strict=True) if kind == "verdicts"]
    for name, kind, column in zip(options.names, kinds, scores.T, strict=True):
        low, high = column.min(), column.max()
        if of_verdicts and kind == "numbers" and (low < 0 or high > 1):
            raise UserError(
                f"{metric} is true or false in {of_verdicts[0]}, from {low:g} to {high:g} in {name}: the two "
                "means cannot be compared; give files with one kind of score, or another --metric"
            )


def _as_probability(scores: np.ndarray, files: Sequence[str]) -> np.ndarray:
    """Preferences as the probability that the model wins; AlpacaEval has 1 and 2 for baseline and model."""
    found = []
    for path, column in zip(files, scores.T, strict=True):
        alpaca = column.max() > 1
        values = np.where(column == 0, 1.5, column) - 1 if alpaca else column  # 0 is AlpacaEval's tie
        if values.min() < 0 or values.max() > 1:
            raise UserError(
                f"{path}: preferences from {column.min():g} to {column.max():g}; expected 0 to 1, or "
                "AlpacaEval's 1 (the baseline wins) to 2 (the model wins)"
            )
        found.append(values)
    return np.stack(found, axis=1)


def name_of(path: str) -> str:
    """Default name of a file's model: the file's name without its endings."""
    name = Path(path).name
    for ending in (".gz", ".jsonl", ".json", ".eval", ".csv", ".parquet", ".arrow"):
        name = name.removesuffix(ending)
    return name or path
