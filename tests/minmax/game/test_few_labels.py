"""Labels that are fewer than prompts: which stories have one, and what a game does without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proofs import by_default
from raises import raises_error
from rlhf_data import QARecord, load_qa
from rlhf_minmax import MinMaxConfig, MinMaxTrainer
from rlhf_minmax.evaluation.evaluate import batch_metrics, verdict_metrics
from rlhf_minmax.game.stories import hide_answers, load_stories
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.truthfulness import mean_violation, violations, weighted_violations

ROW = {"story": "Tom went home. It rained.", "question": "Who?", "choices": ["Ann", "Tom"], "answer": "Tom"}
T, F = True, False


def without(record: QARecord) -> QARecord:
    return replace(record, answer=None)


# Of six critiques four have a label, and three of those answers are right: p = 3/4.
LABELS = torch.tensor([T, T, T, F, F, F])
KNOWN = torch.tensor([T, T, T, T, F, F])
SAID = torch.tensor([T, F, T, T, T, T])
GROUNDED = torch.tensor([T, T, F, T, T, F])


def test_without_a_label_only_what_is_seen_without_one_is_a_violation() -> None:
    more: Any = {"measure": "balanced_accuracy", "known": KNOWN}
    errors = violations(LABELS, SAID, torch.ones(6), GROUNDED, **more)
    # Called wrong, ungrounded, called right; of those without a label the ungrounded one.
    assert errors.tolist() == [0, 1, 1, 1, 0, 1]
    weighted = weighted_violations(errors, LABELS, **more)
    # 0.5 / 0.75 of right answers, 0.5 / 0.25 of wrong ones, by the known labels; 1 without one.
    assert weighted.tolist() == pytest.approx([0, 2 / 3, 2 / 3, 2, 0, 1])
    # The mean over the four with a label: (2/3 + 2/3 + 2) / 4.
    assert mean_violation(weighted, KNOWN) == pytest.approx(10 / 12)
    brier = violations(LABELS, SAID, torch.full((6,), 0.8), GROUNDED, measure="brier", known=KNOWN)
    assert brier.tolist() == pytest.approx([0.04, 0.64, 1, 0.64, 0, 1])


@pytest.mark.parametrize("measure", ["balanced_accuracy", "accuracy", "brier"])
def test_no_labels_measure_nothing_and_all_labels_change_nothing(measure: Any) -> None:
    none, every = torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)
    errors = violations(LABELS, SAID, torch.ones(6), GROUNDED, measure=measure, known=none)
    weighted = weighted_violations(errors, LABELS, measure=measure, known=none)
    assert weighted.tolist() == errors.tolist() == [0, 0, 1, 0, 0, 1]
    assert mean_violation(weighted, none) is None
    plain = violations(LABELS, SAID, torch.ones(6), GROUNDED, measure=measure)
    known = violations(LABELS, SAID, torch.ones(6), GROUNDED, measure=measure, known=every)
    assert torch.equal(plain, known)
    more: Any = {"measure": measure}
    counted = weighted_violations(plain, LABELS, **more)
    assert torch.equal(counted, weighted_violations(known, LABELS, known=every, **more))
    assert mean_violation(counted, every) == float(counted.mean())


def test_made_up_answers_are_of_labelled_stories(game: Any) -> None:
    pipeline, stories = game
    batch = [record if i in (1, 4) else without(record) for i, record in enumerate(stories.train[:6])]
    output = pipeline.forward_pass(batch, seed=3)
    made_up = [answer for answer in output.judged if answer.rollout is None]
    assert sorted(answer.story for answer in made_up) == [1, 4]  # three of six, but two have a label
    sampled = output.judged[:6]
    assert [answer.correct is None for answer in sampled] == [True, False, True, True, False, True]
    assert all(answer.hack is None for answer in sampled if answer.correct is None)
    # Two labels of sampled answers and two of made-up ones: half of the four are to be right.
    assert sum(answer.correct for answer in made_up) == min(2, 2 - sum(sampled[i].correct for i in (1, 4)))
    k = pipeline.config.game.num_critiques
    assert output.known.tolist() == [answer.correct is not None for answer in output.judged for _ in range(k)]
    metrics = batch_metrics(output)
    assert (metrics["labels/stories"], metrics["labels/critiques"]) == (2, 4 * k)
    critiques, labels = output.labelled()
    correct = [output.judged[critique.answer].correct for critique in critiques]
    assert correct == labels.tolist() and len(correct) == 4 * k
    assert metrics["policy/accuracy"] == pytest.approx(
        sum(answer.correct is True for answer in output.answers) / (2 * pipeline.config.game.num_generations)
    )
    told = verdict_metrics(critiques, labels.tolist())
    assert metrics["monitor/verdict_balanced_accuracy"] == told["monitor/verdict_balanced_accuracy"]


def test_the_monitor_may_learn_on_other_stories_than_the_policy_plays(game: Any) -> None:
    pipeline, stories = game
    batch, labelled = [without(record) for record in stories.train[:3]], stories.train[3:7]
    plain = pipeline.forward_pass(batch, seed=3)
    output = pipeline.forward_pass(batch, seed=3, criticised=labelled)
    # The policy's part is as without; judged are one answer to each of the four, and two made-up ones.
    assert output.answers == plain.answers and torch.equal(output.rewards, plain.rewards)
    assert output.records == [*batch, *labelled] and output.known.all()
    assert [answer.story for answer in output.judged[:4]] == [3, 4, 5, 6] and len(output.judged) == 6
    own = pipeline.answer(pipeline.players.policy, labelled, 1, seed=3)
    assert [answer.text for answer in output.judged[:4]] == [answer.text for answer in own]
    assert batch_metrics(output)["labels/stories"] == 4
    scores = pipeline.judge_scores(output.records, output.judged, output.critiques)
    assert torch.equal(scores, output.judge_scores)


def test_few_labels_come_often_and_in_turn(make_game: Callable[..., Any]) -> None:
    pipeline, stories = make_game("training.batch_size=4")
    few = [record if i < 3 else without(record) for i, record in enumerate(stories.train)]
    trainer = MinMaxTrainer(pipeline, pipeline.config, few)
    drawn = []
    for step in range(3):
        trainer.step = step
        drawn += trainer._next_criticised() or []
    # Three labels in batches of four: each of the four permutations is whole before the next begins.
    assert len(drawn) == 12
    for start in range(0, 12, 3):
        assert {record.story for record in drawn[start : start + 3]} == {r.story for r in few[:3]}
    assert MinMaxTrainer(pipeline, pipeline.config, stories.train)._next_criticised() is None
    pipeline, stories = make_game("game.monitor_stories=all")
    assert MinMaxTrainer(pipeline, pipeline.config, few)._next_criticised() is None


@pytest.mark.slow
def test_the_judge_counts_for_the_monitor_as_its_weight_says(
    make_game: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With λ at 0 the advantages follow the judge alone: turned around at -1, nothing at 0."""
    kept: dict[int, Any] = {}
    for weight in (1, 0, -1):
        pipeline, stories = make_game(
            f"game.adversary_weight={weight}",
            "constraint.rule=fixed",
            "training.constraint_penalty_lambda=0",
            "game.unparsable_critique_penalty=0",
        )
        optimizer = DualPPOOptimizer(pipeline, pipeline.config)
        output = pipeline.forward_pass(stories.train[:4], seed=0)
        assert optimizer.monitor is not None
        monkeypatch.setattr(optimizer.monitor, "update", lambda _, found, **more: {"advantages": found})
        kept[weight] = optimizer.monitor_step(output)["monitor/advantages"]
    assert kept[1].abs().max() > 0 and torch.equal(kept[-1], -kept[1]) and not kept[0].any()


