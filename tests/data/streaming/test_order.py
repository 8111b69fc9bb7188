"""The order of rows: a permutation, the same for any number of processes and threads, taken up anywhere."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_data import DatasetMixture, RecordStream, StreamingSFTDataset, UserError, read_ahead
from rlhf_data.streaming.order import BlockOrder, Permutation, windows_of


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers())
def test_a_permutation_has_each_number_once(size, key):
    assert sorted(Permutation(size, (key,))(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.slow
def test_permutations_of_a_small_set_are_all_about_as_frequent():
    # 24 orders of 4 numbers under 4800 keys: 200 each, standard deviation 13.8; chi-squared of 23 degrees of
    # freedom is below 49.7 in 999 of 1000 draws.
    found = [tuple(Permutation(4, ("key", key))(np.arange(4)).tolist()) for key in range(4800)]
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 200) ** 2 / 200).sum() < 49.7


def test_positions_and_what_comes_there_are_uncorrelated():
    # Of 10,000 numbers the correlation has standard deviation 0.01.
    numbers = np.arange(10_000)
    for key in range(5):
        shuffled = Permutation(10_000, (key,))(numbers)
        assert abs(np.corrcoef(numbers, shuffled)[0, 1]) < 0.04
        assert abs(np.corrcoef(shuffled[1:], shuffled[:-1])[0, 1]) < 0.04


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    st.integers(1, 400),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_an_epoch_has_each_row_once_whatever_the_blocks(rows, window, seed, epoch):
    starts = np.cumsum([0, *rows])
    order = BlockOrder(starts, np.array(rows) * 10, window=window, seed=seed, epoch=epoch)
    whole = order[:]
    assert sorted(whole) == list(range(sum(rows)))
    assert [order[position] for position in range(len(order))] == whole
    assert order[3:11:2] == whole[3:11:2] and order[-1] == whole[-1]


def test_orders_differ_by_seed_and_epoch_and_stay_within_windows():
    starts = np.arange(0, 6401, 100)
    weights = np.full(64, 100)
    orders = [BlockOrder(starts, weights, window=800, seed=s, epoch=e) for s, e in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(order[:]) for order in orders}) == 3
    # A window is 8 blocks of 100 rows: no more are open at a time, and they come from all over the set.
    for start in range(0, 6400, 800):
        assert len({row // 100 for row in orders[0][start : start + 800]}) == 8
    first = {row // 100 for row in orders[0][:800]}
    assert max(first) - min(first) > 20
    assert BlockOrder(starts, weights, window=800, seed=None, epoch=0)[5:9] == [5, 6, 7, 8]


def test_windows_end_with_the_block_that_fills_them():
    assert windows_of(np.array([3, 3, 3, 3]), window=6).tolist() == [0, 2, 4]
    assert windows_of(np.array([3, 3]), window=100).tolist() == [0, 2]
    assert windows_of(np.array([50, 1, 1]), window=10).tolist() == [0, 1, 3]


ROWS = 67


@pytest.fixture(scope="module")
def stream(tmp_path_factory, byte_tokenizer):
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for shard in range(3):
            rows = range(shard, ROWS, 3)
            text = "".join(json.dumps({"prompt": f"{i}", "completion": " x"}) + "\n" for i in rows)
            (folder / f"{shard}.jsonl").write_text(text)
        yield StreamingSFTDataset(RecordStream(folder, "sft", window=300), byte_tokenizer)


def _texts(tokenizer, examples):
    return [tokenizer.decode(example.input_ids) for example in examples]


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 9),
    kills=st.lists(st.integers(0, 20), max_size=3),
    worlds=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    workers=st.integers(0, 2),
    epoch=st.integers(0, 2),
)
def test_killed_anywhere_and_resumed_on_other_processes_each_row_comes_once_in_the_same_order(
    stream, byte_tokenizer, size, kills, worlds, workers, epoch
):
    whole = [each for _, step in stream.steps(size, seed=5, epoch=epoch) for each in step]
    assert len(set(_texts(byte_tokenizer, whole))) == len(whole) == ROWS

    position, seen = 0, []
    for world, steps in zip(worlds, [*kills, None], strict=False):
        ranks = [
            stream.steps(
                size, seed=5, epoch=epoch, position=position, rank=rank, world_size=world, workers=workers
            )
            for rank in range(world)
        ]
        for parts in islice(zip(*ranks, strict=True), steps):
            merged = [None] * sum(len(part) for _, part in parts)
            for rank, (_, part) in enumerate(parts):
                merged[rank::world] = part
            seen += merged
            position += size
        for rank in ranks:
            rank.close()
    assert seen == whole


def test_a_shuffled_stream_of_datasets_loses_and_repeats_rows_when_it_is_resumed(tmp_path):
    """What the order above avoids: a buffer whose content is no part of the state."""
    datasets = pytest.importorskip("datasets")
    rows = [{"row": i} for i in range(1000)]

    def fresh():
        made = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
        return made.shuffle(seed=0, buffer_size=100)

    first = fresh()
    seen = [row["row"] for row in islice(first, 300)]
    state = first.state_dict()
    again = fresh()
    again.load_state_dict(state)
    seen += [row["row"] for row in again]
    lost, repeated = 1000 - len(set(seen)), len(seen) - len(set(seen))
    assert lost + repeated > 50


def _mixture(tmp_path, weights, sizes=(40, 10)):
    streams = []
    for name, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(size)))
        streams.append((RecordStream(path, "sft"), weight))
    return DatasetMixture(streams)


def _mixed(mixture, epoch, seed=1):
    return [record.text for (record,) in mixture.read(mixture.order(epoch, seed=seed)[:])]


def test_a_mixture_takes_its_shares_and_repeats_no_row_before_all_have_come(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mixture = _mixture(tmp_path, (1, 1))
    texts = [text for epoch in range(4) for text in _mixed(mixture, epoch)]
    assert len(mixture) == 50 and len(texts) == 200
    for start in range(0, 200, 20):
        assert sum(text.startswith("0") for text in texts[start : start + 20]) == 10
    for name, size in (("0", 40), ("1", 10)):
        own = [text for text in texts if text.startswith(f"{name} ")]
        passes = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(len(set(each)) == size for each in passes) and passes[0] != passes[1]
    # It goes on from an epoch and a position.
    assert (
        _mixed(mixture, 2) == texts[100:150] and mixture.order(2, seed=1)[7] == mixture.order(2, seed=1)[:][7]
    )


@pytest.mark.parametrize("weights", [(3, 1), (0.9, 0.1), (999_999, 1)])
def test_weights_are_kept_to_a_thousandth(tmp_path, monkeypatch, weights):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mixture = _mixture(tmp_path, weights, (500, 500))
    share = sum(text.startswith("0") for text in _mixed(mixture, 0)) / 1000
    assert abs(share - weights[0] / sum(weights)) <= 0.001


def test_what_is_read_ahead_comes_in_order_and_errors_come_at_their_place():
    def read(number):
        if number == 5:
            raise UserError("five", code="fifth")
        return -number

    found = read_ahead(read, range(9), workers=2)
    assert list(islice(found, 5)) == [0, -1, -2, -3, -4]
    with raises_error("fifth"):
        next(found)
