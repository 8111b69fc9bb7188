"""Prefix trees: every sequence can be read back, prefixes are stored once, budgets are kept."""

import dataclasses
import random

import pytest

from rlhf_data import PackedBatch, TokenSequence, pack


def segment_path(batch: PackedBatch, position: int) -> list[int]:
    """Stream positions a token may see, found by walking up from its segment."""
    starts, lengths = batch.segment_start.tolist(), batch.segment_length.tolist()
    segment = next(
        s
        for s, (start, length) in enumerate(zip(starts, lengths, strict=True))
        if start <= position < start + length
    )
    path = list(range(starts[segment], position + 1))
    while (segment := int(batch.segment_parent[segment])) >= 0:
        path = list(range(starts[segment], starts[segment] + lengths[segment])) + path
    return path


def random_sequences(seed: int) -> list[TokenSequence]:
    rng = random.Random(seed)
    known: list[list[int]] = [[rng.randrange(3)]]
    for _ in range(30):
        stem = rng.choice(known)
        known.append(stem[: rng.randint(1, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(0, 6))])
    return [TokenSequence(ids, rng.randint(0, len(ids))) for ids in known]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_tokens", [None, 1, 12, 40])
def test_every_sequence_reads_back(seed: int, max_tokens: int | None) -> None:
    sequences = random_sequences(seed)
    seen = []
    for batch in pack(sequences, max_tokens):
        for q, i in enumerate(batch.sequence_ids.tolist()):
            path = segment_path(batch, int(batch.last_positions[q]))
            assert batch.path(q).tolist() == path
            assert batch.input_ids[path].tolist() == list(sequences[i].input_ids)
            assert batch.position_ids[path].tolist() == list(range(len(path)))
            first = max(sequences[i].score_from, 1)
            mine = batch.score_sequence == q
            assert batch.score_positions[mine].tolist() == path[first - 1 : -1]
            assert batch.score_targets[mine].tolist() == list(sequences[i].input_ids[first:])
            seen.append(i)
    assert sorted(seen) == list(range(len(sequences)))


@pytest.mark.parametrize("seed", range(5))
def test_shared_tokens_are_stored_once(seed: int) -> None:
    sequences = random_sequences(seed)
    prefixes = {tuple(s.input_ids[: n + 1]) for s in sequences for n in range(len(s.input_ids))}
    (batch,) = pack(sequences)
    assert batch.num_tokens == len(prefixes)


def test_segments_are_in_preorder_and_parents_come_first() -> None:
    # a b c | a b d e | a b d f : [a b] -> [c], [d] -> [e], [f]
    (batch,) = pack([TokenSequence(list(ids), 2) for ids in ((1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6))])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.position_ids.tolist() == [0, 1, 2, 2, 3, 3]
    assert batch.segment_start.tolist() == [0, 2, 3, 4, 5]
    assert batch.segment_parent.tolist() == [-1, 0, 0, 2, 2]
    assert batch.score_positions.tolist() == [1, 1, 3, 1, 3]
    assert batch.score_targets.tolist() == [3, 4, 5, 4, 6]
    assert batch.score_sequence.tolist() == [0, 1, 1, 2, 2]
    assert batch.last_positions.tolist() == [2, 4, 5]


def test_budget_is_kept_unless_one_sequence_is_longer() -> None:
    sequences = random_sequences(7)
    for batch in pack(sequences, 9):
        assert batch.num_tokens <= 9 or batch.num_sequences == 1


def test_groups_stay_together_where_that_takes_no_further_batch() -> None:
    """Four prompts of 5 tokens with four completions of 2 each, 13 tokens together.

    A batch of 33 that is filled up takes two groups, and of the third its prompt and a completion: then the
    next batch has to repeat that prompt.
    """
    groups = [[TokenSequence([p] * 5 + [10 + c] * 2, 5) for c in range(4)] for p in range(4)]
    sequences = [each for group in groups for each in group]
    assert [batch.num_tokens for batch in pack(sequences, 33)] == [26, 26]
    assert [batch.num_tokens for batch in pack(sequences, 26)] == [26, 26]
    # three batches are fewest for 25, so that prompts must be repeated: 13 + 5 + 3 * 2 is the most for one
    sizes = [batch.num_tokens for batch in pack(sequences, 25)]
    assert len(sizes) == 3 and sum(sizes) == 4 * 13 + 5


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [4, 9, 15, 33])
def test_there_are_as_few_batches_as_if_each_was_filled_up_and_no_more_tokens(seed: int, budget: int) -> None:
    ids = sorted(list(each.input_ids) for each in random_sequences(seed))
    filled: list[int] = []
    for before, now in zip([[], *ids], ids, strict=False):
        shared = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
        new = len(now) - (min(len(before), len(now)) if shared is None else shared)
        if filled and filled[-1] + new <= budget:
            filled[-1] += new
        else:
            filled.append(len(now))
    sizes = [batch.num_tokens for batch in pack([TokenSequence(each, len(each)) for each in ids], budget)]
    assert len(sizes) == len(filled) and sum(sizes) <= sum(filled)


@pytest.mark.parametrize(
    ("sequence", "message"), [(TokenSequence([], 0), "0 tokens"), (TokenSequence([1], 2), "score_from 2")]
)
def test_bad_sequences_are_refused(sequence: TokenSequence, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([TokenSequence([1, 2], 1), sequence])


def test_bad_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        pack([TokenSequence([1], 1)], 0)


def test_score_mask_scores_the_marked_tokens_only():
    masked = TokenSequence([5, 6, 7, 8, 9], 1, [True, False, True, False, True])
    whole = TokenSequence([5, 6, 7, 3], 2)
    (batch,) = pack([masked, whole])
    # Token 0 is never scored; the marked tokens 2 and 4 are predicted from the tokens before them.
    entries = zip(batch.score_sequence.tolist(), batch.score_targets.tolist(), strict=True)
    assert list(entries) == [(0, 7), (0, 9), (1, 7), (1, 3)]
    assert batch.position_ids[batch.score_positions].tolist() == [1, 3, 1, 2]


def test_score_mask_must_cover_every_token():
    with pytest.raises(ValueError, match="score_mask"):
        pack([TokenSequence([1, 2, 3], 1, [True, False])])


def test_a_batch_on_a_device_keeps_its_host_tables():
    """Nothing can be read back from the device `meta`, as nothing is to be read back from a GPU."""
    (batch,) = pack([TokenSequence([1, 2, 3], 1), TokenSequence([1, 2, 4], 2)])
    assert batch.to("cpu") is batch and batch.host is batch
    moved = batch.to("meta")
    assert moved.host is batch and moved.to("meta") is moved
    for field in dataclasses.fields(batch):
        mine, other = getattr(moved, field.name), getattr(batch, field.name)
        assert mine.device.type == "meta" and (mine.shape, mine.dtype) == (other.shape, other.dtype)
