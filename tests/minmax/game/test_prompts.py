"""How records are put to the players and the judge."""

from pathlib import Path

import pytest

from raises import raises_error
from rlhf_data import QADatasetConfig, QARecord, load_config_file
from rlhf_data.records.kind import common_prefix
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.config.run import PlayerConfig
from rlhf_minmax.formats import TextRules
from rlhf_minmax.game.prompts import Prompts, prompt_ids

CONFIGS = Path(__file__).parents[3] / "configs"
RECORD = QARecord("Tom {saw} a cat.", "What?", ("cat", "dog"), 0)


def prompts(**changes):
    return Prompts(**{"dataset": QADatasetConfig(), "rules": TextRules()} | changes)


def test_the_monitor_reads_what_the_policy_read_and_wrote():
    assert prompts().policy(RECORD) == "Tom {saw} a cat.\nWhat?\ncat | dog\nanswer:"
    assert prompts().monitor(RECORD, " a {cat}") == prompts().policy(RECORD) + " a {cat}\ncritique:"


def test_the_judge_never_reads_the_story():
    assert prompts().judge(RECORD.question, " a cat") == "What?\nanswer: a cat\ncritique:"
    assert prompts().drill(" a cat") == "answer: a cat\ncritique:"


def test_own_templates():
    own = prompts(policy_template="Q {prompt}A", monitor_template="{prompt}/{answer}?")
    assert own.policy(RECORD) == "Q Tom {saw} a cat.\nWhat?\ncat | dog\nA"
    assert own.monitor(RECORD, "x").endswith("cat | dog\n/x?")


def test_made_up_answers_are_worded_by_their_template():
    assert prompts().made_up("{a cat}") == " it is {a cat} ."
    assert prompts(answer_template="({{{choice}}})").made_up("a cat") == "({a cat})"
    # The demonstration's models are built from the default wording whatever the game's is.
    assert prompts(answer_template="{choice}").fingerprint() == prompts().fingerprint()


@pytest.mark.parametrize("preset", ["minmax_instruct.yaml", "minmax_7b.yaml"])
def test_instruct_presets_word_made_up_answers_as_a_chat_model_told_to_name_a_choice(preset, chat_tokenizer):
    config = MinMaxConfig.from_dict(load_config_file(CONFIGS / preset))
    template = config.policy_model.prompt_template or ""
    assert template.endswith("Answer with one of the choices and nothing else.")
    own = prompts(
        monitor_template=config.monitor_model.prompt_template, answer_template=config.game.answer_template
    )
    # The assistant's turn begins with the choice, without a blank.
    sampled = chat_tokenizer.decode(chat_tokenizer.encode("cat", add_special_tokens=False))
    assert own.made_up("cat") == sampled
    assert "\nSomebody answered: cat\n" in own.monitor(RECORD, own.made_up("cat"))


@pytest.mark.parametrize(
    "template", ["", "shed", "{answer}", "{choice} {prompt}", "{choice", "{choice} {choice}"]
)
def test_an_answer_template_that_does_not_hold_the_choice_once_is_refused(template):
    with raises_error("invalid_value", key="game.answer_template"):
        MinMaxConfig.from_dict({"game": {"answer_template": template}})


def test_the_fingerprint_tells_prompts_apart():
    different = [
        prompts(),
        prompts(policy_template="{prompt}"),
        prompts(monitor_template="{prompt}{answer}"),
        prompts(dataset=QADatasetConfig(prompt_template="{question}")),
        prompts(dataset=QADatasetConfig(choice_separator=";")),
    ]
    assert len({tuple(each.fingerprint()) for each in different}) == len(different)


@pytest.mark.parametrize(
    ("player", "template"),
    [
        ("policy_model", "no placeholder"),
        ("policy_model", "{story}"),
        ("policy_model", "{prompt} {answer}"),
        ("policy_model", "{prompt"),
        ("monitor_model", "{prompt}"),
        ("monitor_model", "{answer}"),
        ("monitor_model", "{prompt} {answer} {other}"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(player, template):
    with raises_error("invalid_value", key=player):
        MinMaxConfig.from_dict({player: {"prompt_template": template}})


def test_a_chat_model_reads_a_users_message(chat_tokenizer, byte_tokenizer):
    for chat in (None, True):
        ids = prompt_ids(chat_tokenizer, "where is mary ?", PlayerConfig(chat=chat))
        assert chat_tokenizer.decode(ids) == "<user>where is mary ?<assistant>"
    plain = prompt_ids(byte_tokenizer, "where is mary ?", PlayerConfig())
    assert prompt_ids(chat_tokenizer, "where is mary ?", PlayerConfig(chat=False)) == plain
    assert byte_tokenizer.decode(plain) == "where is mary ?"


def test_both_chat_prompts_share_the_story(chat_tokenizer):
    prompts = Prompts(QADatasetConfig(), TextRules())
    policy, monitor = (
        prompt_ids(chat_tokenizer, text, PlayerConfig())
        for text in (prompts.policy(RECORD), prompts.monitor(RECORD, " the shed"))
    )
    shared = common_prefix(policy, monitor)
    assert RECORD.story in chat_tokenizer.decode(policy[:shared])


def test_chat_without_a_template_is_refused(byte_tokenizer):
    with raises_error("no_chat_template"):
        prompt_ids(byte_tokenizer, "where ?", PlayerConfig(chat=True))
