from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from raises import raises_error
from rlhf_merge.errors import MergeError
from rlhf_merge.files.small_files import TokenTable
from rlhf_merge.tensors import Readable
from rlhf_merge.vocab.aligned import AlignedTensor, aligned
from rlhf_merge.vocab.union import Alignment, ModelVocab, align, is_vocabulary_tensor, vocabulary_rows

EMBEDDING = "model.embed_tokens.weight"


class Stored:
    """A tensor in memory that notes which elements are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.row_length = 1
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        self.reads.append((start, stop))
        out.copy_(self.tensor.flatten()[start:stop])


def added_token(i: int, text: str, **flags: bool) -> dict[str, Any]:
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": text, **base, **flags}


def vocab(
    label: str, rows: int, tokens: Sequence[str], added: Sequence[str] = (), fast: bool = True
) -> ModelVocab:
    """A vocabulary of regular tokens, and added ones behind them."""
    ids = {text: i for i, text in enumerate([*tokens, *added])}
    return ModelVocab(
        label, rows, TokenTable(ids, {text: added_token(ids[text], text) for text in added}, fast)
    )


def rows_of(tensor: Readable, alignment: Alignment) -> torch.Tensor:
    out = torch.empty(torch.Size(tensor.shape), dtype=torch.float32).flatten()
    tensor.read(0, out.numel(), out)
    assert tensor.shape[0] == alignment.rows
    return out.view(tensor.shape)


def indexes(alignment: Alignment) -> list[list[int] | None]:
    return [None if index is None else index.tolist() for index in alignment.indexes]


# The base has tokens a b and two rows of padding; A added <x> and B added <y> and <x> in its place.
BASE = vocab("base", 4, ["a", "b"])
A = vocab("A", 3, ["a", "b"], ["<x>"])
B = vocab("B", 4, ["a", "b"], ["<y>", "<x>"])


def test_union_appends_the_added_tokens_in_the_order_of_the_models():
    alignment = align("union", [BASE, A, B], 0, tensor=EMBEDDING)
    assert alignment.rows == 4
    assert [(token["id"], token["content"]) for token in alignment.added] == [(2, "<x>"), (3, "<y>")]
    # Output tokens a b <x> <y>; the base's rows 2 and 3 are padding, not <x> and <y>.
    assert indexes(alignment) == [[0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 3, 2]]
    assert alignment.tokenizer == 0


def test_union_fills_rows_from_the_models_that_have_the_token():
    base = torch.tensor([[1.0], [2.0], [90.0], [91.0]])
    a = torch.tensor([[10.0], [20.0], [30.0]])
    b = torch.tensor([[100.0], [200.0], [300.0], [400.0]])
    alignment = align("union", [BASE, A, B], 0, tensor=EMBEDDING)
    stored = [Stored(tensor) for tensor in (base, a, b)]
    views = aligned(EMBEDDING, stored, [BASE, A, B], alignment, 0)
    # <x> (row 2): 30 in A, 400 in B, so (30 + 400) / 2 in the base; <y> (row 3): 300, from B alone.
    golden = [[1, 2, 215, 300], [10, 20, 30, 300], [100, 200, 400, 300]]
    read = [rows_of(view, alignment).flatten().tolist() for view in views if view is not None]
    assert read == golden


def test_union_keeps_padding_and_takes_the_base_rows_of_the_padding_that_others_lack():
    base = vocab("base", 6, ["a", "b"])
    alignment = align("union", [base, A], 0, tensor=EMBEDDING)
    assert alignment.rows == 6
    assert indexes(alignment) == [[0, 1, -1, 3, 4, 5], [0, 1, 2, -1, -1, -1]]
    stored = [Stored(torch.arange(6.0).view(6, 1)), Stored(torch.tensor([[10.0], [11.0], [12.0]]))]
    views = aligned(EMBEDDING, stored, [base, A], alignment, 0)
    assert views[0] is not None and views[1] is not None
    assert rows_of(views[0], alignment).flatten().tolist() == [0, 1, 12, 3, 4, 5]
    assert rows_of(views[1], alignment).flatten().tolist() == [10, 11, 12, 3, 4, 5]


def test_without_a_base_a_row_is_the_mean_of_the_models_that_have_it():
    models = [vocab("A", 2, ["a"], ["<x>"]), vocab("B", 2, ["a"], ["<x>"]), vocab("C", 1, ["a"])]
    alignment = align("union", models, 0, tensor=EMBEDDING)
    stored = [Stored(torch.tensor([[0.0], [value]])) for value in (1.0, 2.0)] + [Stored(torch.zeros(1, 1))]
    assert indexes(alignment)[:2] == [None, None]
    view = aligned(EMBEDDING, stored, models, alignment, None)[2]
    assert view is not None
    assert rows_of(view, alignment).flatten().tolist() == [0.0, 1.5]


def test_a_mean_is_taken_in_float32():
    # 256 + 1 is 256 in bfloat16, so a sum in it would make 256 / 3 of the mean of 256, 1 and 1, 86.
    models = [vocab(label, 2, ["a"], ["<x>"]) for label in "ABC"] + [vocab("D", 1, ["a"])]
    alignment = align("union", models, 0, tensor=EMBEDDING)
    stored = [Stored(torch.tensor([0.0, value], dtype=torch.bfloat16)) for value in (256.0, 1.0, 1.0)]
    view = aligned("lm_head.bias", [*stored, Stored(torch.zeros(1))], models, alignment, None)[3]
    assert view is not None
    out = torch.empty(2, dtype=torch.bfloat16)
    view.read(0, 2, out)
    assert out.tolist() == [0, 86]


def test_a_token_without_a_row_is_not_united():
    other = vocab("A", 3, ["a", "b"], ["<x>", "<z>"])
    alignment = align("union", [BASE, other], 0, tensor=EMBEDDING)
    assert [token["content"] for token in alignment.added] == ["<x>"]


def test_rows_that_no_model_has_are_zero():
    # <x> is the reference's token 2, but neither of the models has a row for it.
    models = [vocab("A", 2, ["a", "b"], ["<x>"]), vocab("B", 2, ["a", "b"])]
    alignment = align("union", models, 0, tensor=EMBEDDING)
    assert indexes(alignment) == [[0, 1, -1], [0, 1, -1]]
    stored = [Stored(torch.ones(2, 2)), Stored(torch.ones(2, 2))]
    for view in aligned(EMBEDDING, stored, models, alignment, 0):
        assert view is not None
        assert rows_of(view, alignment).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_rows_follow_their_tokens():
    # Against a naive loop over tokens: every model has its own order and lacks other tokens.
    generator = np.random.default_rng(0)
    words = [f"w{i}" for i in range(40)]
    chosen = [generator.permutation(words)[:size].tolist() for size in (40, 25, 30)]
    models = [vocab(f"m{i}", len(tokens), tokens) for i, tokens in enumerate(chosen)]
    stored = [Stored(torch.from_numpy(generator.standard_normal((len(tokens), 3)))) for tokens in chosen]
    alignment = align("base", models, 0, tensor=EMBEDDING)
    for base in (0, None):
        views = aligned(EMBEDDING, stored, models, alignment, base)
        for i, view in enumerate(views):
            assert view is not None
            out = torch.empty(120, dtype=torch.float64)
            view.read(0, 120, out)
            for row, word in enumerate(chosen[0]):
                has = [j for j in range(3) if word in chosen[j]]
                # Model 0, the base, has all tokens; without a base, the mean of all that have it.
                donors = [i] if i in has else [0] if base == 0 else has
                rows = [stored[j].tensor[chosen[j].index(word)] for j in donors]
                assert torch.allclose(out.view(40, 3)[row], torch.stack(rows).mean(0), rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_pieces_make_the_same_tensor_as_one_read(rows: int):
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 3, 4)
    stored = [Stored(torch.randn(size, 3, generator=generator)) for size in sizes]
    alignment = align("union", [BASE, A, B], 0, tensor=EMBEDDING)
    for view in aligned(EMBEDDING, stored, [BASE, A, B], alignment, 0):
        assert view is not None
        assert view.row_length == 3
        pieces = []
        for start in range(0, 12, 3 * rows):
            piece = torch.empty(min(3 * rows, 12 - start))
            view.read(start, start + len(piece), piece)
            pieces.append(piece)
        assert torch.equal(torch.cat(pieces), rows_of(view, alignment).flatten())


def test_rows_in_one_run_are_one_read():
    stored = Stored(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)))
    other = Stored(torch.zeros(900, 4))
    models = [ModelVocab("big", 1000, None), ModelVocab("small", 900, None)]
    alignment = align("truncate", models, 0, tensor=EMBEDDING)
    view = aligned(EMBEDDING, [stored, other], models, alignment, None)[0]
    assert view is not None
    out = torch.empty(2000)
    view.read(400, 2400, out)
    assert stored.reads == [(400, 2400)]
    assert torch.equal(out, stored.tensor.flatten()[400:2400])


def test_a_bias_is_aligned_element_by_element():
    alignment = align("union", [BASE, A, B], 0, tensor=EMBEDDING)
    stored = [Stored(torch.arange(4.0)), Stored(torch.arange(10.0, 13.0)), Stored(torch.arange(20.0, 24.0))]
    view = aligned("lm_head.bias", stored, [BASE, A, B], alignment, 0)[2]
    assert view is not None and view.row_length == 1 and view.shape == (4,)
    assert rows_of(view, alignment).tolist() == [20, 21, 23, 22]


def test_a_model_that_needs_no_change_and_one_without_the_tensor_are_left_alone():
    base = vocab("base", 3, ["a", "b"], ["<x>"])
    other = vocab("B", 3, ["b", "a"], ["<x>"])
    third = vocab("C", 3, ["b", "a"], ["<x>"])
    alignment = align("base", [base, other, third], 0, tensor=EMBEDDING)
    assert indexes(alignment) == [None, [1, 0, 2], [1, 0, 2]]
    stored = Stored(torch.zeros(3, 1))
    views = aligned(
        "lm_head.weight", [stored, None, Stored(torch.ones(3, 1))], [base, other, third], alignment, 0
    )
    assert views[0] is stored
    assert views[1] is None
    assert isinstance(views[2], AlignedTensor)


def test_tensors_of_another_width_are_refused():
    alignment = align("union", [BASE, A], 0, tensor=EMBEDDING)
    stored = [Stored(torch.zeros(4, 2)), Stored(torch.zeros(3, 5))]
    with raises_error("different_shapes", tensor="model.embed_tokens.weight"):
        aligned(EMBEDDING, stored, [BASE, A], alignment, 0)


def test_vocabularies_that_agree_are_left_as_they_are():
    models = [vocab("A", 4, ["a", "b"]), vocab("B", 4, ["a", "b"], ["<x>"]), ModelVocab("C", 4, None)]
    alignment = align(None, models, 1, tensor=EMBEDDING)
    # A has no token 2, so B's <x> contradicts nothing.
    assert alignment == Alignment(4, (None, None, None), 1)


def test_truncate_takes_the_first_rows_and_the_smallest_models_tokenizer():
    models = [BASE, ModelVocab("A", 2, None), vocab("B", 2, ["a", "b"]), vocab("C", 2, ["a", "b"])]
    alignment = align("truncate", models, 0, tensor=EMBEDDING)
    assert alignment.rows == 2
    assert indexes(alignment) == [[0, 1], None, None, None]
    assert alignment.tokenizer == 2
    assert align("truncate", models, 3, tensor=EMBEDDING).tokenizer == 3


def test_truncate_compares_the_tokens_below_the_cut_only():
    base = vocab("base", 3, ["a", "b", "c"])
    assert align("truncate", [base, vocab("A", 2, ["a", "b", "z"])], 0, tensor=EMBEDDING).rows == 2
    with raises_error("different_tokens", token_id=1):
        align("truncate", [base, vocab("A", 2, ["a", "z"])], 0, tensor=EMBEDDING)


@pytest.mark.parametrize(("mode", "target"), [("base", 0), ("A", 1)])
def test_the_tokens_of_one_model_may_be_chosen(mode: str, target: int):
    models = [vocab("base", 4, ["a", "b", "c"]), vocab("A", 3, ["c", "a", "d"])]
    alignment = align(mode, models, 0, tensor=EMBEDDING)
    # Base: a b c and a row of padding that A, with three rows, lacks; b is not in A, d not in the base.
    expected = [[None, [1, -1, 0, -1]], [[2, 0, -1], None]][target]
    assert (alignment.rows, alignment.tokenizer) == (models[target].rows, target)
    assert indexes(alignment) == expected


def test_padding_does_not_take_the_row_of_a_token_that_the_result_lacks():
    # Row 2 is padding in the base and <x> in A.
    assert indexes(align("base", [BASE, A], 0, tensor=EMBEDDING)) == [None, [0, 1, -1, -1]]


def test_united_tokens_are_in_the_order_of_their_ids_whatever_the_order_of_the_file():
    flags = {text: added_token(i, text) for text, i in (("<y>", 3), ("<x>", 2))}
    other = ModelVocab("A", 4, TokenTable({"<y>": 3, "<x>": 2, "a": 0, "b": 1}, flags))
    alignment = align("union", [BASE, other], 0, tensor=EMBEDDING)
    assert [token["content"] for token in alignment.added] == ["<x>", "<y>"]


def test_a_model_without_a_tokenizer_has_the_reference_tokens():
    alignment = align("union", [BASE, A, ModelVocab("C", 4, None)], 0, tensor=EMBEDDING)
    assert indexes(alignment)[2] == indexes(alignment)[0]


def test_the_union_is_the_same_whatever_the_order_of_the_other_models():
    forth = align("union", [BASE, A, B], 0, tensor=EMBEDDING)
    back = align("union", [BASE, B, A], 0, tensor=EMBEDDING)
    assert {token["content"] for token in forth.added} == {token["content"] for token in back.added}
    assert forth.rows == back.rows


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (10, 4), True),
        ("transformer.wte.weight", (10, 4), True),
        ("wte.weight", (10, 4), True),
        ("lm_head.bias", (10,), True),
        ("model.language_model.embed_tokens.weight", (10, 4), True),
        ("model.embed_tokens.weight", (11, 4), False),
        ("model.layers.0.self_attn.q_proj.weight", (10, 4), False),
        ("my_lm_head.weight", (10, 4), False),
    ],
)
def test_vocabulary_tensors_are_found_by_name_and_rows(name: str, shape: tuple[int, ...], expected: bool):
    assert is_vocabulary_tensor(name, shape, 10) is expected
    assert not is_vocabulary_tensor(name, shape, None)


def test_the_rows_are_those_of_the_input_embedding():
    tensors = {
        "lm_head.weight": Stored(torch.zeros(9, 2)),
        "model.position_embeddings.weight": Stored(torch.zeros(8, 2)),
        "model.embed_tokens.weight": Stored(torch.zeros(7, 2)),
    }
    assert vocabulary_rows(tensors) == 7
    assert vocabulary_rows({"encoder.weight": Stored(torch.zeros(3, 3))}) is None


def test_a_union_is_not_advised_where_a_tokenizer_is_missing():
    for tokens in (None, TokenTable({"a": 0, "b": 1}, fast=False)):
        models = [ModelVocab("base", 2, tokens), ModelVocab("A", 3, TokenTable({"a": 0, "b": 1, "c": 2}))]
        with pytest.raises(MergeError) as caught:
            align(None, models, 0, tensor="w")
        assert "--vocab truncate (the first 2" in str(caught.value) and "union" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "models", "code"),
    [
        (None, [BASE, A], "different_row_counts"),
        (
            None,
            [ModelVocab("base", 3, None), vocab("A", 3, ["a", "b", "c"]), vocab("B", 3, ["a", "c", "b"])],
            "different_tokens",
        ),
        ("Z", [BASE, A], "invalid_value"),
        ("union", [BASE, vocab("A", 4, ["a", "x", "y"], ["<s>"])], "different_tokenizers"),
        ("union", [vocab("base", 4, ["a", "b"], fast=False), A], "tokenizer_not_fast"),
        ("union", [ModelVocab("base", 8, TokenTable({"a": 0, "b": 7})), A], "token_ids_not_contiguous"),
        ("union", [BASE, A, ModelVocab("C", 5, None)], "missing_tokenizer"),
        ("base", [ModelVocab("C", 4, None), A], "missing_tokenizer"),
    ],
)
def test_vocabularies_that_do_not_go_together(mode: str | None, models: list[ModelVocab], code: str):
    with raises_error(code):
        align(mode, models, 0, tensor=EMBEDDING)
