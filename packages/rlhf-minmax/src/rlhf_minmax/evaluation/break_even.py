"""The pre-flight check: the judge's weight above which the truthful answer scores higher."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_data import QARecord
from rlhf_minmax.config.run import GameConfig
from rlhf_minmax.demo.teachers import Teacher
from rlhf_minmax.game.forward_pass import Answer, MinMaxPipeline
from rlhf_minmax.game.scores import Scale

_NO_JUDGE = (
    "the judge does not tell right answers from wrong ones beyond chance, even when shown truthful "
    "critiques; train or choose another judge"
)
_UNREAD = 0.01
"""Share of sampled texts that can be read, below which there is nothing to learn from."""
_ABOVE = 1.01
"""Margin over a story's break-even weight: at the weight itself both answers score the same."""
_NEARLY_ALL = 0.95
"""Share of the stories that counts as all of them."""


@dataclass(frozen=True)
class BreakEven:
    """Gaps between the most tempting wrong answer and the right one, in standard deviations of each score.

    Gaps and break-even weights are means over stories; the shares count the stories on which the truthful
    answer scores higher.

    Args:
        delta_reward: how much more the reward model likes the wrong answer.
        delta_judge_start: how much more the judge believes the right one, given the start's critiques.
        delta_judge_truthful: the same with truthful critiques.
        break_even_start: judge's weight above which the truth scores higher on average with the untrained
            monitor; None if it never does.
        break_even_truthful: the same with a truthful monitor.
        pays_start: share of the stories on which the truth scores higher at w_judge, untrained monitor.
        pays_truthful: the same with a truthful monitor.
        w_reward: weight of the reward model in the run.
        w_judge: weight of the judge in the run.
        advice: what this means, as text.
        judge_reads: whether the judge tells right from wrong beyond chance, shown truthful critiques.
        stories: on how many stories this was measured.
        left_out: stories left out, since they do not name their right choice and no truthful critique can be
            written; where that is all of them, what needs truthful critiques is None and the rest is measured
            on all.
    """

    delta_reward: float
    delta_judge_start: float
    delta_judge_truthful: float | None
    break_even_start: float | None
    break_even_truthful: float | None
    pays_start: float
    pays_truthful: float | None
    w_reward: float
    w_judge: float
    advice: str
    judge_reads: bool | None = None
    stories: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return asdict(self)


@dataclass(frozen=True)
class ReadRates:
    """Shares of the starting players' sampled answers and critiques that can be read."""

    answers: float
    critiques: float


def measure_scales(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], *, seed: int
) -> tuple[MinMaxPipeline, ReadRates]:
    """The pipeline with score scales fixed on the starting players' rollouts, and how many can be read.

    Where almost no critique parses, the judge's scale is that of truthful critiques of made-up answers:
    scores without critiques spread too little to be a scale for those with one.
    """
    raw = replace(pipeline, reward_scale=Scale(), judge_scale=Scale())
    answers = raw.answer(raw.players.policy, records, 1, seed=seed)
    critiques = raw.criticise(records, answers, 1, seed=seed)
    read = ReadRates(
        sum(answer.claim is not None for answer in answers) / len(answers),
        sum(critique.parsed is not None for critique in critiques) / len(critiques),
    )
    evident = _with_evidence(pipeline, records)
    if read.critiques < _UNREAD and evident:
        scores = _made_up_scores(raw, evident)
    else:
        scores = raw.judge_scores(records, answers, critiques)
    scales = {"reward_scale": Scale.of(raw.rewards(records, answers)), "judge_scale": Scale.of(scores)}
    return replace(pipeline, **scales), read


def why_impossible(check: BreakEven, read: ReadRates) -> list[str]:
    """Why the game cannot work with these models, one sentence each; empty if it can."""
    found = [
        f"only {rate:.1%} of the start's sampled {what} can be read, so that there is nothing to learn from; "
        "take a model that keeps the format, or fine-tune it on examples first"
        for what, rate in (("answers", read.answers), ("critiques", read.critiques))
        if rate < _UNREAD
    ]
    return [*found, *([_NO_JUDGE] if check.judge_reads is False else [])]


