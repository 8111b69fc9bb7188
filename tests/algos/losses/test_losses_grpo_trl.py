"""Losses, weights and advantages of GRPO equal those of TRL's own trainer on identical numbers."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch

from rlhf_algos import losses
from rlhf_algos.advantages import group_advantages, zero_std_fraction

pytestmark = pytest.mark.slow  # importing TRL takes longer than all other tests of the losses

B, T, LONGEST, GROUP = 8, 7, 9, 4
LENGTHS = torch.tensor([3, 7, 1, 5, 2, 7, 4, 6])
MASK = torch.arange(T) < LENGTHS[:, None]
MICRO_BATCHES = 2


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer; what it would ask its model for is put in its place by each test."""
    from datasets import Dataset

    from rlhf_models import build_tiny_llama, train_byte_tokenizer

    tokenizer: Any = train_byte_tokenizer(["a b"], 260)
    model = build_tiny_llama(
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        seed=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL's imports say is not ours to fix
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        config = GRPOConfig(
            str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=B // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        made: Any = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * B),
            processing_class=tokenizer,
        )
    made.model.train()
    made.current_gradient_accumulation_steps = MICRO_BATCHES
    return made


def _numbers(seed: int, count: int) -> list[torch.Tensor]:
    """Log-probabilities (B, T) near one another, so that some ratios are clipped and some are not."""
    generator = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    return [base + 0.4 * torch.randn(B, T, generator=generator, dtype=torch.float64) for _ in range(count)]


def _truncated(mask: torch.Tensor, masked: bool) -> torch.Tensor:
    """The mask of completions of which two were cut off, one in each micro-batch."""
    kept = torch.ones(B, 1, dtype=torch.bool)
    kept[[1, 6]] = not masked
    return mask & kept


def _theirs(trainer: Any, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, Any], logps: Any) -> Any:
    """TRL's loss of all micro-batches of a step, and its metrics."""
    trainer._metrics["train"].clear()
    total = torch.zeros(())
    tokens = tensors["completion_mask"].sum()
    for part in torch.arange(B).split(B // MICRO_BATCHES):
        inputs = {name: value[part] for name, value in tensors.items()}
        inputs |= {"prompt_ids": torch.zeros(len(part), 1).long(), "num_items_in_batch": tokens}
        inputs |= {"prompt_mask": torch.ones(len(part), 1).long()}
        inputs["completion_ids"] = torch.zeros(len(part), T).long()
        scored = logps[part], torch.zeros(len(part), T), None
        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, s=scored, **__: s)
        total = total + trainer._compute_loss(trainer.model, inputs)
    return total, {name: torch.tensor(values) for name, values in trainer._metrics["train"].items()}


CASES = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in itertools.product(
        losses.LOSS_TYPES, ["token", "sequence"], [0.0, 0.3], [False, True], [None, 1.6]
    )
    if case[-1] is None or losses.SURROGATES[case[0]] is losses.SURROGATES["grpo"]  # others have no delta
]


