"""Choosing completions, measures of texts and signs of collapse, references and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos.pipeline.measured import check_ratings, collapse_alarms, scores_of, text_measures
from rlhf_algos.pipeline.references import Digests, Reference, named_files, references_in, replaced
from rlhf_algos.pipeline.steps import choose, score
from rlhf_data import load_records
from rlhf_models import RewardModel

ROWS = [
    {
        "prompt": "p",
        "answer": "gold",
        "completion": "best",
        "score": 2.0,
        "candidates": [
            {"text": "best", "score": 2.0},
            {"text": "mid", "score": 1.0},
            {"text": "bad", "score": 0.0},
        ],
    },
    {
        "prompt": "q",
        "answer": "x",
        "completion": "x",
        "score": 0.5,
        "candidates": [{"text": "x", "score": 0.5}],
    },
]


@pytest.fixture
def chosen(tmp_path: Path):
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(**settings: Any) -> list[dict[str, Any]]:
        choose(tmp_path, {"rows": str(rows), **settings})
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    return run


def test_pairs_are_best_against_worst_or_against_a_column(chosen: Any) -> None:
    assert chosen(to="pairs") == [{"prompt": "p", "answer": "gold", "chosen": "best", "rejected": "bad"}]
    with raises_error("no_rows_left"):
        chosen(to="pairs", min_gap=2.5)
    spin = chosen(to="pairs", chosen="answer")  # the second row's completion is its answer: no pair
    assert [(row["chosen"], row["rejected"]) for row in spin] == [("gold", "bad")]
    with raises_error("missing_column", column="gold"):
        chosen(to="pairs", chosen="gold")


def test_demonstrations_are_the_best_and_labels_follow_the_score(chosen: Any) -> None:
    assert [row["completion"] for row in chosen(to="sft")] == ["best", "x"]
    assert [row["completion"] for row in chosen(to="sft", min_score=1.0)] == ["best"]
    assert [row["completion"] for row in chosen(to="sft", top_share=0.5)] == ["best"]
    # the mean of 2, 1, 0, 0.5 is 0.875
    assert [row["label"] for row in chosen(to="kto")] == [True, True, False, False]
    assert [row["label"] for row in chosen(to="kto", min_score=0.5)] == [True, True, False, True]


def test_what_nothing_scored_is_neither_better_nor_worse(tmp_path: Path) -> None:
    """Scores of reward models are often negative, and a reward may not apply to a completion."""
    candidates = [("mid", -1.0), ("low", -3.0), ("unscored", None)]
    row = {"prompt": "p", "completion": "mid", "score": -1.0, "candidates": None}
    row["candidates"] = [{"text": text, "score": score} for text, score in candidates]
    lost = {"prompt": "q", "completion": "unscored", "score": None, "candidates": None}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(lost) + "\n")

    def made(**settings: Any) -> list[dict[str, Any]]:
        choose(tmp_path, {"rows": str(tmp_path / "in.jsonl"), **settings})
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    assert made(to="pairs") == [{"prompt": "p", "chosen": "mid", "rejected": "low"}]
    assert made(to="sft") == [{"prompt": "p", "completion": "mid"}]
    # the mean of -1 and -3 is -2
    assert [(each["completion"], each["label"]) for each in made(to="kto")] == [("mid", True), ("low", False)]
    (tmp_path / "in.jsonl").write_text(json.dumps(lost) + "\n")
    assert made(to="sft") == [{"prompt": "q", "completion": "unscored"}]  # as all that was drawn
    for settings in ({"to": "kto"}, {"to": "sft", "min_score": 0.0}, {"to": "sft", "top_share": 0.5}):
        with raises_error("unscored_rows"):
            made(**settings)
    with raises_error("no_rows_left"):
        made(to="pairs")


CHATS = [
    {
        "prompt": [{"role": "user", "content": word}],
        "answer": "gold",
        "shown": [{"role": "assistant", "content": "shown"}],
        "whole": [{"role": "user", "content": word}, {"role": "assistant", "content": "shown"}],
        "completion": "best",
        "score": 2.0,
        "candidates": [{"text": "best", "score": 2.0}, {"text": "bad", "score": 0.0}],
    }
    for word in ("one", "two")
]


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"to": "pairs"}, "preference", ["best", "bad"]),
        ({"to": "pairs", "chosen": "answer"}, "preference", ["gold", "bad"]),
        ({"to": "pairs", "chosen": "shown"}, "preference", ["shown", "bad"]),
        ({"to": "pairs", "rejected": "whole"}, "preference", ["best", "shown"]),
        ({"to": "sft"}, "sft", ["best"]),
        ({"to": "kto"}, "kto", ["best", "bad"]),
    ],
)
def test_rows_of_chats_are_read_by_the_trainings(
    tmp_path: Path, settings: dict[str, Any], kind: str, said: list[str]
) -> None:
    """`generate` writes texts after prompts of messages."""
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    choose(tmp_path, {"rows": str(rows), **settings})
    records = load_records(tmp_path / "rows.jsonl", kind).records
    answers = [answer for record in records for answer in record.parts()[1]]
    assert answers == [[{"role": "assistant", "content": text}] for text in said] * 2
    assert records[0].parts()[0] == CHATS[0]["prompt"]


def test_columns_of_another_form_than_the_prompt_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps({**CHATS[0], "prompt": "a text"}) + "\n")
    with raises_error("missing_column", column="shown"):
        choose(tmp_path, {"rows": str(rows), "to": "pairs", "chosen": "shown"})


def test_chats_are_scored_and_rows_of_demonstrations_may_be_messages(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    demonstration = {"prompt": CHATS[0]["prompt"], "completion": CHATS[0]["shown"]}
    rows.write_text(json.dumps(CHATS[0]) + "\n" + json.dumps(demonstration) + "\n")
    score(tmp_path, {"rows": str(rows), "reward": "non_empty"})
    scored = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in scored] == ["best", "shown"]
    assert text_measures([demonstration])["words"] == 1


@pytest.mark.slow
def test_a_recipe_on_chats_trains(
    run: Any, tmp_path: Path, built_llama: Any, chat_tokenizer: Any, tiny_llama: Any
) -> None:
    """Drawn, scored anew by a reward model, chosen, and one step of each training."""
    policy, reward, rows = (tmp_path / name for name in ("policy", "reward", "prompts.jsonl"))
    RewardModel.from_backbone(tiny_llama, chat_tokenizer, seed=0).save_pretrained(reward)
    built_llama.save_pretrained(policy)
    chat_tokenizer.save_pretrained(policy)
    prompts = [{"prompt": [{"role": "user", "content": f"Say {i}."}]} for i in range(4)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    drawn = {"n": 3, "keep": 3, "max_tokens": 8, "temperature": 2, "reward": "length:target=4"}
    stages: dict[str, Any] = {
        "draw": {"kind": "generate", "config": {"prompts": str(rows), "model": str(policy), **drawn}},
        "again": {"kind": "score", "config": {"rows": "${draw.rows}", "reward": str(reward)}},
    }
    for name, method in (("pairs", "dpo"), ("sft", "sft"), ("kto", "kto")):
        stages[f"to_{name}"] = {"kind": "filter", "config": {"rows": "${again.rows}", "to": name}}
        settings = {"model_name_or_path": str(policy), "train_data": f"${{to_{name}.rows}}", "max_steps": 1}
        stages[f"train_{name}"] = {"kind": method, "config": {**settings, "eval_fraction": 0}}
    entries = run(stages).store.entries
    assert all(entry["status"] == "done" for entry in entries.values())


def test_collapse_is_told_against_the_first_round() -> None:
    varied = [{"completion": f"{a} {b} and so on"} for a in "abcd" for b in "efgh"]
    same = [{"completion": "yes yes yes yes yes yes yes yes yes yes yes yes"}] * 16
    first, last = text_measures(varied), text_measures(same)
    assert (last["unique"], last["words"]) == (1 / 16, 12)
    assert collapse_alarms([first, first]) == []
    alarms = collapse_alarms([first, first, last])
    assert len(alarms) == 3 and all(alarm.startswith("round 3:") for alarm in alarms)
    cut = text_measures([{"completion": str(i), "finish_reason": "length"} for i in range(4)])
    assert any("cut off" in alarm for alarm in collapse_alarms([{**cut, "truncated": 0.0}, cut]))


def test_scores_of_reports(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    rows = [
        {"prompt": "p", "reward": r, "length": 3, "finish_reason": f} for r, f in ((1, "stop"), (2, "length"))
    ]
    (tmp_path / "completions/policy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy = {"by": "reward", "pairs": 4, "accuracy": {"estimate": 0.75}}
    (tmp_path / "results.json").write_text(json.dumps({"reward_accuracy": [accuracy]}))
    found = scores_of(tmp_path)
    assert found.suites == found.unpaired == ()
    assert found.metrics["reward"] == {"p": 1.5} and found.metrics["truncated"] == {"p": 0.5}
    accuracies = found.metrics["reward_accuracy"].values()
    assert sum(accuracies) == 3 and len(accuracies) == 4
    with raises_error("no_evaluation"):
        scores_of(tmp_path / "completions")


def test_a_file_of_ratings_has_one_metric_which_pairs_with_none(tmp_path: Path) -> None:
    ratings = tmp_path / "ratings.jsonl"
    ratings.write_text('{"prompt": "p", "completion": "c", "label": true}\n{"label": false}\n')
    found = scores_of(ratings)
    assert list(found.metrics["rating"].values()) == [1.0, 0.0] and found.unpaired == ("rating",)
    ratings.write_text('{"prompt": "p", "completion": "c", "label": "up"}\n')
    with raises_error("missing_value", path=str(ratings)):
        scores_of(ratings)
    with raises_error("missing_value", path=str(ratings)):
        check_ratings({"measured": ["${after.report}", str(ratings)]})
    ratings.write_text("")  # nobody has rated yet
    assert scores_of(ratings).metrics == {"rating": {}}


def test_references_are_found_and_replaced() -> None:
    settings = {"a": "${sft.final}", "b": ["x:${reward.final},n=1", "${loop-2-draw}"], "c": 1}
    found = references_in(settings)
    assert found == [Reference("sft", "final"), Reference("reward", "final"), Reference("loop-2-draw", None)]
    assert replaced(settings, lambda each: f"<{each.stage}>") == {
        "a": "<sft>",
        "b": ["x:<reward>,n=1", "<loop-2-draw>"],
        "c": 1,
    }
    with raises_error("invalid_reference", reference="${sft final}"):
        references_in("${sft final}")


def test_digests_follow_the_content(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("1")
    cache = tmp_path / "digests.json"

    def digest() -> str:
        digests = Digests(cache)
        found = digests.of(str(folder))
        digests.save()
        return found

    first = digest()
    assert digest() == first
    (folder / "weights").write_text("22")
    assert digest() != first
    assert named_files({"model": str(folder), "reward": [f"judge:path={folder},n=2", "length"]}) == [
        str(folder)
    ]
