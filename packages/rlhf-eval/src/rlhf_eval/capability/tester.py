"""Runs capability suites on a model, and compares what it could do before with what it can do after."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_data import PromptRecord, RunFolder, UserError, atomic_write_json, atomic_write_lines, finite
from rlhf_eval import stats
from rlhf_eval.capability.items import Item
from rlhf_eval.capability.suites import SUITES
from rlhf_eval.evaluation import Policy, prompt_ids
from rlhf_eval.evaluation.written import Progress, no_progress
from rlhf_eval.gates import Gate, GateVerdict, judge_gates, rows_to_find_drop

_LOG = logging.getLogger(__name__)
ITEMS = "items.jsonl"
_MAX_TOKENS = 1 << 14
_BATCH = 32


@dataclass(frozen=True)
class CapabilityReport:
    """Scores of a model on capability suites.

    Attributes:
        items: A row for each item: `suite`, `id`, `score`, and what was written.
    """

    items: tuple[Mapping[str, Any], ...]

    def scores(self) -> dict[str, dict[str, float]]:
        """Scores by suite and item."""
        found: dict[str, dict[str, float]] = {}
        for row in self.items:
            found.setdefault(row["suite"], {})[row["id"]] = row["score"]
        return found

    def summary(self) -> dict[str, dict[str, Any]]:
        """Mean with its 95% interval, and number of items, of each suite."""
        found = {}
        for suite, scores in self.scores().items():
            values = list(scores.values())
            rate = all(value in (0, 1) for value in values)
            interval = (stats.proportion_interval if rate else stats.mean_interval)(values, unit="item")
            ends = {"low": interval.low, "high": interval.high}
            found[suite] = finite({"mean": interval.estimate, **ends, "items": interval.n})
        return found

    def write(self, folder: Path, **facts: Any) -> None:
        """Write `items.jsonl`, then `results.json`."""
        atomic_write_lines(folder / ITEMS, self.items)
        atomic_write_json(folder / "results.json", {"suites": self.summary(), **facts})

    @classmethod
    def read(cls, folder: str | Path) -> CapabilityReport:
        """The report of a folder.

        Raises:
            UserError: there is none.
        """
        rows = RunFolder(folder).read_lines(ITEMS)
        if not rows:
            raise UserError(
                f"{folder} has no {ITEMS}; name the folder of an rlhf-report capability",
                code="no_evaluation",
                path=str(folder),
            )
        return cls(tuple(rows))


class CapabilityTester:
    """Measures a model on suites, and says whether a second model is worse on any of them.

    Every prompt is answered greedily, so that a model always gets the same scores. Choices and texts are
    scored by likelihood, texts in nats per byte.

    Args:
        suites: items by suite, of which one that comes twice counts once; None for all built-in ones.
        rows: items of each built-in suite at most.
        max_new_tokens: longest answer.
        margin: loss of a suite that does not matter, in units of its score.
        alpha: risk of a wrong pass of one suite, and of a wrong regression in any.
    """

    def __init__(
        self,
        suites: Mapping[str, Sequence[Item]] | None = None,
        *,
        rows: int = 200,
        max_new_tokens: int = 64,
        margin: float = 0.02,
        alpha: float = 0.05,
    ) -> None:
        given = suites or {name: make(rows) for name, make in SUITES.items()}
        self.suites = {name: _once(name, items) for name, items in given.items()}
        self.max_new_tokens, self.margin, self.alpha = max_new_tokens, margin, alpha

    def check(self, policy: Policy) -> None:
        """Check that a policy's context holds every item; it needs no weights.

        Raises:
            UserError: it does not hold one.
        """
        for items in self.suites.values():
            self._prompts(policy, [item for item in items if item.how == "written"])
            _tokens(policy, _choices([item for item in items if item.how == "choice"]))
            _tokens(policy, [("", item.choices[0]) for item in items if item.how == "likelihood"])

    def run(self, policy: Policy, progress: Progress = no_progress) -> CapabilityReport:
        """Measure a policy, such as that of `rlhf_eval.evaluation.load_policy`.

        Raises:
            UserError: an item does not fit the model's context.
        """
        from rlhf_models import evaluating

        rows: list[dict[str, Any]] = []
        total = sum(len(items) for items in self.suites.values())
        with evaluating(policy.model), progress(total, "capability suites") as done:
            for suite, items in self.suites.items():
                found: list[dict[str, Any]] = [{}] * len(items)
                for how, measure in (
                    ("written", self._written),
                    ("choice", _chosen),
                    ("likelihood", _likely),
                ):
                    places = [i for i, item in enumerate(items) if item.how == how]
                    for i, row in zip(places, measure(policy, [items[i] for i in places]), strict=True):
                        found[i] = {"suite": suite, "id": items[i].id, **row}
                rows += found
                done(len(items))
        return CapabilityReport(tuple(rows))

    def compare(
        self,
        before: CapabilityReport,
        after: CapabilityReport,
        *,
        against: Literal["start", "previous"] = "previous",
    ) -> list[GateVerdict]:
        """Whether each suite is shown to be no worse than before by more than the margin.

        A verdict of `fail` is a regression; `inconclusive` says how many items are missing.  `against` is
        what the verdicts call the model before.

        Raises:
            UserError: the reports are of different items.
        """
        gates = [
            Gate(metric=suite, against=against, margin=self.margin, alpha=self.alpha) for suite in self.suites
        ]
        return judge_gates(gates, after.scores(), {against: before.scores()})

    def rows_for(self, drop: float = 0.05, *, changed: float = 0.2) -> int:
        """Items per suite at which a drop is found with power 0.8; see `rows_to_find_drop`."""
        return rows_to_find_drop(drop, changed=changed, suites=len(self.suites), alpha=self.alpha)

    def _written(self, policy: Policy, items: Sequence[Item]) -> list[dict[str, Any]]:
        from rlhf_infer import SamplingParams, TransformersEngine

        if not items:
            return []
        engine = TransformersEngine(policy.model, policy.tokenizer)
        params = SamplingParams(self.max_new_tokens, temperature=0)
        prompts = self._prompts(policy, items)
        texts = []
        for start in range(0, len(prompts), _BATCH):
            for group in engine.generate(prompts[start : start + _BATCH], 1, params):
                texts.append(policy.tokenizer.decode(group[0].completion_ids, skip_special_tokens=True))
        return [{"score": item.score(text), "written": text} for item, text in zip(items, texts, strict=True)]

    def _prompts(self, policy: Policy, items: Sequence[Item]) -> list[list[int]]:
        """Token ids of items that are answered freely."""
        return [
            prompt_ids(
                policy.tokenizer,
                policy.model,
                PromptRecord(item.prompt, where=f"the item {item.prompt[:40]!r}", is_chat=True),
                self.max_new_tokens,
            )
            for item in items
        ]


def _once(suite: str, items: Sequence[Item]) -> list[Item]:
    """A suite's items without repeated ones."""
    found = list({item.id: item for item in items}.values())
    if len(found) < len(items):
        _LOG.warning(
            "%s: %d of %d rows are repeated and count once", suite, len(items) - len(found), len(items)
        )
    return found


