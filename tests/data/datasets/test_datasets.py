"""Tokenised sets in memory: what is scored, what is cut or left out, and that nothing is lost in storage."""

import logging

import pytest

from raises import raises_error
from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    GRPODataset,
    KTODataset,
    LabelledRecord,
    PreferenceDataset,
    PreferencePair,
    PreferenceRecord,
    PromptRecord,
    SFTDataset,
    StepDataset,
    StepExample,
    StepPair,
    StepPairRecord,
    StepwiseRecord,
    TextRecord,
    TokenSequence,
)
from rlhf_data.records.kto import kl_partner

_TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and ?"},
    {"role": "assistant", "content": "no no"},
]


def _scored(tokenizer, sequence):
    return tokenizer.decode([sequence.input_ids[i] for i in sequence.scored()])


def test_supervised_examples_score_what_is_learned(with_template):
    tokenizer = with_template("plain")
    records = [
        CompletionRecord("mary went", " to shed ."),
        TextRecord("ball moved"),
        ConversationRecord(_TALK),
        CompletionRecord(_TALK[:3], _TALK[3:]),
        CompletionRecord(_TALK[:1], _TALK[1:]),
    ]
    examples = SFTDataset(records, tokenizer)
    texts = [_scored(tokenizer, example) for example in examples]
    whole = tokenizer.decode(examples[1].input_ids)
    assert whole == "ball moved<eos>" and whole.endswith(texts[1])
    assert texts[0] == " to shed .<eos>"
    assert texts[2:] == ["yes<eos>no no<eos>", "no no<eos>", "yes<eos>no no<eos>"]
    assert all(isinstance(example.input_ids, list) for example in examples)

    everything = SFTDataset(records, tokenizer, assistant_only_loss=False)
    texts = [_scored(tokenizer, example) for example in everything]
    assert (
        texts[2].startswith("|user|>hi<eos>")
        and texts[4] == "yes<eos><|user|>and ?<eos><|assistant|>no no<eos>"
    )
    assert [example.input_ids for example in everything] == [example.input_ids for example in examples]


def test_slices_negative_indices_and_iteration(tokenizer):
    examples = SFTDataset([TextRecord(f"text {i}") for i in range(5)], tokenizer)
    assert len(examples) == 5
    assert list(examples) == examples[:] == [examples[i] for i in range(5)]
    assert examples[-1] == examples[4] and examples[1:4:2] == [examples[1], examples[3]]
    for index in (5, -6):
        with pytest.raises(IndexError):
            examples[index]


def test_content_is_that_of_the_rows_in_their_order(tokenizer):
    def content(*rows):
        return PreferenceDataset([PreferenceRecord(*row) for row in rows], tokenizer).content

    one, other = ("where is mary ?", " hall", " shed"), ("where is john ?", " hall", " shed")
    assert content(one, other) == content(one, other)
    assert len({content(one, other), content(other, one), content(one), content(one, one)}) == 4
    swapped = ("where is mary ?", " shed", " hall")
    assert content(one) != content(swapped)


def test_pairs_share_their_prompt_and_end(tokenizer):
    [pair] = PreferenceDataset([PreferenceRecord("where ?", " shed", " hall way", 0.5)], tokenizer)
    assert isinstance(pair, PreferencePair) and pair.margin == 0.5
    assert pair.chosen.score_from == pair.rejected.score_from == len(tokenizer("where ?")["input_ids"])
    assert [_scored(tokenizer, s) for s in pair[:2]] == [" shed<eos>", " hall way<eos>"]


def test_long_rows_are_cut_or_left_out_and_counted(tokenizer):
    records = [
        PreferenceRecord("mary", " b" * 3, " c", where="f.jsonl, line 1"),
        PreferenceRecord("mary", " b" * 30, " c", where="f.jsonl, line 2"),
        PreferenceRecord("mary " * 30, " b", " c", where="f.jsonl, line 3"),
    ]
    cut = PreferenceDataset(records, tokenizer, max_length=12)
    assert len(cut) == 2 and cut.dropped == 1
    length = len(tokenizer("mary " * 30)["input_ids"])
    assert cut.drop_messages == [f"f.jsonl, line 3: the prompt alone has {length} tokens, max_length is 12"]
    assert len(cut[1].chosen.input_ids) == 12 and len(cut[1].rejected.input_ids) < 12

    whole = PreferenceDataset(records, tokenizer, max_length=12, overlong="drop")
    assert len(whole) == 1 and whole.dropped == 2 and "line 2: " in whole.drop_messages[0]
    assert PreferenceDataset(records, tokenizer, max_length=None).dropped == 0


