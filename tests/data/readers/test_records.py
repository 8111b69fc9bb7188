import json

import pytest

from raises import raises_error
from rlhf_data import QADatasetConfig, QARecord, load_qa, qa_from_row, render_prompt, split_of

_ROW = {
    "story": "Mary is in the hall.",
    "question": "Where is Mary?",
    "choices": ["hall", "shed", "barn"],
    "answer": 0,
}


@pytest.mark.parametrize(
    ("choices", "answer", "index"),
    [
        (["hall", "shed"], "shed", 1),
        (["hall", "shed"], " shed ", 1),
        (["hall", "shed"], 1, 1),
        (["hall", "shed"], "1", 1),
        (["hall", "shed"], "B", 1),
        (["hall", "shed"], "a", 0),
        (["B", "A"], "B", 0),  # a choice's text goes before a letter
        (["2", "1", "0"], "2", 0),  # and before an index
        ([4, 5], "5", 1),
        ([0, 1], 1, 1),
        (["0", "1"], 1, 1),  # both readings name one choice
        ([0.0, 1.0], 1, 1),
        (["1", "2", "3"], "1", 0),
        (["1", "2", "3"], 0, 0),
        ('["a|b", "c"]', "c", 1),
        ("hall | shed", "shed", 1),
    ],
)
def test_answer_as_text_index_or_letter(choices, answer, index):
    assert qa_from_row(_ROW | {"choices": choices, "answer": answer}).answer == index


@pytest.mark.parametrize(
    ("labels", "answer", "index"),
    [(["A", "B", "C"], "B", 1), (["1", "2", "3"], "3", 2), ([1, 2, 3], 1, 0), (["A", "B", "C"], "shed", 2)],
)
def test_choices_with_labels_of_their_own(labels, answer, index):
    choices = {"text": ["red car", "bike", "shed"], "label": labels}
    record = qa_from_row({"story": "s", "question": "q", "choices": choices, "answer": answer})
    assert record.choices == ("red car", "bike", "shed") and record.answer == index


@pytest.mark.parametrize("choices", [{"text": ["a", "b"]}, {"text": ["a", "b"], "label": ["A", "A"]}])
def test_labels_that_do_not_fit_the_choices_are_refused(choices):
    with raises_error("not_a_list"):
        qa_from_row({"story": "s", "question": "q", "choices": choices, "answer": "A"})


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"answer": "cellar"}, "unknown_answer", "answer"),
        ({"answer": 3}, "answer_out_of_range", "answer"),
        ({"answer": -1}, "answer_out_of_range", "answer"),
        ({"answer": "D"}, "answer_out_of_range", "answer"),
        ({"answer": "²"}, "unknown_answer", "answer"),
        ({"answer": 1.0}, "invalid_answer", "answer"),
        ({"answer": True}, "invalid_answer", "answer"),
        ({"answer": None}, "missing_column", None),
        ({"choices": [1, 2, 3], "answer": 1}, "ambiguous_answer", "answer"),
        ({"choices": ["1", "2", "3"], "answer": 1}, "ambiguous_answer", "answer"),
        ({"choices": "1|2|3", "answer": 1}, "ambiguous_answer", "answer"),
        ({"choices": [1.0, 2.0], "answer": 1}, "ambiguous_answer", "answer"),
        ({"choices": ["1.0", "2.0"], "answer": 1}, "ambiguous_answer", "answer"),
        ({"choices": ["hall", "\ud800 shed"]}, "invalid_text", "choices"),
        ({"choices": ["hall", "\ud800 shed"], "answer": "\ud800 shed"}, "invalid_text", "choices"),
        ({"story": "\ud800"}, "invalid_text", "story"),
        ({"question": "where \udfff"}, "invalid_text", "question"),
        ({"choices": ["hall", "hall "]}, "repeated_choice", "choices"),
        ({"choices": ["hall"]}, "too_few_choices", "choices"),
        ({"choices": ["hall", ""]}, "invalid_choice", "choices"),
        ({"choices": ["hall", None]}, "invalid_choice", "choices"),
        ({"choices": {"a": 1}}, "not_a_list", "choices"),
        ({"choices": '["a"'}, "invalid_json", "choices"),
        ({"story": "  "}, "not_a_text", "story"),
        ({"question": 3}, "not_a_text", "question"),
    ],
)
def test_bad_rows_name_place_field_and_expectation(change, code, field):
    where = "stories.jsonl, line 7"
    with raises_error(code, where=f"{where}, field {field}" if field else where):
        qa_from_row(_ROW | change, where=where)