def _chosen(policy: Policy, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Whether the right choice is the likeliest continuation."""
    scores = iter(_logps(policy, _choices(items)))
    found = []
    for item in items:
        logps = [next(scores) for _ in item.choices]
        best = max(range(len(logps)), key=logps.__getitem__)
        found.append({"score": float(best == item.answer), "written": item.choices[best]})
    return found


def _choices(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Each item's prompt with each of its choices."""
    return [(item.prompt, choice) for item in items for choice in item.choices]


def _likely(policy: Policy, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Mean log-likelihood of a text in nats per byte."""
    logps = _logps(policy, [("", item.choices[0]) for item in items])
    sizes = [len(item.choices[0].encode("utf-8")) for item in items]
    return [{"score": logp / size} for logp, size in zip(logps, sizes, strict=True)]


def _logps(policy: Policy, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Log-probabilities of continuations after their contexts; an empty one is the text's first token."""
    from rlhf_eval.harness.scoring import score_continuations

    ids = _tokens(policy, pairs)
    return [each.logp for each in score_continuations(policy.model, ids, max_tokens=_MAX_TOKENS)]


def _tokens(policy: Policy, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Token ids of contexts and continuations, see `_logps`."""
    from rlhf_data import Encoder
    from rlhf_models import check_prompt_fits

    encoder = Encoder(policy.tokenizer)
    ids = []
    for context, continuation in pairs:
        before = encoder.text(context) if context else []
        after = encoder.text(continuation, start=not context)
        if not before:
            before, after = after[:1], after[1:]
        if not after:
            raise UserError(
                f"the text {continuation!r} is one token, which is too short to measure",
                code="text_too_short",
            )
        what = f"the item {(context or continuation)[:40]!r} of a suite, with its continuation,"
        check_prompt_fits(policy.model, len(before) + len(after), what)
        ids.append((before, after))
    return ids
