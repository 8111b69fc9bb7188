"""Attacks a policy with changed prompts, and counts which right answers become wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rlhf_data import PromptRecord, UserError, finite
from rlhf_eval import stats
from rlhf_eval.attacks.transforms import CONTROL, TRANSFORMS
from rlhf_eval.capability import CapabilityTester, Item
from rlhf_eval.evaluation import Policy, prompt_ids
from rlhf_eval.evaluation.written import Progress, no_progress

_BEFORE = "before"


@dataclass(frozen=True)
class Rated:
    """Answers that are right by a reward.

    Args:
        reward: (n,) rewards of n completions after the prompts as they were before the attack.
        least: from which reward on an answer is right.
    """

    reward: Callable[[Sequence[str], Sequence[str]], Sequence[float] | np.ndarray]
    least: float


@dataclass(frozen=True)
class TransformResult:
    """Effect of one change of the prompts.

    Args:
        transform: its name.
        rows: that were changed, and answered in both forms.
        not_applicable: rows that cannot be changed in this way.
        too_long: changed rows that do not fit the model's context.
        right_before: rows that were right as they were.
        became_wrong: of these.
        became_right: of the others.
        success: attack success rate, became_wrong / right_before, with Wilson's interval.
        drop: mean score before − after, right answers or rewards, with its paired interval.
        p_value: of McNemar's exact test that as many rows became right as wrong.
        p_holm: corrected for all changes but the control.
    """

    transform: str
    rows: int
    not_applicable: int
    too_long: int
    right_before: int
    became_wrong: int
    became_right: int
    success: stats.Interval
    drop: stats.Interval
    p_value: float
    p_holm: float


@dataclass(frozen=True)
class AttackReport:
    """Attacks on a policy.

    Args:
        results: one for each change of the prompts, the control first.
        rows: each changed prompt with both answers.
        repeated: items that came twice, and counted once.
        left_out: items of which the prompt itself does not fit the model's context.
    """

    results: tuple[TransformResult, ...]
    rows: tuple[Mapping[str, Any], ...]
    repeated: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The results as JSON."""
        counts = {"repeated": self.repeated, "left_out": self.left_out}
        return finite({"transforms": [asdict(each) for each in self.results], **counts})


def attack(
    policy: Policy,
    items: Sequence[Item],
    transforms: Sequence[str] = (),
    *,
    rated: Rated | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: Progress = no_progress,
) -> AttackReport:
    """Change prompts in ways that leave the right answer as it is, and compare the answers.

    An attack on a row succeeds where the answer was right before it and is wrong after it; for a request to
    refuse, where it was refused before and is not after. Answers are greedy, so that the control, the same
    prompts again, succeeds nowhere.

    Args:
        policy: such as that of `rlhf_eval.evaluation.load_policy`.
        items: prompts with what makes an answer right, such as those of `rlhf_eval.capability.read_suite`;
            one that comes twice counts once, and one that does not fit the model's context is left out.
        transforms: names of `TRANSFORMS`; none for all. The control is always among them.
        rated: makes answers right by a reward, whatever the items say.
        max_new_tokens: longest answer.
        seed: of the changes.
        progress: is shown what is being done.

    Raises:
        UserError: a transform is unknown, an item has no right answer, or no prompt fits the model.
    """
    names, given = check_transforms(transforms), len(items)
    items = list({item.id: item for item in items}.values())
    check_items(items)
    repeated, different = given - len(items), len(items)
    items = _fitting(policy, items, max_new_tokens)
    attacks = {name: [_changed(policy, item, name, seed, max_new_tokens) for item in items] for name in names}
    suites = {name: [each for each in changed if isinstance(each, Item)] for name, changed in attacks.items()}
    tester = CapabilityTester({_BEFORE: items, **suites}, max_new_tokens=max_new_tokens)
    answers = {
        (row["suite"], row["id"]): row
        for row in tester.run(policy, lambda total, _: progress(total, "attacks")).items
    }
    rows: list[dict[str, Any]] = [
        {"transform": name, "id": item.id, "prompt": item.prompt, "attacked": changed.prompt}
        | {when: _answer(answers[suite, each.id]) for when, suite, each in _both(name, item, changed)}
        for name in names
        for item, changed in zip(items, attacks[name], strict=True)
        if isinstance(changed, Item)
    ]
    if rated is not None:
        _rate(rows, rated)
    for row in rows:
        row["succeeded"] = row["before"]["right"] and not row["after"]["right"]
    results = [
        _result(name, [row for row in rows if row["transform"] == name], attacks[name]) for name in names
    ]
    return AttackReport(tuple(_corrected(results)), tuple(rows), repeated, different - len(items))


