"""Mismatch of log-probs between engine and trainer, and its importance correction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.losses import importance_weights
from rlhf_algos.online.rollouts import Completion, flat
from rlhf_algos.parallel.parallel import Parallel


def correct_mismatch(
    completions: Sequence[Completion], config: OnlineConfig, parallel: Parallel
) -> dict[str, float]:
    """Give completions `importance`: the ratio of the trainer's probabilities to the engine's; report it.

    The ratio is bounded as the settings say, see `rlhf_algos.losses.importance_weights`; without correction
    it is only reported, and `importance` is 1.

    The completions, those of this process, have `old_logps` and `sampling_logps`.

    Returns:
        `sampling/importance_sampling_ratio/{min,mean,max}` and `sampling/sampling_logp_difference/{mean,max}`
        over all processes, under TRL's names.
    """
    device = parallel.device
    sums = torch.zeros(4, device=device)
    highest = torch.full((3,), -torch.inf, device=device)
    if completions:
        lengths = [completion.length for completion in completions]
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        found = importance_weights(
            flat("old_logps", completions, torch.device("cpu")),
            flat("sampling_logps", completions, torch.device("cpu")),
            sequence,
            mode=config.vllm_importance_sampling_mode,
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
        )
        corrected = config.vllm_importance_sampling_correction
        ratios = found.weights if corrected else torch.ones_like(found.weights)
        for completion, part in zip(completions, ratios.split(lengths), strict=True):
            completion.tokens["importance"] = part
        sums = _tensor(
            found.ratio_sum, found.ratio_count, found.difference_sum, found.difference_count, device=device
        )
        highest = _tensor(-found.ratio_min, found.ratio_max, found.difference_max, device=device)
    ratio, count, difference, differences = parallel.sum(sums).tolist()
    low, high, most = parallel.maximum(highest).tolist()
    return {
        "sampling/importance_sampling_ratio/min": -low,
        "sampling/importance_sampling_ratio/mean": ratio / max(count, 1),
        "sampling/importance_sampling_ratio/max": high,
        "sampling/sampling_logp_difference/mean": difference / max(differences, 1),
        "sampling/sampling_logp_difference/max": most,
    }


def _tensor(*values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.stack([value.float() for value in values]).to(device)
