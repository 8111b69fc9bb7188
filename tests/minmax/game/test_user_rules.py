"""Rules of a user's own: from a file, checked before anything is built, part of the models' cache key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import QARecord, RunFolder, import_object
from rlhf_minmax import MinMaxConfig, MinMaxJob, Stories, TextRules, load_stories
from rlhf_minmax.game.user_rules import UserRules, check_consistent

ROW = {"story": "Tom went home. It rained.", "question": "Who?", "choices": ["Ann", "Tom"], "answer": "Tom"}
MINE = """
from rlhf_minmax import TextRules

class Mine(TextRules):
    def claim(self, record, answer):
        return record.choices[0] if "first" in answer else super().claim(record, answer)

made = Mine(2)
other = object()

class Broken(TextRules):
    def rival(self, record):
        return record.nothing

class Number(TextRules):
    def claim(self, record, answer):
        return 42

class Vague(TextRules):
    def refutes(self, record, evidence, claim):
        return "no"

class Late(TextRules):
    def rival(self, record):
        return record.choices[9] if record.story == "Odd." else record.choices[0]

class Unheld(TextRules):
    def evidence_holds(self, record, evidence):
        return False

class Paraphrase(TextRules):
    def evidence_on(self, record, claim):
        return "Tom is at home" if claim == "Ann" else None

class Stranger(TextRules):
    def rival(self, record):
        return "Bob"

class Same(TextRules):
    def rival(self, record):
        return record.answer_text

class Refuting(TextRules):
    def refutes(self, record, evidence, claim):
        return True

class Nothing(TextRules):
    def possible_evidence(self, record):
        return []

class Beloved(TextRules):
    def appeal(self, record, claim):
        return float("nan") if claim == "Ann" else 0.5

class Denying(TextRules):
    def supports(self, evidence, claim):
        return False

class Wordy(TextRules):
    def appeal(self, record, claim):
        return "very"

class Nonsense(TextRules):
    def possible_evidence(self, record):
        return ["the moon is green"]

class Leaving(TextRules):
    def rival(self, record):
        raise SystemExit(0)

class LeavingAtOnce(TextRules):
    def __init__(self, words):
        raise SystemExit(0)

class Misspelt(TextRules):
    def clam(self, record, answer):
        return None

class Unsaid(TextRules):
    def refute(self, record, evidence, claim):
        return False

class Helped(TextRules):
    claims = ("is", "was")

    def claim(self, record, answer):
        return self.claim_of(record, self.lowered(answer))

    def claim_of(self, record, answer):
        return super().claim(record, answer)

    def lowered(self, answer):
        return answer.lower()

    def _sentence(self, record):
        return record.story

class Odd(TextRules):
    def __init__(self):
        pass
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """`load(name)` reads ten rows with the rules of that name."""
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{**ROW, "story": f"Tom went home on day {i}. It rained."} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(rules: str | None, **data: Any) -> Stories:
        values = {"train_data": str(tmp_path / "rows.jsonl"), "rules": rules, **data}
        return load_stories(MinMaxConfig.from_dict({"data": values}))

    return call


@pytest.mark.parametrize(("name", "words"), [("Mine", 4), ("made", 2)])
def test_a_class_or_an_object_reads_answers(load: Any, tmp_path: Path, name: str, words: int) -> None:
    stories = load(f"{tmp_path}/mine.py:{name}")
    rules = stories.prompts.rules
    assert isinstance(rules, UserRules) and rules.own.min_evidence_words == words
    assert rules.claim(stories.train[0], "the first") == "Ann"
    assert rules.claim(stories.train[0], "it is Tom") == "Tom"


def test_the_file_is_found_from_anywhere_and_is_part_of_the_cache_key(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = MinMaxConfig.from_dict({"data": {"train_data": "rows.jsonl", "rules": "mine.py:Mine"}})
    assert config.data.rules == f"{tmp_path}/mine.py:Mine"
    monkeypatch.chdir("/")
    prompts = load_stories(config).prompts
    own = prompts.fingerprint()
    assert len(own) == len(load(None).prompts.fingerprint()) + 1
    (tmp_path / "mine.py").write_text(MINE + "# changed\n")
    assert prompts.fingerprint() != own
    (tmp_path / "mine.py").write_text(MINE + "import helper\n")
    alone = prompts.fingerprint()
    (tmp_path / "helper.py").write_text("from . import other\nimport json\n")
    (tmp_path / "other.py").write_text("import helper\n")
    assert prompts.fingerprint() == [*alone, "from . import other\nimport json\n", "import helper\n"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("other", "no_rules"),
        ("Broken", "rules_failed"),
        ("Number", "rules_failed"),
        ("Vague", "rules_failed"),
        ("Wordy", "rules_failed"),
        ("Leaving", "rules_failed"),
        ("LeavingAtOnce", "rules_not_made"),
        ("Odd", "rules_not_made"),
        ("Gone", "missing_attribute"),
    ],
)
def test_rules_that_cannot_work_are_refused_at_once(load: Any, tmp_path: Path, name: str, code: str) -> None:
    with raises_error(code):
        load(f"{tmp_path}/mine.py:{name}")


