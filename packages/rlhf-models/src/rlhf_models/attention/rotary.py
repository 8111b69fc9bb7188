"""Rotary frequencies that depend on the longest text of a batch."""

from __future__ import annotations

import logging
from functools import cache

from transformers import PreTrainedConfig

from rlhf_data import PackedBatch

_LOG = logging.getLogger(__name__)


def check_positions(config: PreTrainedConfig, batch: PackedBatch) -> None:
    """Warn, once, of a text beyond the length at which a model's frequencies change for the whole batch.

    Dynamic NTK scaling (arXiv:2309.00071, section 3.3) and LongRoPE (arXiv:2402.13753) do that, in the padded
    batches of transformers too: beyond this length scores depend on which texts share a batch.
    """
    length = stable_length(config)
    if length is None or batch.num_sequences == 1:
        return
    longest = int(batch.host.position_ids.max()) + 1
    if longest > length:
        _warn_once(config.model_type, length)


def stable_length(config: PreTrainedConfig) -> int | None:
    """Tokens up to which rotary frequencies are the same for every text; None if they always are."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
    lengths = [
        config.max_position_embeddings
        if "dynamic" in kind["rope_type"]
        else kind["original_max_position_embeddings"]
        for kind in kinds
        if "dynamic" in kind.get("rope_type", "") or kind.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


@cache
def _warn_once(model_type: str, length: int) -> None:
    _LOG.warning(
        "%s changes its rotary frequencies for a whole batch when one of its texts has more than %d tokens, "
        "so scores there depend on how texts are batched; set max_length to %d to rule that out",
        model_type,
        length,
        length,
    )