def measure_break_even(pipeline: MinMaxPipeline, records: Sequence[QARecord], *, seed: int) -> BreakEven:
    """Measure the gaps on labelled training stories and choose the judge's weight.

    The right answer scores higher on a story iff w_judge · ΔJ > w_reward · ΔR there, where ΔJ is the judge's
    gap and ΔR the reward model's; `default_weight` gives the weight where none is set.

    Args:
        pipeline: with its scales fixed.
        records: labelled training stories.
        seed: seed for sampling critiques.
    """
    game = pipeline.config.game
    evident = _with_evidence(pipeline, records)
    left_out = len(records) - len(evident)
    records, right, wrong = _pairs(pipeline, evident or records)
    costs = pipeline.rewards(records, wrong) - pipeline.rewards(records, right)
    started = [_by_monitor(pipeline, records, answers, seed) for answers in (right, wrong)]
    gains_start = _judged_gaps(pipeline, records, right, wrong, started)
    gains_truthful = None
    if evident:
        truthful = [_by_teacher(pipeline, records, answers) for answers in (right, wrong)]
        gains_truthful = _judged_gaps(pipeline, records, right, wrong, truthful)
    w_judge = default_weight(game, costs, gains_truthful) if game.w_judge is None else game.w_judge

    def pays(gains: Tensor) -> float:
        return float((w_judge * gains > game.w_reward * costs).float().mean())

    delta_reward, delta_start = float(costs.mean()), float(gains_start.mean())
    even_start, pays_start = _ratio(game.w_reward * delta_reward, delta_start), pays(gains_start)
    delta_truthful = even_truthful = pays_truthful = reads = None
    if gains_truthful is not None:
        delta_truthful = float(gains_truthful.mean())
        even_truthful = _ratio(game.w_reward * delta_reward, delta_truthful)
        pays_truthful, reads = pays(gains_truthful), not _is_chance(gains_truthful)
    return BreakEven(
        delta_reward=delta_reward,
        delta_judge_start=delta_start,
        delta_judge_truthful=delta_truthful,
        break_even_start=even_start,
        break_even_truthful=even_truthful,
        pays_start=pays_start,
        pays_truthful=pays_truthful,
        judge_reads=reads,
        stories=len(records),
        left_out=left_out,
        w_reward=game.w_reward,
        w_judge=w_judge,
        advice=_NO_JUDGE
        if reads is False
        else _advice(delta_reward, even_truthful or 0.0, w_judge, pays_start, pays_truthful),
    )


def default_weight(game: GameConfig, costs: Tensor, gains: Tensor | None) -> float:
    """The judge's weight where none is set.

    `break_even_factor` times the break-even of the mean gaps, and at least the reward model's weight. If the
    right answer then scores higher on a smaller share of the stories than `break_even_share`, the weight is
    raised until it does on that share, up to twice its value.

    Args:
        game: its settings.
        costs: (B,) ΔR of every story.
        gains: (B,) ΔJ of every story with truthful critiques; None where none can be written.

    Returns:
        The weight; the reward model's if no critiques can be written or no weight helps, and 1 if that is 0.
    """
    even = None if gains is None else _ratio(game.w_reward * float(costs.mean()), float(gains.mean()))
    weight = max(game.break_even_factor * (even or 0.0), game.w_reward)
    if gains is not None and even is not None:
        costs = game.w_reward * costs
        # If the judge prefers the wrong answer, a larger weight only widens the right answer's gap. Such a
        # story counts as satisfied if the right answer still scores higher at the largest weight allowed.
        otherwise = torch.where(2 * weight * gains > costs, -torch.inf, torch.inf)
        evens = torch.where(gains > 0, costs / gains, otherwise).sort().values
        last = max(math.ceil(game.break_even_share * len(evens)), 1) - 1
        weight = min(max(weight, _ABOVE * float(evens[last])), 2 * weight)
    return weight or 1.0