@pytest.mark.parametrize(
    ("name", "method", "meant"), [("Misspelt", "clam", "claim"), ("Unsaid", "refute", "refutes")]
)
def test_a_misspelt_method_is_refused(load: Any, tmp_path: Path, name: str, method: str, meant: str) -> None:
    with raises_error("misspelt_method", method=method, meant=meant):
        load(f"{tmp_path}/mine.py:{name}")


def test_methods_of_ones_own_that_are_like_no_other_are_left_alone(load: Any, tmp_path: Path) -> None:
    assert load(f"{tmp_path}/mine.py:Helped").train


@pytest.mark.parametrize(("name", "hinted"), [("Broken", True), ("Leaving", False)])
def test_the_constructor_is_named_where_an_attribute_is_missing(
    load: Any, tmp_path: Path, name: str, hinted: bool
) -> None:
    with raises_error("rules_failed", method="rival") as caught:
        load(f"{tmp_path}/mine.py:{name}")
    assert ("__init__" in str(caught.value)) == hinted


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("Unheld", "correct_evidence"),
        ("Paraphrase", "evidence_on('Ann')"),
        ("Stranger", "rival"),
        ("Same", "rival"),
        ("Refuting", "refutes"),
        ("Beloved", "appeal('Ann')"),
        ("Denying", "supports"),
        ("Nothing", "possible_evidence"),
        ("Nonsense", "possible_evidence"),
    ],
)
def test_rules_that_contradict_themselves_are_refused_by_row(
    load: Any, tmp_path: Path, make_config: Any, name: str, method: str
) -> None:
    with raises_error("inconsistent_rules", method=method) as caught:
        load(f"{tmp_path}/mine.py:{name}")
    assert "rows.jsonl, line " in caught.value.fields["where"]
    rules = import_object(f"{tmp_path}/mine.py:{name}", what="rules")(4)
    read = load(None)
    stories = replace(read, prompts=replace(read.prompts, rules=rules))
    job = MinMaxJob(make_config(), RunFolder.create(str(tmp_path / "run"), job="x"), stories=stories)
    with raises_error("inconsistent_rules", method=method):
        job.play()


def test_refutes_which_may_run_a_program_is_asked_about_some_rows_only() -> None:
    asked: list[int] = []

    class Counting(TextRules):
        def refutes(self, record: QARecord, evidence: str, claim: str) -> bool:
            asked.append(int(record.question))
            return False

    story = "Tom went home. It rained."
    rows = [QARecord(story, str(i), ("Tom", "Ann"), 0, evidence="Tom went home.") for i in range(960)]
    check_consistent(Counting(), rows)
    assert asked == list(range(0, 960, 30))


@pytest.mark.parametrize("part", ["held_out", "building"])
def test_stories_of_ones_own_need_answers_where_something_is_measured(load: Any, part: str) -> None:
    read = load(None)
    lacking = replace(getattr(read, part)[0], answer=None, where="row 7")
    with raises_error("no_labels", where="row 7"):
        replace(read, **{part: [*getattr(read, part), lacking]})


def test_an_error_in_the_middle_of_a_run_names_the_row(load: Any, tmp_path: Path) -> None:
    stories = load(f"{tmp_path}/mine.py:Late")
    late = replace(stories.train[0], story="Odd.", where="rows.jsonl, line 99")
    with raises_error("rules_failed", method="rival") as caught:
        stories.prompts.rules.rival(late)
    assert late.where and late.where in str(caught.value)


def test_a_world_has_its_own_rules(load: Any, tmp_path: Path) -> None:
    with raises_error("missing_key", key="data.train_data"):
        load(f"{tmp_path}/mine.py:Mine", train_data=None)


def test_a_job_plays_the_stories_that_it_is_given(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    read = load_stories(config)
    stories = replace(read, train=read.train[5:2:-1])
    job = MinMaxJob(config, RunFolder.create(tmp_path / "run"), stories=stories)
    assert job._check()[0].train == stories.train != read.train


@pytest.mark.parametrize("named", ["mine.py", "mine", ":Mine", "mine.py:"])
def test_rules_are_named_by_file_and_class(named: str) -> None:
    with raises_error("invalid_value", key="data.rules"):
        MinMaxConfig.from_dict({"data": {"train_data": "rows.jsonl", "rules": named}})