@pytest.mark.parametrize(("loss_type", "level", "beta", "masked", "delta"), CASES)
@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradient_equal_trls(trainer, monkeypatch, loss_type, level, beta, masked, delta, corrected):
    logps, old_logps, ref_logps, sampling_logps = _numbers(0, 4)
    logps.requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.0, -2.0, 0.7, 1.1, -1.3, 0.4], dtype=torch.float64)
    mask = _truncated(MASK, masked)
    importance = (old_logps - sampling_logps).exp().clamp(max=1.5)
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": beta,
        "epsilon_low": 0.2,
        "epsilon_high": 1.28 if loss_type == "cispo" else 0.28,  # there the bound itself
        "use_vllm": corrected,
        "vllm_importance_sampling_correction": corrected,
    }
    for name, value in settings.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(trainer.args, "delta", delta)
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", corrected)
    tensors = {
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logps,
        "ref_per_token_logps": ref_logps,
        "importance_sampling_ratio": importance,
    }
    expected, metrics = _theirs(trainer, monkeypatch, tensors, logps)
    (expected_gradient,) = torch.autograd.grad(expected, logps)

    sequence = torch.arange(B)[:, None].expand(B, T)[mask]
    flat, old, ref = logps[mask], old_logps[mask], ref_logps[mask]
    spread = advantages[sequence]
    batches = torch.arange(B) // (B // MICRO_BATCHES)
    made = losses.token_weights(loss_type, mask.sum(1), max_completion_length=LONGEST, batches=batches)
    weights = made.weights[sequence]
    owner = sequence if level == "sequence" else None
    clip = {"clip_low": math.inf if loss_type == "cispo" else 0.2, "clip_high": 0.28, "delta": delta}
    scale = importance[mask] if corrected else 1.0
    result = losses.policy_loss(
        *(flat, old, spread * scale),
        surrogate=losses.SURROGATES[loss_type],
        settings=losses.SurrogateSettings(**clip),
        weights=weights,
        sequence=owner,
    ).loss
    if beta:
        kl = losses.kl_k3(flat, ref)
        kl = losses.corrected_kl(flat, old, ref, sequence=owner) if corrected else kl
        result = result + beta * (weights * kl).sum()
    result = result / made.normaliser
    (gradient,) = torch.autograd.grad(result, logps)
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    if not (masked and level == "sequence"):  # there TRL counts a masked sequence too, with a ratio of 1
        _check_clip_metrics(metrics, (flat, old, spread, sequence), level, clip)


@pytest.mark.parametrize("loss_type", losses.LOSS_TYPES)
def test_the_entropy_bonus_is_trls(trainer, monkeypatch, loss_type):
    """`test_online.py` holds the trainer against the same mean over tokens."""
    logps, old_logps = _numbers(0, 2)
    entropy = torch.rand(B, T, generator=torch.Generator().manual_seed(2))
    tensors = {
        "completion_mask": MASK.long(),
        "advantages": torch.linspace(-1, 1, B),
        "old_per_token_logps": old_logps,
        "prompt_ids": torch.zeros(B, 1).long(),
        "prompt_mask": torch.ones(B, 1).long(),
        "completion_ids": torch.zeros(B, T).long(),
        "num_items_in_batch": MASK.sum(),
    }
    for name, value in {
        "loss_type": loss_type,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
    }.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(
        trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (logps, entropy, None)
    )
    found = []
    for coef in (0.0, 0.5):
        monkeypatch.setattr(trainer, "entropy_coef", coef)
        monkeypatch.setattr(trainer, "_entropy_bonus_enabled", coef > 0)
        found.append(float(trainer._compute_loss(trainer.model, tensors)))
    assert found[0] - found[1] == pytest.approx(0.5 * float(entropy[MASK].mean()), abs=1e-6)


