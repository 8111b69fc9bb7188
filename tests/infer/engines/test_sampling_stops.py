"""Stop texts: found at the token that completes them, whatever the tokenizer does with spaces and bytes."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_infer import SamplingParams
from rlhf_infer.engines.stop_strings import StopTexts, completion_text, until_stop
from rlhf_models import train_byte_tokenizer

TEXT = "the naïve café ☕ stops here 🙂🙂 stop.\n\nStop: 日本語 the end\n"


def byte_tokenizer() -> Any:
    return train_byte_tokenizer([TEXT, "the stop ☕ café"] * 3, 300)


def space_tokenizer() -> Any:
    """As Llama's: words carry their space before them, unknown characters become bytes."""
    words = ["<unk>", "▁", "▁the", "▁stop", "▁st", "op", "s", "▁here", "t", "o", "p", ".", "h", "e", "r"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def found(stops: StopTexts, prompt: list[int], ids: list[int], least: int = 1) -> int | None:
    """Tokens after which a stop text is found, as the engine asks: each token in turn."""
    ends = (n for n in range(least, len(ids) + 1) if stops.end(prompt, ids[:n]))
    return next(ends, None)


def naive(tokenizer: Any, texts: list[str], prompt: list[int], ids: list[int]) -> int | None:
    """The same by decoding everything anew."""
    skip = len(tokenizer.decode(prompt))
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(prompt + ids[:n], clean_up_tokenization_spaces=False)[skip:]
        if any(stop in text for stop in texts):
            return n
    return None


@pytest.mark.parametrize("make", [byte_tokenizer, space_tokenizer])
def test_found_where_decoding_everything_finds_it(make: Any) -> None:
    tokenizer, rng = make(), random.Random(0)
    prompt = tokenizer.encode("the stop", add_special_tokens=False)
    texts = ["stop", " stop", "ops", "é", "☕ s", "🙂🙂", "\n\n", "本", ". ", "the end", "here", " "]
    hits = 0
    for _ in range(300):
        words = rng.choices([*TEXT.split(" "), "stop", "st", "op", "ops"], k=8)
        ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
        if rng.random() < 0.5:  # as a model that is not sure: other tokens between, broken characters too
            others = tokenizer.encode("the stop here", add_special_tokens=False)
            others = [*others, *range(3, 260)] if make is byte_tokenizer else others
            ids = [i if rng.random() < 0.9 else rng.choice(others) for i in ids]
        chosen = rng.sample(texts, 2)
        expected = naive(tokenizer, chosen, prompt, ids)
        assert found(StopTexts(tokenizer, chosen), prompt, ids) == expected, (chosen, ids)
        hits += expected is not None
    assert 100 < hits < 300


def test_a_text_that_was_there_before_does_not_count_again() -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.encode(c)[0] for c in "stop, go stop"]  # one token a character
    stops = StopTexts(tokenizer, ["stop"])
    assert found(stops, [], ids) == 4
    assert found(stops, [], ids, least=5) == 13
    assert stops.end([], ids[:4]) and not stops.end([], ids[:5])


def test_a_special_token_is_no_text_unless_the_stop_text_spells_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    n, d = (tokenizer.encode(c)[0] for c in "nd")
    assert found(StopTexts(tokenizer, ["nd"]), [], [n, end, end]) is None
    assert found(StopTexts(tokenizer, ["nd"]), [], [end, n, end, d]) == 4  # as the text without it reads
    assert found(StopTexts(tokenizer, ["<|end|>"]), [], [n, d, end]) == 3


def test_only_the_end_is_decoded() -> None:
    tokenizer, lengths = byte_tokenizer(), []

    class Recording:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer.encode("xyz" * 200)
    stops = StopTexts(Recording(), ["stop"])
    assert found(stops, ids, ids) is None
    assert max(lengths) == 2 and len(lengths) <= 2 * len(set(ids))  # each token looked at once
    # "stop" spans four tokens at most, and one before them is read along; the text before it needs no more.
    assert found(stops, ids, ids + tokenizer.encode("stop")) == len(ids) + len(tokenizer.encode("stop"))
    assert max(lengths) == 5


def test_a_completion_is_cut_at_the_stop_text_that_ended_it() -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.encode(c)[0] for c in "stop, go stop on"]  # one token a character
    for least, expected in ((0, ""), (3, ""), (4, "stop, go "), (12, "stop, go "), (13, "stop, go stop on")):
        params = SamplingParams(40, stop=("stop", "zzz"), min_new_tokens=least)
        assert completion_text(tokenizer, ids, params) == expected, least
    assert completion_text(tokenizer, ids, SamplingParams(40)) == "stop, go stop on"
    smile = tokenizer.encode(
        "☕☕"
    )  # a character of several tokens that is cut in two counts as not there yet
    params = SamplingParams(40, stop=("☕",), min_new_tokens=len(smile) // 2 - 1)
    assert completion_text(tokenizer, smile, params) == ""


def test_the_first_of_the_stop_texts_counts() -> None:
    assert until_stop("one two three", ["three", "two"]) == "one "
    assert until_stop("one", ["two"]) == until_stop("one", []) == "one"
    assert until_stop("aaa", ["aa"], 2) == "a"  # one that begins before may end behind
    assert until_stop("xabc", ["abc", "b"]) == "xa"  # character by character b would be complete first