def test_a_conversation_whose_answer_is_cut_off_is_left_out(with_template):
    tokenizer = with_template("plain")
    first = len(
        tokenizer.apply_chat_template(_TALK[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    records = [ConversationRecord(_TALK), TextRecord("short")]
    examples = SFTDataset(records, tokenizer, max_length=first)
    assert len(examples) == 1 and examples.dropped == 1
    assert f"record 1: nothing to learn within the first {first} tokens" in examples.drop_messages
    kept = SFTDataset(records, tokenizer, max_length=first + 1)[0]
    assert kept.score_mask is not None and len(kept.score_mask) == first + 1 and kept.scored() == [first]


def test_only_the_first_messages_are_kept(tokenizer):
    records = [CompletionRecord("a" * 50, "b") for _ in range(9)] + [CompletionRecord("a", "b")]
    examples = SFTDataset(records, tokenizer, max_length=20)
    assert examples.dropped == 9 and len(examples.drop_messages) == 5
    with raises_error("no_row_left"):
        SFTDataset(records[:9], tokenizer, max_length=20)
    with raises_error("no_row_left"):
        SFTDataset([], tokenizer)


def test_rows_that_cannot_be_encoded_are_refused_or_skipped(tokenizer):
    records = [TextRecord("a"), ConversationRecord(_TALK, where="f.jsonl, line 2")]
    with raises_error("no_chat_template"):
        SFTDataset(records, tokenizer)
    examples = SFTDataset(records, tokenizer, on_bad_row="skip")
    assert len(examples) == 1 and len(examples.skipped) == 1 and "line 2" in examples.skipped[0]


def test_progress_is_reported(tokenizer):
    calls = []
    records = [CompletionRecord("a" * (40 if i % 2 else 1), "b") for i in range(130)]
    SFTDataset(records, tokenizer, max_length=20, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 130), (64, 130), (128, 130), (130, 130)]


def test_moved_starts_are_said(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        SFTDataset([CompletionRecord("ma", "ry went"), CompletionRecord("mary", " went")], tokenizer)
    assert "1 of 2 prompts have other token ids in front of a completion" in caplog.text


def test_kl_partners_rotate_within_batches():
    # batches of 3 over 8 rows: (0 1 2) (3 4 5) (6 7); the first of each takes the last one's completion
    assert [kl_partner(i, 8, 3) for i in range(8)] == [2, 0, 1, 5, 3, 4, 7, 6]
    # a last batch of one, (0 1) (2 3) (4): it takes the completion of the row before, never its own
    assert [kl_partner(i, 5, 2) for i in range(5)] == [1, 0, 3, 2, 3]


@pytest.mark.parametrize("rows", range(2, 12))
@pytest.mark.parametrize("size", range(2, 6))
def test_no_row_is_its_own_kl_partner(rows, size):
    assert all(kl_partner(i, rows, size) != i for i in range(rows))


def test_a_single_row_has_no_kl_partner(tokenizer):
    with raises_error("too_few_rows"):
        KTODataset([LabelledRecord("p", " answer", True)], tokenizer, kl_batch_size=2)


def test_labelled_completions_and_their_mismatched_pairs(tokenizer):
    records = [LabelledRecord(f"p{i}", f" answer {i}" + " and more" * i, i % 2 == 0) for i in range(5)]
    plain = KTODataset(records, tokenizer)
    paired = KTODataset(records, tokenizer, kl_batch_size=2)
    assert [example.label for example in paired] == [True, False, True, False, True]
    assert all(example.kl_sequence is None for example in plain)
    assert [example.sequence for example in plain] == [example.sequence for example in paired]
    partners = [1, 0, 3, 2, 3]
    for i, example in enumerate(paired):
        sequence = example.kl_sequence
        assert sequence is not None
        assert tokenizer.decode(sequence.input_ids[: sequence.score_from]) == f"p{i}"
        assert _scored(tokenizer, sequence) == _scored(tokenizer, plain[partners[i]].sequence)


def test_mismatched_completions_are_cut_behind_their_new_prompt(tokenizer):
    records = [
        LabelledRecord("a", " c" * 20, True),
        LabelledRecord("mary went to the shed" * 2, " c" * 20, False),
    ]
    examples = KTODataset(records, tokenizer, max_length=24, kl_batch_size=2)
    # one token of prompt and 21 of completion; the second prompt leaves less room
    assert [len(example.sequence.input_ids) for example in examples] == [22, 24]
    kl = examples[0].kl_sequence
    # all of the other's completion stands behind this prompt, not only what was left of it behind its own
    assert kl is not None and len(kl.input_ids) == 22 and kl.score_from == 1


def test_steps_end_on_the_separators_last_token(tokenizer):
    steps = ("mary went to shed .", "so she is there", "it is shed .")
    [example] = StepDataset(
        [StepwiseRecord("where ?\n", steps, (1.0, 0.5, 0.0))], tokenizer, step_separator="\n\n"
    )
    assert isinstance(example, StepExample)
    ids = list(example.sequence.input_ids)
    assert tokenizer.decode(ids) == "where ?\n" + "".join(f"{step}\n\n" for step in steps)
    assert example.labels == (1.0, 0.5, 0.0) and example.step_ends[-1] == len(ids) - 1
    for i, end in enumerate(example.step_ends):
        assert tokenizer.decode(ids[: end + 1]).endswith(f"{steps[i]}\n\n")
    assert example.sequence.score_from == len(tokenizer("where ?\n")["input_ids"])


@pytest.mark.parametrize(
    ("steps", "warned"), [(("a\nb", "c"), 1), (("a\n", "\nc"), 0), (("a b", "c"), 0), (("a\nb", "c\nd"), 1)]
)
def test_a_step_that_would_be_split_is_warned_of_once(tokenizer, steps, warned, caplog):
    with caplog.at_level(logging.WARNING):
        list(StepDataset([StepwiseRecord("where ?\n", steps, (1.0, 0.0))] * 3, tokenizer))
    assert len([each for each in caplog.records if "step_separator" in each.getMessage()]) == warned


def test_steps_behind_max_length_are_left_out(tokenizer):
    record = StepwiseRecord("where ?", ("mary went to shed .", "it is shed ."), (1.0, 0.0))
    [whole] = StepDataset([record], tokenizer)
    assert isinstance(whole, StepExample)
    [cut] = StepDataset([record], tokenizer, max_length=len(whole.sequence.input_ids) - 1)
    assert isinstance(cut, StepExample)
    assert cut.labels == (1.0,) and cut.step_ends == whole.step_ends[:1]
    assert len(cut.sequence.input_ids) == whole.step_ends[0] + 1
    with raises_error("no_row_left"):
        StepDataset([record], tokenizer, max_length=5)


def test_pairs_of_solutions(tokenizer):
    record = StepPairRecord("where ?", ("shed", "so shed"), ("hall",), (), (0.0,))
    [pair] = StepDataset([record], tokenizer)
    assert isinstance(pair, StepPair)
    assert [len(solution.step_ends) for solution in (pair.chosen, pair.rejected)] == [2, 1]
    assert pair.chosen.labels == () and pair.rejected.labels == (0.0,)


def test_prompts_with_their_columns(with_template):
    tokenizer = with_template("plain")
    records = [PromptRecord("where ?", {"answer": 3}), PromptRecord(_TALK[:1]), PromptRecord("x" * 60)]
    examples = GRPODataset(records, tokenizer, max_prompt_length=40)
    assert len(examples) == 2 and examples.dropped == 1
    assert tokenizer.decode(examples[0].prompt_ids) == "where ?" and examples[0].columns == {"answer": 3}
    assert tokenizer.decode(examples[1].prompt_ids).endswith("<|assistant|>")


@pytest.mark.parametrize(
    ("make", "settings", "key"),
    [
        (SFTDataset, {"max_length": 1}, "max_length"),
        (StepDataset, {"step_separator": ""}, "step_separator"),
        (KTODataset, {"kl_batch_size": 1}, "kl_batch_size"),
        (PreferenceDataset, {"overlong": "cut"}, "overlong"),
        (SFTDataset, {"on_bad_row": "warn"}, "on_bad_row"),
    ],
)
def test_wrong_settings(tokenizer, make, settings, key):
    with raises_error("invalid_value", key=key):
        make([TextRecord("a")], tokenizer, **settings)


def test_examples_are_scored_from_plain_sequences(tokenizer):
    [example] = SFTDataset([TextRecord("mary")], tokenizer)
    assert example == TokenSequence(tokenizer("mary<eos>")["input_ids"], 0, None)