def _check_clip_metrics(metrics: Any, tensors: Any, level: Any, clip: Any) -> None:
    """TRL averages over micro-batches what it averages or takes the extreme of in each."""
    *_, sequence = tensors
    parts = [
        losses.ratio_statistics(
            *(x[sequence // (B // MICRO_BATCHES) == i] for x in tensors), **clip, level=level
        )
        for i in range(MICRO_BATCHES)
    ]
    means = {
        "clip_ratio/low_mean": [part.low / part.count for part in parts],
        "clip_ratio/high_mean": [part.high / part.count for part in parts],
        "clip_ratio/region_mean": [part.region / part.count for part in parts],
        "clip_ratio/low_min": [part.low_min for part in parts],
        "clip_ratio/high_max": [part.high_max for part in parts],
        "cispo_clip_ratio": [part.high / part.count for part in parts],
    }
    for name in means.keys() & metrics.keys():  # for sapo TRL has none
        expected = metrics[name].tolist()
        assert [float(value) for value in means[name]] == pytest.approx(expected, abs=1e-6), name
    assert sum(float(part.region) for part in parts) > 0


def _prepared(trainer: Any, monkeypatch: Any, rewards: Any, **changes: Any) -> tuple[Any, Any]:
    """What TRL's trainer makes of given completions and rewards before its loss."""
    logps, sampling_logps = _numbers(1, 2)
    sampling_logps[1, 2] = math.nan  # vLLM could not score it
    end = trainer._tokenizer.eos_token_id
    completions = [[5] * (int(length) - 1) + [end if i != 1 else 5] for i, length in enumerate(LENGTHS)]
    sampled = [row[: int(n)].tolist() for row, n in zip(sampling_logps, LENGTHS, strict=True)]
    generated = [[4]] * B, completions, None, ["x"] * B, sampled, {}, None, None
    settings = {
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *_: rewards,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, None, None),
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "reward_func_names": [str(i) for i in range(rewards.shape[1])],
        "reward_weights": torch.ones(rewards.shape[1]),
        **changes,
    }
    for name, value in settings.items():
        monkeypatch.setattr(trainer, name, value)
    trainer._metrics["train"].clear()
    with torch.no_grad():
        output = trainer._generate_and_score_completions([{"prompt": "a"}] * B)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return output, (metrics, logps, sampling_logps)


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS = [(None, 1.3), (0.8, 1.4), (0.7, None)]


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        *((mode, *bounds) for mode in MODES for bounds in BOUNDS),
        # TRL cannot truncate without a bound
        *((mode, None, None) for mode in MODES if mode.endswith("mask")),
    ],
)
def test_importance_weights_equal_trls(trainer, monkeypatch, mode, low, high):
    changes = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    output, (metrics, logps, sampling) = _prepared(trainer, monkeypatch, torch.rand(B, 1), **changes)
    assert torch.equal(output["completion_mask"].bool(), MASK)
    sequence = torch.arange(B)[:, None].expand(B, T)[MASK]
    # TRL holds the engine's log-probabilities in single precision
    made = losses.importance_weights(
        logps[MASK], sampling.float().double()[MASK], sequence, mode=mode, clip_min=low, clip_max=high
    )
    expected = output["importance_sampling_ratio"].expand(B, T)[MASK]
    torch.testing.assert_close(made.weights, expected.to(made.weights.dtype), rtol=1e-6, atol=1e-7)
    theirs = {name.removeprefix("sampling/"): value for name, value in metrics.items()}
    ours = {
        "importance_sampling_ratio/min": made.ratio_min,
        "importance_sampling_ratio/max": made.ratio_max,
        "importance_sampling_ratio/mean": made.ratio_sum / made.ratio_count,
        "sampling_logp_difference/mean": made.difference_sum / made.difference_count,
        "sampling_logp_difference/max": made.difference_max,
    }
    for name, value in ours.items():
        assert float(value) == pytest.approx(theirs[name], rel=1e-6), name


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("some_missing", [False, True])
def test_advantages_equal_trls(trainer, monkeypatch, scale_rewards, some_missing):
    rewards = torch.tensor([[1.0, 2.0, 2.0, 4.0, 3.0, 3.0, 3.0, 3.0]]).T
    if some_missing:
        rewards[[1, 6]] = math.nan
    output, (metrics, *_) = _prepared(trainer, monkeypatch, rewards, scale_rewards=scale_rewards)
    groups = torch.arange(B) // GROUP
    advantages = group_advantages(rewards[:, 0], groups, scale_rewards=scale_rewards)
    torch.testing.assert_close(advantages, output["advantages"], rtol=1e-6, atol=1e-7)
    if scale_rewards != "batch":  # TRL asks then whether all rewards of the step are equal
        assert metrics["frac_reward_zero_std"] == float(zero_std_fraction(rewards[:, 0], groups)) == 0.5


def test_masked_completions_count_as_sequences_of_no_tokens(trainer, monkeypatch):
    output, _ = _prepared(trainer, monkeypatch, torch.rand(B, 1), mask_truncated_completions=True)
    lengths = LENGTHS.clone()
    lengths[1] = 0  # the one without an end
    assert output["completion_mask"].sum(1).tolist() == lengths.tolist()
    assert output["num_items_in_batch"] == losses.token_weights("dapo", lengths).normaliser