def test_a_game_with_all_labels_makes_up_the_answers_it_always_did(game: Any) -> None:
    """Pinned: the choice of stories and answers of seed 0, from Python's generator alone."""
    pipeline, stories = game
    batch = stories.train[:4]
    answers = [False, True, True, False]
    made_up = pipeline._made_up(batch, answers, random.Random(0))
    # round(0.5 · 4) = 2 answers of 6; 3 are to be right, 2 are: the first is right. Stories 3 and 1 are what
    # random.Random(0).sample(range(4), 2) gives.
    assert [(each.story, each.correct) for each in made_up] == [(3, True), (1, False)]


def test_a_batch_without_labels_moves_no_multiplier_and_breaks_nothing(make_game: Callable[..., Any]) -> None:
    pipeline, stories = make_game("guards.patience=1", "training.batch_size=4")
    optimizer = DualPPOOptimizer(pipeline, pipeline.config)
    bare = [without(record) for record in stories.train[:4]]

    def play(batch: list[QARecord], seed: int) -> dict[str, Any]:
        output = pipeline.forward_pass(batch, seed=seed)
        effects = pipeline.bare_judge_scores(output.records, output.judged)
        return {**batch_metrics(output, effects), **optimizer.step(output, seed=seed)}

    before = optimizer.dual
    first = play(bare, 0)
    assert optimizer.dual == before
    assert first["dual/lambda"] == before.multiplier and first["monitor/updates"] >= 1
    empty = ("constraint/violation", "constraint/violation_ema", "policy/accuracy", "monitor/miss_rate")
    assert [first[name] for name in empty] == [None] * 4 and "guard/rollbacks" not in first
    json.dumps(first, allow_nan=False)
    second = play(stories.train[:4], 1)
    moved = optimizer.dual
    assert moved.updates == 1 and moved.multiplier != before.multiplier
    assert second["constraint/violation"] is not None
    third = play(bare, 2)
    assert optimizer.dual == moved
    assert third["constraint/violation"] is None
    assert third["constraint/violation_ema"] == moved.violation_ema


