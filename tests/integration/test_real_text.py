"""Real preference transcripts: read, tokenised exactly, scored in packed trees as by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_data import TokenSequence, pack, read_rows
from rlhf_models import build_tiny_llama, encode_completion, encode_prompt, token_logps, train_byte_tokenizer

HH_PAIRS = Path(__file__).parents[3] / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
TURN = "\n\nAssistant:"


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected of the first transcripts."""
    if not HH_PAIRS.exists():
        pytest.skip("needs ../shared/data, which is missing")
    split = [
        [row[name].rpartition(TURN) for name in ("chosen", "rejected")] for _, row in read_rows(HH_PAIRS)
    ]
    return [
        (prompt + TURN, chosen, rejected)
        for (prompt, _, chosen), (other_prompt, _, rejected) in split[:200]
        if prompt == other_prompt
    ]


def test_every_transcript_survives_the_byte_tokenizer(pairs: list[tuple[str, str, str]]) -> None:
    tokenizer = train_byte_tokenizer([prompt for prompt, _, _ in pairs[:50]], 600)
    assert len(pairs) > 150
    for parts in pairs:
        for text in parts:
            assert tokenizer.decode(encode_prompt(tokenizer, text)) == text


def test_real_pairs_packed_equal_plain(pairs: list[tuple[str, str, str]]) -> None:
    tokenizer = train_byte_tokenizer([prompt for prompt, _, _ in pairs[:50]], 600)
    model = build_tiny_llama(len(tokenizer), max_positions=2048, initializer_range=0.1)
    sequences = []
    for prompt, chosen, rejected in pairs[:6]:
        start = encode_prompt(tokenizer, prompt)
        sequences += [
            TokenSequence([*start, *encode_completion(tokenizer, text)], len(start))
            for text in (chosen, rejected)
        ]
    total = sum(len(sequence.input_ids) for sequence in sequences)
    batches = pack(sequences, 1500)
    assert sum(batch.num_tokens for batch in batches) < 0.85 * total
    with torch.no_grad():
        for batch in batches:
            logps = token_logps(model, batch).logps
            for q, i in enumerate(batch.sequence_ids.tolist()):
                ids = torch.tensor([sequences[i].input_ids])
                alone = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                expected = alone[sequences[i].score_from - 1 :]
                assert torch.allclose(logps[batch.score_sequence == q], expected, atol=1e-4, rtol=0)