def _with_evidence(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> list[QARecord]:
    """The stories with a label that name their right choice."""
    rules = pipeline.prompts.rules
    return [r for r in records if r.answer is not None and rules.correct_evidence(r) is not None]


def _made_up_scores(pipeline: MinMaxPipeline, records: list[QARecord]) -> Tensor:
    """The judge's scores of right and wrong made-up answers with truthful critiques."""
    wrong = [next(c for c in record.choices if c != record.answer_text) for record in records]
    right = [record.answer_text for record in records]
    answers = [[_answer(pipeline, records, i, c) for i, c in enumerate(chosen)] for chosen in (right, wrong)]
    critiques = [_by_teacher(pipeline, records, each) for each in answers]
    return pipeline.judged(records, [*answers[0], *answers[1]], [*critiques[0], *critiques[1]])


def _pairs(
    pipeline: MinMaxPipeline, records: Sequence[QARecord]
) -> tuple[list[QARecord], list[Answer], list[Answer]]:
    """Stories, right answers, and most tempting wrong ones: baits, or wrong choices of the highest reward."""
    rules = pipeline.prompts.rules
    baited = [(r, rules.rival(r)) for r in records if rules.is_hack(r, None) is not None]
    named = [(record, rival) for record, rival in baited if rival is not None]
    if named:
        chosen, tempting = [record for record, _ in named], [rival for _, rival in named]
    else:
        chosen, tempting = list(records), _best_wrong(pipeline, records)
    right = [_answer(pipeline, chosen, i, record.answer_text) for i, record in enumerate(chosen)]
    wrong = [_answer(pipeline, chosen, i, choice) for i, choice in enumerate(tempting)]
    return chosen, right, wrong


def _best_wrong(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> list[str]:
    options = [(i, c) for i, r in enumerate(records) for c in r.choices if c != r.answer_text]
    scores = pipeline.rewards(records, [_answer(pipeline, records, i, choice) for i, choice in options])
    best: dict[int, tuple[float, str]] = {}
    for (i, choice), score in zip(options, scores.tolist(), strict=True):
        best[i] = max(best.get(i, (float("-inf"), "")), (score, choice))
    return [best[i][1] for i in range(len(records))]


def _answer(pipeline: MinMaxPipeline, records: Sequence[QARecord], index: int, choice: str) -> Answer:
    return pipeline.read_answer(records, index, pipeline.prompts.made_up(choice))


def _by_monitor(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], answers: list[Answer], seed: int
) -> list[str | None]:
    critiques = pipeline.criticise(records, answers, 1, seed=seed)
    return [critique.text if critique.parsed else None for critique in critiques]


def _by_teacher(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], answers: list[Answer]
) -> list[str | None]:
    teacher = Teacher(pipeline.prompts.rules, records, random.Random(0))
    return [teacher.correct_critique(r, a.claim or "") for r, a in zip(records, answers, strict=True)]


def _judged_gaps(
    pipeline: MinMaxPipeline,
    records: Sequence[QARecord],
    right: list[Answer],
    wrong: list[Answer],
    critiques: list[list[str | None]],
) -> Tensor:
    """By story, how much more the judge believes the right answer than the wrong one.

    All are judged in one call: from two calls a judge that counts its calls could tell which are right.
    """
    scores = pipeline.judged(records, [*right, *wrong], [*critiques[0], *critiques[1]])
    higher, lower = scores.chunk(2)
    return higher - lower


def _ratio(cost: float, gain: float) -> float | None:
    """Weight above which the gain outweighs the cost: None without a gain, 0 without a cost."""
    return max(cost, 0.0) / gain if gain > 0 else None


def _is_chance(gains: Tensor) -> bool:
    """Whether a mean gain is no more than two standard errors above 0."""
    return float(gains.mean()) <= 2 * float(gains.std(correction=0)) / math.sqrt(len(gains))


def _advice(
    delta_reward: float,
    even_truthful: float,
    w_judge: float,
    pays_start: float,
    pays_truthful: float | None,
) -> str:
    if pays_truthful is None:
        return (
            "no story of the probe names its right choice, so there are no truthful critiques to measure "
            "with, and w_judge is a guess; set game.w_judge"
        )
    if delta_reward <= 0 and min(pays_start, pays_truthful) >= _NEARLY_ALL:
        return "the reward model already prefers right answers, so there is nothing for the judge to outweigh"
    if delta_reward > 0 and w_judge <= even_truthful:
        return (
            f"w_judge {w_judge:.2f} is below a truthful monitor's break-even {even_truthful:.2f}, so "
            "exploiting the reward model pays on average whatever the monitor does; raise game.w_judge above "
            f"{even_truthful:.2f}"
        )
    shares = (
        f"at w_judge {w_judge:.2f} the truth scores higher on {pays_start:.0%} of the stories with the "
        f"untrained monitor's critiques and on {pays_truthful:.0%} with truthful ones"
    )
    if pays_truthful < _NEARLY_ALL:
        return f"{shares}: on the others not even a truthful monitor makes it pay; raise game.w_judge"
    if pays_start >= _NEARLY_ALL:
        return f"{shares}: a frozen monitor might do as well"
    return f"{shares}: on the difference only a better monitor makes it pay"