def test_an_unmeasured_monitor_is_as_updated_where_the_next_is_measured(make_game: Any) -> None:
    """The guard keeps the monitor that a step finds, which the unmeasured step before it has moved."""
    pipeline, stories = make_game()
    optimizer = DualPPOOptimizer(pipeline, pipeline.config)
    assert optimizer.monitor is not None and optimizer.guard is not None
    bare = pipeline.forward_pass([without(record) for record in stories.train[:4]], seed=0)
    optimizer.step(bare, seed=0, policy_learns=False)
    found = [parameter.detach().clone() for parameter in optimizer.monitor.parameters]
    optimizer.step(pipeline.forward_pass(stories.train[:4], seed=1), seed=1, policy_learns=False)
    assert all(map(torch.equal, optimizer.guard.good, found))


def share_of(share: float, *, seed: int = 1, world: str = "stories", **more: Any) -> Any:
    data = {"label_share": share, "train_stories": 100, "eval_stories": 20, "world": world, **more}
    return load_stories(MinMaxConfig.from_dict({"seed": seed, "data": data}))


@pytest.mark.parametrize("world", by_default(["stories", "sums"], "stories"))
def test_a_share_of_the_labels_is_nested_seeded_and_of_training_stories_alone(world: str) -> None:
    kept = {
        share: {r.story for r in share_of(share, world=world).labelled} for share in (0.02, 0.25, 0.26, 1.0)
    }
    assert [len(stories) for stories in kept.values()] == [2, 25, 26, 100]
    assert kept[0.02] < kept[0.25] < kept[0.26] < kept[1.0]
    assert {r.story for r in share_of(0.25, seed=2, world=world).labelled} != kept[0.25]
    found = share_of(0.02, world=world)
    assert all(record.answer is not None for record in (*found.held_out, *found.building))
    whole = share_of(1.0, world=world)
    assert [r.story for r in found.train] == [r.story for r in whole.train]
    assert found.judged == found.labelled and whole.judged is None
    assert len(share_of(0.001, world=world).labelled) == 1


def test_who_has_a_label_depends_on_the_story_not_on_its_place() -> None:
    records = share_of(1.0).train
    kept = [r for r in hide_answers(records, 0.1, seed=5) if r.answer is not None]
    turned = [r for r in hide_answers(records[::-1], 0.1, seed=5) if r.answer is not None]
    assert kept == turned[::-1] and len(kept) == 10
    partly = [without(r) if i % 2 else r for i, r in enumerate(records)]
    assert (
        sum(r.answer is not None for r in hide_answers(partly, 0.8, seed=5)) == 50
    )  # no more than there are


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own(path: Path, **data: Any) -> Any:
    return load_stories(MinMaxConfig.from_dict({"data": {"train_data": str(path), **data}}))


def test_rows_without_an_answer_are_played_and_never_held_out(tmp_path: Path) -> None:
    bare = {name: value for name, value in ROW.items() if name != "answer"}
    rows = [
        {**(ROW if i % 2 else bare), "story": f"Tom went home on day {i}. It rained."} | extra
        for i, extra in enumerate([{}, {}, {"answer": None}, {}, {"answer": " "}, {}] * 10)
    ]
    stories = own(rows_file(tmp_path / "a.jsonl", rows))
    assert len(stories.train) + len(stories.held_out) == 60
    assert len(stories.labelled) + len(stories.held_out) == 30 and len(stories.held_out) > 3
    assert all(record.answer == 1 for record in (*stories.held_out, *stories.building))
    assert stories.building == stories.labelled and stories.judged is None
    half = own(tmp_path / "a.jsonl", label_share=0.1)
    assert len(half.labelled) == round(0.1 * len(half.train)) and half.building == stories.building


def test_a_held_out_story_is_not_played_with_another_question_that_has_no_answer(tmp_path: Path) -> None:
    labelled = [{**ROW, "story": f"Story {i}."} for i in range(40)]
    asked = [{**row, "question": "When?", "answer": None} for row in labelled]
    stories = own(rows_file(tmp_path / "a.jsonl", labelled + asked))
    held_out = {record.story for record in stories.held_out}
    assert held_out and not held_out & {record.story for record in stories.train}


def test_labels_that_are_needed_are_asked_for(tmp_path: Path) -> None:
    bare = rows_file(tmp_path / "a.jsonl", [{**ROW, "story": f"S {i}.", "answer": None} for i in range(20)])
    held_out = rows_file(tmp_path / "b.jsonl", [ROW])
    for more in ({"eval_data": str(held_out)}, {}):
        with raises_error("no_labels"):
            own(bare, **more)
    with raises_error("missing_column", column="answer"):
        own(rows_file(tmp_path / "c.jsonl", [ROW]), eval_data=str(bare))
    with raises_error("missing_column", column="answer"):
        load_qa(bare)
    unlabelled = load_qa(bare, needs_answer=False)[0]
    with pytest.raises(ValueError, match="not known"):
        _ = unlabelled.answer_text
    with raises_error("unknown_answer"):
        load_qa(rows_file(tmp_path / "d.jsonl", [{**ROW, "answer": "nobody"}]), needs_answer=False)
