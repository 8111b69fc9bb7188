"""The judge behind an API learns neither who wrote what nor the order in which it was asked about."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlhf_infer import PromptedJudge
from rlhf_infer.judges.settings import FENCED_TEMPLATE, fill

CRITIQUES = [f"c{i:02}" for i in range(20)]


def sent(fake: Any, *batches: list[str], seed: int = 0) -> list[list[str]]:
    """The critiques of each batch in the order in which they were sent."""
    with fake.serve(fake.certain) as server:
        api = fake.judge(server, template="{critique}", concurrency=1, seed=seed)
        for batch in batches:
            fake.score(api, *batch)
    texts = iter(server.texts)
    return [list(itertools.islice(texts, len({*batch}))) for batch in batches]


def test_the_order_sent_is_drawn_anew_for_every_batch_and_seed(fake: Any) -> None:
    first, second = sent(fake, CRITIQUES, CRITIQUES)
    (other,) = sent(fake, CRITIQUES, seed=1)
    (again,) = sent(fake, CRITIQUES)
    assert all(sorted(order) == CRITIQUES for order in (first, second, other))
    assert len({tuple(order) for order in (CRITIQUES, first, second, other)}) == 4
    assert again == first


def test_the_order_sent_does_not_depend_on_the_order_given(fake: Any) -> None:
    # Whatever the caller sorts by, labels for instance, the same texts are sent in the same order.
    by_label = CRITIQUES[::2] + CRITIQUES[1::2]
    assert sent(fake, CRITIQUES) == sent(fake, by_label) == sent(fake, CRITIQUES[::-1])


@pytest.mark.slow
def test_labels_cannot_be_told_from_places_in_the_order(fake: Any) -> None:
    # Ten right answers, then ten wrong ones, in 30 batches. Where the order is random, the share of right
    # ones in the first half of a batch has mean 1/2 and variance 1/4 · 10/19 · 1/10 = 1/76; over 30 batches
    # the deviation is sqrt(1 / 76 / 30) = .0209, and four of it are .084.
    batches = [[f"{i}-{label}-{j}" for label in ("right", "wrong") for j in range(10)] for i in range(30)]
    shares = [sum("right" in text for text in order[:10]) / 10 for order in sent(fake, *batches)]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.084)


def test_equal_texts_are_asked_once_and_results_come_in_the_order_given(fake: Any) -> None:
    critiques: list[str | None] = ["true!" if i % 3 else f"c{i % 12}" for i in range(40)]
    with fake.serve(fake.certain) as server:
        scores = fake.score(fake.judge(server, template="{critique}", concurrency=4), *critiques)
    assert len(server.requests) == len({*critiques})
    assert scores == [pytest.approx(0.8 if text == "true!" else 0.2) for text in critiques]


def test_a_request_holds_the_filled_template_and_nothing_else(fake: Any) -> None:
    with fake.serve(fake.certain) as server:
        fake.judge(server).score(["Where?", "Where?"], [" shed .\n", "shed ."], [" so right", None])
    filled = [fill(FENCED_TEMPLATE, "Where?", "shed .", c, no_critique="none") for c in ("so right", None)]
    assert sorted(server.texts) == sorted(filled)
    for request in server.requests:
        [message] = request["body"].pop("messages")
        assert message.keys() == {"role", "content"} and message["role"] == "user"
        assert request["body"] == {
            "model": "m",
            "temperature": 1,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 20,
        }
    plain, other = ({k: v for k, v in r["headers"].items() if k != "Content-Length"} for r in server.requests)
    assert plain == other


def test_blanks_do_not_tell_a_sampled_text_from_a_written_one(lively_model: Any, byte_tokenizer: Any) -> None:
    filled = {
        fill("{answer}|{critique}", "q", a, c, no_critique="-") for a in (" x", "x\n") for c in ("y ", "y")
    }
    assert filled == {"x|y"}
    model = lively_model(vocab_size=len(byte_tokenizer))
    judge = PromptedJudge(model, byte_tokenizer)
    one, other = judge.score(["where?"] * 2, [" shed", "shed "], ["so wrong", " so wrong\n"]).tolist()
    assert one == other
