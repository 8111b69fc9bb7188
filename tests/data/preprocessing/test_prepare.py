"""Rows through both passes: what is left out and why, what is the same in any order, what is written."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from files import read_lines, write_lines
from raises import raises_error
from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    LabelledRecord,
    PreferenceRecord,
    PreprocessConfig,
    PromptRecord,
    TextRecord,
    detect_kind,
    load_records,
    prepare_rows,
    preprocess,
    read_items,
    write_prepared,
)
from rlhf_data.preprocessing.output import as_row

SAID = "the quick brown fox jumps over the lazy dog while seven wizards mix strong jugs of violet ink"


def prepare(paths: Any, folder: Path, **given: Any) -> dict[str, Any]:
    config = PreprocessConfig(**given)
    paths = [str(path) for path in (paths if isinstance(paths, list) else [paths])]
    prepared = prepare_rows(lambda: read_items(paths, detect_kind(paths[0]), config), config)
    folder.mkdir()
    return write_prepared(prepared, folder)


def rows_of(path: Path) -> list[Any]:
    return read_lines(path) if path.exists() else []


def test_real_pairs_lose_two_empty_ones_and_share_one_prompt(hh_pairs: Path, tmp_path: Path) -> None:
    # Counted with the standard library alone: 1500 rows, two empty completions, 1499 prompts.
    report = prepare(hh_pairs, tmp_path / "out")
    assert report["rows"] == {"read": 1500, "kept": 1498, "train": 1348, "eval": 150}
    assert report["left_out"] == {"empty": 2}
    places = [entry["where"] for entry in report["shown"]["dropped"]["empty"]]
    assert [place.rpartition(" ")[2] for place in places] == ["335", "1013"]
    assert report["duplicate_prompts"] == 1
    train, held_out = (rows_of(tmp_path / "out" / name) for name in ("train.jsonl", "eval.jsonl"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(abs(each["eval"] - each["rows"] * 0.1) < 1 for each in report["strata"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("dropped.jsonl", "eval.jsonl", "train.jsonl"),
    ]


def planted() -> list[dict[str, Any]]:
    """Twenty good pairs, then what each rule is to find."""
    rows = [{"prompt": f"ask {i} {SAID}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)]
    rows.append(dict(rows[3]))  # a duplicate
    rows.append({**rows[5], "chosen": rows[5]["rejected"], "rejected": rows[5]["chosen"]})  # a contradiction
    rows.append({"prompt": "p", "chosen": SAID + " here", "rejected": SAID + " Here "})  # a tie
    rows.append({"prompt": "p", "chosen": "  ", "rejected": "b"})  # empty
    rows.append({"prompt": "p", "chosen": f"see: {SAID.upper()}!", "rejected": "nothing"})  # contaminated
    return rows


COUNTS = {"empty": 1, "tie": 1, "contaminated": 1, "contradiction": 2, "duplicate": 1}


def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "pairs.jsonl", [{**row, "prompt": row["prompt"].split(" the")[0]} for row in planted()]
    )
    test = write_lines(tmp_path / "test.jsonl", [{"question": f"Who? {SAID}.", "answer": "x"}])
    config = PreprocessConfig(eval_fraction=0)
    prepared = prepare_rows(
        lambda: read_items([str(data)], "preference", config), config, against=[str(test)]
    )
    assert prepared.report["left_out"] == COUNTS
    assert prepared.report["rows"]["train"] == 19 - 0 - 1 + 1 - 0  # 20 good ones less the contradicted one
    (tmp_path / "out").mkdir()
    write_prepared(prepared, tmp_path / "out")
    dropped = [
        (row["reason"], int(row["where"].split()[-1])) for row in rows_of(tmp_path / "out/dropped.jsonl")
    ]
    duplicate = next(line for reason, line in dropped if reason == "duplicate")
    assert duplicate in (4, 21)
    assert sorted(dropped) == sorted(
        [
            *(("contradiction", 6), ("contradiction", 22), ("duplicate", duplicate)),
            *(("tie", 23), ("empty", 24), ("contaminated", 25)),
        ]
    )


def test_whole_short_prompts_of_evaluation_files_count(tmp_path: Path) -> None:
    test = write_lines(tmp_path / "test.jsonl", [{"question": "Who is Ann?", "answer": "x"}])
    records = [CompletionRecord("who is ann", "a friend"), CompletionRecord("who is ann's friend", "Bob")]
    split = preprocess(records, config=PreprocessConfig(eval_fraction=0), against=[str(test)])
    assert split.train == records[1:]


@pytest.mark.parametrize(
    ("rule", "kept"), [("drop", []), ("majority", [True, True]), ("keep", [True, True, False])]
)
def test_contradictions(rule: Any, kept: list[bool]) -> None:
    labels = [LabelledRecord("p", "c", label) for label in (True, False, True)]
    config = PreprocessConfig(contradictions=rule, duplicate_rows="none", eval_fraction=0)
    others = [LabelledRecord("p", "d", True)]
    found = preprocess([*labels, *others], config=config).train
    assert sorted(r.label for r in found if r.completion == "c") == sorted(kept)


def test_ties_short_rows_duplicates_and_margins() -> None:
    pair = PreferenceRecord("p", " ".join(map(str, range(50))), " ".join(map(str, range(51))), margin=3.0)
    other = PreferenceRecord("q", "one two three", "four")
    near = replace(other, prompt=f"{SAID} now"), replace(other, prompt=SAID)

    def kept(*records: Any, **given: Any) -> list[Any]:
        return preprocess(records, config=PreprocessConfig(eval_fraction=0, **given)).train

    assert kept(pair, other) == [other]
    assert pair in kept(pair, other, ties="keep")
    assert replace(pair, margin=0.0) in kept(pair, other, ties="margin0")
    assert kept(pair, other, ties="keep", min_words=2) == [pair]
    assert len(kept(*near)) == 2
    assert len(kept(*near, duplicate_rows="near")) == 1
    assert len(kept(other, replace(other, chosen="five"))) == 2
    assert len(kept(other, replace(other, chosen="five"), duplicate_prompts="exact")) == 1
    assert len(kept(*near, duplicate_prompts="near")) == 1
    assert kept(other, margins="similarity") == [replace(other, margin=1.0)]


def test_groups_of_near_prompts_stay_on_one_side() -> None:
    records = [CompletionRecord(f"{i} {SAID} {i}", f"answer {j}") for i in range(40) for j in range(1)]
    one = preprocess(records, config=PreprocessConfig(group_prompts="near", near_threshold=0.5))
    assert not one.eval  # all are one group, too large for a tenth
    assert len(preprocess(records).eval) == 4


TURN = st.sampled_from(["hi", "how are you", "what is that thing over there", "no"])
PAIR = st.builds(
    lambda turns, a, b, m: PreferenceRecord(
        "".join(f"\n\nHuman: {t}\n\nAssistant: ok" for t in turns) + "\n\nHuman: and now\n\nAssistant:",
        a,
        b,
        m,
    ),
    st.lists(TURN, max_size=4),
    TURN,
    TURN,
    st.sampled_from([None, 1.0]),
)


def test_of_equal_rows_the_one_that_was_not_shortened_is_kept() -> None:
    said = "\n\nHuman: and now\n\nAssistant:"
    long = PreferenceRecord(f"\n\nHuman: how are you\n\nAssistant: ok{said}", "what is that over there", "no")
    short = PreferenceRecord(said, "what is that over there", "no")
    config = PreprocessConfig(max_length=9, eval_fraction=0.0)
    for records in ([long, short], [short, long]):
        found = preprocess(records, config=config)
        assert found.train == [short] and found.report["changed"]["rows"] == 0
    assert preprocess([long], config=config).report["changed"]["shortened"] == 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(PAIR, min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.sampled_from(["drop", "majority"]),
    st.sampled_from([None, 12]),
)
def test_the_order_of_the_records_makes_no_difference(
    records: list[Any], order: random.Random, contradictions: Any, max_length: int | None
) -> None:
    config = PreprocessConfig(
        contradictions=contradictions,
        max_length=max_length,
        duplicate_rows="near",
        eval_fraction=0.3,
        strata=3,
    )
    records = [*records, PreferenceRecord("x", "kept", "in any case")]
    shuffled = order.sample(records, len(records))
    one, other = (preprocess(each, config=config) for each in (records, shuffled))
    assert (one.train, one.eval, one.report) == (other.train, other.eval, other.report)
    assert not {r.prompt for r in one.train} & {r.prompt for r in one.eval}
    assert all(len(f"{r.prompt} {r.chosen}".split()) <= 99 for r in one.train)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_files_are_the_same_for_any_order_and_number_of_shards(
    tmp_path: Path, order: random.Random, shards: int
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    rows = planted()
    shuffled = order.sample(rows, len(rows))
    whole = write_lines(folder / "all.jsonl", rows)
    parts = [write_lines(folder / f"part-{i}.jsonl", shuffled[i::shards]) for i in range(shards)]
    one = prepare(whole, folder / "one", max_length=20, eval_fraction=0.25)
    other = prepare(parts, folder / "other", max_length=20, eval_fraction=0.25)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (folder / "one" / name).read_bytes() == (folder / "other" / name).read_bytes()
    assert Counter(one["left_out"]) == Counter(other["left_out"])


USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (
            "preference",
            PreferenceRecord("p", "a", "b", 0.5, template={"tools": [{"name": "x"}], "m": 1}),
        ),
        ("preference", PreferenceRecord("p", "a", "b", is_chat=True)),
        (
            "preference",
            PreferenceRecord([], [USER], [REPLY]),
        ),
        ("sft", CompletionRecord("p", "c")),
        ("sft", CompletionRecord("p", "c", is_chat=True)),
        (
            "sft",
            ConversationRecord([USER, REPLY]),
        ),
        ("sft", TextRecord("a text")),
        ("kto", LabelledRecord("p", "c", False)),
        ("prompt", PromptRecord("p", {"answer": "4"})),
    ],
)
def test_a_row_is_read_as_the_record_it_was_written_from(kind: str, record: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [as_row(record)])
    assert load_records(path, kind).records == [record]


def test_long_dialogues_keep_their_end(hh_pairs: Path, tmp_path: Path, byte_tokenizer: Any) -> None:
    records = load_records(hh_pairs, "preference", on_bad_row="skip", subset_size=40).records
    split = preprocess(records, byte_tokenizer, PreprocessConfig(max_length=300, eval_fraction=0))
    assert split.report["changed"]["shortened"] > 5
    assert split.report["lengths"]["max"]["after"] <= 300
    by_chosen = {record.chosen: record for record in records}
    for record in split.train:
        whole = by_chosen[record.chosen]
        assert record.rejected == whole.rejected
        assert record.prompt[-12:] == whole.prompt[-12:]


def test_bad_rows_and_settings_are_refused(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p"}]
    )
    config = PreprocessConfig()

    def read() -> Any:
        return read_items([str(data)], "preference", config)

    with raises_error("missing_column"):
        prepare_rows(read, config, on_bad_row="error")
    assert prepare_rows(read, config).report["left_out"] == {"bad_row": 1}
    with raises_error("no_row_left"):
        preprocess([PreferenceRecord("p", "a", "A")])
    with raises_error("invalid_value"):
        PreprocessConfig.from_dict({"truncation": "right"})
    with raises_error("missing_column"):
        rated = PreprocessConfig(margins="ratings")
        prepare_rows(lambda: read_items([str(data)], "preference", rated), rated, on_bad_row="error")
    ratings = {"chosen_rating": 4, "rejected_rating": 1.5}
    data = write_lines(tmp_path / "rated.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"} | ratings])
    [item] = read_items([str(data)], "preference", rated)
    assert isinstance(item.record, PreferenceRecord)
    assert item.record.margin == 2.5


def test_pairs_are_known_in_other_forms_and_equal_ratings_are_a_tie(tmp_path: Path) -> None:
    answers = [{"response": f"answer {i}", "overall_score": i} for i in range(2)]
    rows = [
        {"instruction": "q", "completions": answers},
        {"instruction": "r", "completions": [answers[0], answers[0]]},
    ]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    assert detect_kind(str(data)) == "preference"
    report = prepare(data, tmp_path / "out")
    assert report["left_out"] == {"tie": 1}
    assert rows_of(tmp_path / "out" / "train.jsonl")[0]["chosen"] == "answer 1"
    steps = write_lines(tmp_path / "steps.jsonl", [{"prompt": "p", "completions": ["a"], "labels": [1]}])
    with raises_error("unknown_kind"):
        detect_kind(str(steps))


def test_data_that_changes_between_the_passes_is_refused(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"p{i}", "completion": "c"} for i in range(3)])
    config = PreprocessConfig()
    prepared = prepare_rows(lambda: read_items([str(data)], "sft", config), config)
    write_lines(data, [{"prompt": f"q{i}", "completion": "c"} for i in range(3)])
    with raises_error("data_changed"):
        write_prepared(prepared, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"near_threshold": 0.5}, {"near_size": 3}, {"near_unit": "characters"}, {"truncation": "drop"}],
)
def test_settings_without_a_use_are_refused(settings: dict[str, Any]) -> None:
    with raises_error("invalid_value"):
        PreprocessConfig.from_dict(settings)
    PreprocessConfig.from_dict(settings | {"duplicate_rows": "near", "max_length": 9})


def test_tokens_are_not_counted_without_a_tokenizer() -> None:
    with raises_error("unused_option", option="min_tokens"):
        preprocess([TextRecord("a b c")], config=PreprocessConfig(min_tokens=2))
