"""Vocabularies that differ: the rows of the output, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raises import raises_error
from rlhf_merge.files.tokenizer import TokenTable
from rlhf_merge.methods.blocks import MemoryTensor, Readable
from rlhf_merge.run.merger import ModelMerger
from rlhf_merge.run.vocab import Alignment, ModelVocab, align, aligned

EMBEDDING = "model.embed_tokens.weight"


def vocab(
    label: str, rows: int, tokens: Sequence[str], added: Sequence[str] = (), fast: bool = True
) -> ModelVocab:
    """A vocabulary of regular tokens, and added ones behind them."""
    ids = {text: i for i, text in enumerate([*tokens, *added])}
    return ModelVocab(
        label, rows, TokenTable(ids, {text: {"id": ids[text], "content": text} for text in added}, fast)
    )


def rows_of(tensor: Readable | None, dtype: torch.dtype = torch.float32) -> Any:
    """The rows of an aligned tensor; those of one number as that number."""
    assert tensor is not None
    out = torch.empty(torch.Size(tensor.shape), dtype=dtype)
    tensor.read(0, out.numel(), out.view(-1))
    return (out.flatten() if out.numel() == len(out) else out).tolist()


def views(
    tensors: Sequence[Tensor | None], models: Sequence[ModelVocab], alignment: Alignment, base: int | None
) -> Any:
    stored = [None if tensor is None else MemoryTensor(tensor) for tensor in tensors]
    return aligned(EMBEDDING, stored, models, alignment, base)


def indexes(alignment: Alignment) -> list[list[int] | None]:
    return [None if index is None else index.tolist() for index in alignment.indexes]


# The base has tokens a b and two rows of padding; A added <x> and B added <y> and <x> in its place.
BASE = vocab("base", 4, ["a", "b"])
A = vocab("A", 3, ["a", "b"], ["<x>"])
B = vocab("B", 4, ["a", "b"], ["<y>", "<x>"])
UNION = align("union", [BASE, A, B], 0, tensor=EMBEDDING)


def test_union_appends_the_added_tokens_in_the_order_of_the_models() -> None:
    assert (UNION.rows, UNION.tokenizer) == (4, 0)
    assert [(token["id"], token["content"]) for token in UNION.added] == [(2, "<x>"), (3, "<y>")]
    # Output tokens a b <x> <y>; the base's rows 2 and 3 are padding, not <x> and <y>.
    assert indexes(UNION) == [[0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 3, 2]]
    back = align("union", [BASE, B, A], 0, tensor=EMBEDDING)
    assert [token["content"] for token in back.added] == ["<y>", "<x>"] and back.rows == UNION.rows


def test_union_fills_rows_from_the_models_that_have_the_token() -> None:
    base, a, b = (
        torch.tensor([1.0, 2, 90, 91]),
        torch.tensor([10.0, 20, 30]),
        torch.tensor([100.0, 200, 300, 400]),
    )
    # <x> (row 2): 30 in A, 400 in B, so (30 + 400) / 2 in the base; <y> (row 3): 300, from B alone.
    golden = [[1, 2, 215, 300], [10, 20, 30, 300], [100, 200, 400, 300]]
    for shape in ((-1, 1), (-1,)):  # an embedding, and a bias
        found = views([tensor.view(shape) for tensor in (base, a, b)], [BASE, A, B], UNION, 0)
        assert [rows_of(view) for view in found] == golden


def test_union_keeps_padding_and_takes_the_base_rows_of_the_padding_that_others_lack() -> None:
    base = vocab("base", 6, ["a", "b"])
    alignment = align("union", [base, A], 0, tensor=EMBEDDING)
    assert indexes(alignment) == [[0, 1, -1, 3, 4, 5], [0, 1, 2, -1, -1, -1]]
    found = views([torch.arange(6.0), torch.tensor([10.0, 11, 12])], [base, A], alignment, 0)
    assert [rows_of(view) for view in found] == [[0, 1, 12, 3, 4, 5], [10, 11, 12, 3, 4, 5]]


def test_without_a_base_a_row_is_the_mean_in_float32_of_the_models_that_have_it() -> None:
    # 256 + 1 is 256 in bfloat16, so a sum in it would make 256 / 3 of the mean of 256, 1 and 1, 86.
    models = [vocab(label, 2, ["a"], ["<x>"]) for label in "ABC"] + [vocab("D", 1, ["a"])]
    alignment = align("union", models, 0, tensor=EMBEDDING)
    assert indexes(alignment)[:3] == [None] * 3
    stored = [torch.tensor([0, value]).bfloat16() for value in (256.0, 1.0, 1.0)] + [torch.zeros(1)]
    assert rows_of(views(stored, models, alignment, None)[3], torch.bfloat16) == [0, 86]


def test_tokens_and_rows_that_models_lack() -> None:
    other = vocab("A", 3, ["a", "b"], ["<x>", "<z>"])  # <z> has no row
    alignment = align("union", [BASE, other], 0, tensor=EMBEDDING)
    assert [token["content"] for token in alignment.added] == ["<x>"]
    # <x> is the reference's token 2, but neither of the models has a row for it: it is zero.
    models = [vocab("A", 2, ["a", "b"], ["<x>"]), vocab("B", 2, ["a", "b"])]
    alignment = align("union", models, 0, tensor=EMBEDDING)
    assert indexes(alignment) == [[0, 1, -1], [0, 1, -1]]
    for view in views([torch.ones(2, 2), torch.ones(2, 2)], models, alignment, 0):
        assert rows_of(view) == [[1, 1], [1, 1], [0, 0]]


def test_rows_follow_their_tokens() -> None:
    # Against a naive loop over tokens: every model has its own order and lacks other tokens.
    generator = np.random.default_rng(0)
    words = [f"w{i}" for i in range(40)]
    chosen = [generator.permutation(words)[:size].tolist() for size in (40, 25, 30)]
    models = [vocab(f"m{i}", len(tokens), tokens) for i, tokens in enumerate(chosen)]
    stored = [torch.from_numpy(generator.standard_normal((len(tokens), 3))) for tokens in chosen]
    alignment = align("base", models, 0, tensor=EMBEDDING)
    for base in (0, None):
        for i, view in enumerate(views(stored, models, alignment, base)):
            found = rows_of(view, torch.float64)
            for row, word in enumerate(chosen[0]):
                has = [j for j in range(3) if word in chosen[j]]
                # Model 0, the base, has all tokens; without a base, the mean of all that have it.
                donors = [i] if i in has else [0] if base == 0 else has
                rows = torch.stack([stored[j][chosen[j].index(word)] for j in donors])
                assert found[row] == pytest.approx(rows.mean(0).tolist(), rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_pieces_make_the_same_tensor_as_one_read(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = [torch.randn(size, 3, generator=generator) for size in (4, 3, 4)]
    for view in views(stored, [BASE, A, B], UNION, 0):
        assert view.row_length == 3
        out = torch.empty(12)
        for start in range(0, 12, 3 * rows):
            piece = out[start : start + 3 * rows]
            view.read(start, start + len(piece), piece)
        assert out.view(4, 3).tolist() == rows_of(view)


def test_rows_in_one_run_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    models = [ModelVocab("big", 1000, None), ModelVocab("small", 900, None)]
    alignment = align("truncate", models, 0, tensor=EMBEDDING)
    view, out = views([big, torch.zeros(900, 4)], models, alignment, None)[0], torch.empty(2000)
    reads, read = [], MemoryTensor.read

    def noted(self: MemoryTensor, start: int, stop: int, out: Tensor) -> None:
        reads.append((start, stop))
        read(self, start, stop, out)

    monkeypatch.setattr(MemoryTensor, "read", noted)
    view.read(400, 2400, out)
    assert reads == [(400, 2400)] and torch.equal(out, big.flatten()[400:2400])


def test_a_model_that_needs_no_change_and_one_without_the_tensor_are_left_alone() -> None:
    models = [vocab("base", 3, ["a", "b"], ["<x>"]), *(vocab(name, 3, ["b", "a"], ["<x>"]) for name in "BC")]
    alignment = align("base", models, 0, tensor=EMBEDDING)
    assert indexes(alignment) == [None, [1, 0, 2], [1, 0, 2]]
    first = torch.zeros(3, 1)
    found = views([first, None, torch.tensor([[1.0], [2], [3]])], models, alignment, 0)
    assert found[0].tensor is first and found[1] is None and rows_of(found[2]) == [2, 1, 3]


def test_tensors_of_another_width_are_refused() -> None:
    alignment = align("union", [BASE, A], 0, tensor=EMBEDDING)
    with raises_error("different_shapes", tensor=EMBEDDING):
        views([torch.zeros(4, 2), torch.zeros(3, 5)], [BASE, A], alignment, 0)


def test_vocabularies_that_agree_are_left_as_they_are() -> None:
    models = [vocab("A", 4, ["a", "b"]), vocab("B", 4, ["a", "b"], ["<x>"]), ModelVocab("C", 4, None)]
    # A has no token 2, so B's <x> contradicts nothing.
    assert align(None, models, 1, tensor=EMBEDDING) == Alignment(4, (None, None, None), 1)


def test_truncate_takes_the_first_rows_and_the_smallest_models_tokenizer() -> None:
    """Tokens are compared below the cut only."""
    models = [BASE, ModelVocab("A", 2, None), vocab("B", 2, ["a", "b"]), vocab("C", 2, ["a", "b", "z"])]
    alignment = align("truncate", models, 0, tensor=EMBEDDING)
    assert (alignment.rows, alignment.tokenizer) == (2, 2)
    assert indexes(alignment) == [[0, 1], None, None, None]
    assert align("truncate", models, 3, tensor=EMBEDDING).tokenizer == 3


@pytest.mark.parametrize(("mode", "target"), [("base", 0), ("A", 1)])
def test_the_tokens_of_one_model_may_be_chosen(mode: str, target: int) -> None:
    models = [vocab("base", 4, ["a", "b", "c"]), vocab("A", 3, ["c", "a", "d"])]
    alignment = align(mode, models, 0, tensor=EMBEDDING)
    # Base: a b c and a row of padding that A, with three rows, lacks; b is not in A, d not in the base.
    expected = [[None, [1, -1, 0, -1]], [[2, 0, -1], None]][target]
    assert (alignment.rows, alignment.tokenizer) == (models[target].rows, target)
    assert indexes(alignment) == expected
    # Padding does not take the row of a token that the result lacks: row 2 is <x> in A.
    assert indexes(align("base", [BASE, A], 0, tensor=EMBEDDING)) == [None, [0, 1, -1, -1]]


def test_united_tokens_are_in_the_order_of_their_ids_whatever_the_order_of_the_file() -> None:
    flags = {text: {"id": i, "content": text} for text, i in (("<y>", 3), ("<x>", 2))}
    other = ModelVocab("A", 4, TokenTable({"<y>": 3, "<x>": 2, "a": 0, "b": 1}, flags))
    without = ModelVocab("C", 4, None)  # which has the reference's tokens
    alignment = align("union", [BASE, other, without], 0, tensor=EMBEDDING)
    assert [token["content"] for token in alignment.added] == ["<x>", "<y>"]
    assert indexes(alignment)[2] == indexes(alignment)[0]


def test_a_union_is_not_advised_where_a_tokenizer_is_missing() -> None:
    for tokens in (None, TokenTable({"a": 0, "b": 1}, fast=False)):
        models = [ModelVocab("base", 2, tokens), ModelVocab("A", 3, TokenTable({"a": 0, "b": 1, "c": 2}))]
        with raises_error("different_row_counts", tensor="w") as caught:
            align(None, models, 0, tensor="w")
        assert "--vocab truncate (the first 2" in str(caught.value) and "union" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "models", "code"),
    [
        (None, [BASE, A], "different_row_counts"),
        (None, [ModelVocab("base", 2, None), vocab("A", 2, "ab"), vocab("B", 2, "ba")], "different_tokens"),
        ("truncate", [vocab("base", 3, "abc"), vocab("A", 2, "az")], "different_tokens"),
        ("union", [BASE, vocab("A", 4, ["a", "x", "y"], ["<s>"])], "different_tokenizers"),
        ("union", [vocab("base", 4, ["a", "b"], fast=False), A], "tokenizer_not_fast"),
        ("union", [ModelVocab("base", 8, TokenTable({"a": 0, "b": 7})), A], "token_ids_not_contiguous"),
        ("union", [BASE, A, ModelVocab("C", 5, None)], "missing_tokenizer"),
        ("base", [ModelVocab("C", 4, None), A], "missing_tokenizer"),
    ],
)
def test_vocabularies_that_do_not_go_together(mode: str | None, models: list[ModelVocab], code: str) -> None:
    with raises_error(code):
        align(mode, models, 0, tensor=EMBEDDING)


@pytest.fixture
def specialised(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """The tiny model with two tokens of its own, one special, and rows for them."""
    from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens([AddedToken("kitchen", normalized=True)])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "specialised")
    return tmp_path / "specialised"


def test_a_union_loads_in_transformers(tmp_path: Path, tiny_model_folder: Path, specialised: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [{"model": str(tiny_model_folder), "weight": 0}, str(specialised)]
    values = {"method": "linear", "models": models, "vocab": "union", "dtype": "bfloat16"}
    out = ModelMerger(values, max_shard_size=10_000).merge(tmp_path / "out").folder
    # The tiny tokenizer splits special tokens unless told not to.
    tokenizer, before = (
        AutoTokenizer.from_pretrained(folder, split_special_tokens=False) for folder in (out, specialised)
    )
    text = "mary went to kitchen<tool>"
    ids = tokenizer.encode(text)
    assert ids == before.encode(text) and len(tokenizer) == len(before)
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<tool>") in range(len(before) - 2, len(before))
    assert tokenizer.decode([ids[-1]], skip_special_tokens=True) == ""
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    expected = AutoModelForCausalLM.from_pretrained(specialised).state_dict()
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in model.state_dict().items())