def check_transforms(names: Sequence[str]) -> list[str]:
    """The control and the named changes, or all.

    Raises:
        UserError: one is unknown.
    """
    for name in names:
        if name not in TRANSFORMS:
            raise UserError(
                f"unknown transform {name}; expected one of {', '.join(TRANSFORMS)}",
                code="unknown_transform",
                transform=name,
            )
    return list(dict.fromkeys([CONTROL, *(names or TRANSFORMS)]))


def check_items(items: Sequence[Item]) -> None:
    """Refuse items without a prompt, of which no answer can be right.

    Raises:
        UserError: there is one, or no item at all.
    """
    if not items:
        raise UserError("no prompts to attack; expected at least one row", code="no_rows")
    for item in items:
        if item.how == "likelihood":
            raise UserError(
                f"the text {item.choices[0][:40]!r} has no prompt to attack; expected rows with a prompt",
                code="missing_value",
            )


def _fitting(policy: Policy, items: Sequence[Item], max_new_tokens: int) -> list[Item]:
    """The items that the model can read; the error of the first one if it can read none."""
    found: list[Item] = []
    first: UserError | None = None
    for item in items:
        try:
            _fit(policy, item, max_new_tokens)
            found.append(item)
        except UserError as error:
            first = first or error
    if not found and first is not None:
        raise first
    return found


def _fit(policy: Policy, item: Item, max_new_tokens: int) -> None:
    record = PromptRecord(
        item.prompt, where=f"the prompt {item.prompt[:40]!r}", is_chat=item.how == "written"
    )
    prompt_ids(policy.tokenizer, policy.model, record, max_new_tokens)


def _changed(policy: Policy, item: Item, name: str, seed: int, max_new_tokens: int) -> Item | str:
    """The item with a changed prompt, or the field of the result that counts why there is none."""
    prompt = TRANSFORMS[name](item, random.Random(f"{seed} {name} {item.id}"))
    if prompt is None:
        return "not_applicable"
    changed = replace(item, prompt=prompt)
    try:
        _fit(policy, changed, max_new_tokens)
    except UserError:
        return "too_long"
    return changed


def _both(name: str, item: Item, changed: Item) -> tuple[tuple[str, str, Item], tuple[str, str, Item]]:
    return (("before", _BEFORE, item), ("after", name, changed))


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"written": row["written"], "score": row["score"], "right": bool(row["score"])}


def _rate(rows: Sequence[dict[str, Any]], rated: Rated) -> None:
    """Put rewards in the place of the scores, all by the prompt before the attack; equal texts once."""
    sides = [(row["prompt"], row[when]) for row in rows for when in ("before", "after")]
    texts = list(dict.fromkeys((prompt, side["written"]) for prompt, side in sides))
    rewards = rated.reward([prompt for prompt, _ in texts], [written for _, written in texts])
    found = dict(zip(texts, map(float, rewards), strict=True))
    for prompt, side in sides:
        side["score"] = found[prompt, side["written"]]
        side["right"] = side["score"] >= rated.least


def _result(name: str, rows: Sequence[Mapping[str, Any]], made: Sequence[Item | str]) -> TransformResult:
    before, after = (
        np.array([row[when]["right"] for row in rows], dtype=float) for when in ("before", "after")
    )
    scores = [[row[when]["score"] for row in rows] for when in ("before", "after")]
    lost = before * (1 - after)
    p_value = stats.mcnemar(before, after)
    return TransformResult(
        name,
        rows=len(rows),
        not_applicable=made.count("not_applicable"),
        too_long=made.count("too_long"),
        right_before=int(before.sum()),
        became_wrong=int(lost.sum()),
        became_right=int(((1 - before) * after).sum()),
        success=_rate_of(int(lost.sum()), int(before.sum())),
        drop=stats.paired_difference(*scores),
        p_value=p_value,
        p_holm=p_value,
    )


def _rate_of(count: int, n: int) -> stats.Interval:
    rate = count / n if n else math.nan
    return stats.Interval(rate, *stats.wilson(rate, n), 0.95, "Wilson", "row that was right before", n)


def _corrected(results: Sequence[TransformResult]) -> list[TransformResult]:
    control, *others = results
    corrected = stats.holm([each.p_value for each in others])
    return [control, *(replace(each, p_holm=p) for each, p in zip(others, corrected, strict=True))]