def test_load_names_file_and_line(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text(json.dumps(_ROW) + "\n" + json.dumps(_ROW | {"answer": "x"}) + "\n", encoding="utf-8")
    with raises_error("answer_out_of_range", where=f"{path}, line 2, field answer"):
        load_qa(path)


def test_half_of_a_surrogate_pair_makes_a_bad_row(tmp_path):
    path = tmp_path / "stories.jsonl"
    rows = [_ROW, _ROW | {"story": "Mary \ud800 went."}, _ROW | {"choices": ["hall", "\udfff"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with raises_error("invalid_text", where=f"{path}, line 2, field story"):
        load_qa(path)
    skipped = []
    assert len(load_qa(path, on_bad_row="skip", skipped=skipped)) == 1
    assert [f"line {n}" in text for n, text in zip((2, 3), skipped, strict=True)] == [True, True]


def test_column_mapping_keeps_other_columns(tmp_path):
    path = tmp_path / "stories.csv"
    path.write_text('passage,question,options,label,source\n"A b.\n",Where?,x|y,y,web\n', encoding="utf-8")
    config = QADatasetConfig(story_column="passage", choices_column="options", answer_column="label")
    [record] = load_qa(path, config)
    assert record == QARecord("A b.\n", "Where?", ("x", "y"), 1, {"source": "web"})
    assert record.answer_text == "y"
    with raises_error("missing_column", column="story"):
        load_qa(path)


def test_marked_evidence_is_read_where_a_column_is_named():
    story = "Mary went\nhome. “I'll stay” – said Zo\u00eb! It rained."
    row = {**_ROW, "story": story, "quote": "mary  went home."}
    marked = QADatasetConfig(evidence_column="quote")
    record = qa_from_row(row, marked)
    assert record.evidence == "Mary went home." and "quote" not in record.extra
    assert record.contents() == [*qa_from_row(row).contents(), "Mary went home."]
    # Other quotation marks, dashes and a decomposed ë; what is kept are the story's own words.
    assert qa_from_row(row | {"quote": '"I\u2019ll stay - said Zoe\u0308"'}, marked).evidence == (
        "I'll stay” – said Zo\u00eb!"
    )
    assert [qa_from_row(row | {"quote": blank}, marked).evidence for blank in (None, " ")] == [None, None]
    assert qa_from_row(_ROW, marked).evidence is None
    unmapped = qa_from_row(row)
    assert unmapped.evidence is None and unmapped.extra["quote"] == row["quote"]
    with raises_error("foreign_evidence", where="row, field quote"):
        qa_from_row(row | {"quote": "Mary went away."}, marked)
    with raises_error("foreign_evidence", where="row, field quote"):
        qa_from_row(row | {"quote": "ary went"}, marked)  # whole words
    with raises_error("foreign_evidence", where="row, field quote"):
        qa_from_row(row | {"quote": "..."}, marked)
    with raises_error("not_a_text", where="row, field quote"):
        qa_from_row(row | {"quote": ["Mary went home."]}, marked)


def test_prompt_template_takes_text_as_it_is():
    config = QADatasetConfig(prompt_template="{{q}} {question} [{choices}] {story}", choice_separator="/")
    record = qa_from_row(_ROW | {"story": "{question} ü", "choices": ["{x}", "y"]})
    assert render_prompt(record, config) == "{q} Where is Mary? [{x}/y] {question} ü"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question} {answer}", "placeholder {answer} is unknown"),
        ("{story}", "{question} is missing"),
        ("{", "not a template"),
    ],
)
def test_bad_templates_are_refused(template, message):
    with raises_error("invalid_value", key="prompt_template") as caught:
        QADatasetConfig.from_dict({"prompt_template": template})
    assert message in str(caught.value)


def test_split_depends_on_the_text_alone():
    splits = [split_of(f"story {i}") for i in range(2000)]
    assert 0.26 < splits.count("eval") / 2000 < 0.34
    # int(md5(text), 16) % 10 is 0, 7, 9, 6; below 3 is "eval"
    assert [split_of(f"story {i}") for i in range(4)] == ["eval", "train", "train", "train"]


def test_records_can_be_hashed_whatever_they_carry():
    assert hash(qa_from_row(_ROW | {"x": [1]})) == hash(qa_from_row(_ROW))
