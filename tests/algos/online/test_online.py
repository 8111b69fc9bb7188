"""GRPO and PPO trainers against plain padded computation, and the properties that every trainer has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from first_space import llama2_like_tokenizer
from online_trainers import (
    GRPO,
    PROMPTS,
    TOKENIZER,
    even_tokens,
    gradient,
    grpo,
    lm,
    padded,
    plain_logps,
    ppo,
    rollout,
)
from proofs import by_default
from raises import raises_error
from rlhf_algos import GRPOConfig, GRPOTrainer, PPOConfig
from rlhf_algos.engine.loss_output import LossOutput, reduce_outputs
from rlhf_algos.losses import LOSS_TYPES
from rlhf_algos.online.rollouts import completion_text
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import PromptExample, RunFolder, TokenSequence, UserError, pack
from rlhf_infer import Rollout
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import LoraSettings, add_adapters, tiny_model


def test_the_setting_names_the_loss_types() -> None:
    assert set(get_args(GRPOConfig.model_fields["loss_type"].annotation)) == set(LOSS_TYPES)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_is_the_padded_loss(loss_type: str, level: str) -> None:
    """Advantages and loss are written out here with loops and masks, as the papers have them."""
    trainer = grpo(loss_type=loss_type, importance_sampling_level=level, beta=0.1, temperature=0.7)
    completions, table = rollout(trainer)
    model = trainer.model
    with torch.no_grad():  # a policy that has moved since it sampled
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batches = list(trainer.micro_batches(completions))
    total = sum(trainer.num_loss_terms(batch, rows) for batch, rows in batches)
    loss: Any = sum(trainer.loss(batch, rows).loss for batch, rows in batches)
    (loss / total).backward()
    ours = gradient(model)

    mask = padded(completions, [torch.ones(each.length) for each in completions])
    old = padded(completions, [torch.tensor(each.rollout.logps) for each in completions])
    reference = plain_logps(lm(), completions, 0.7)[0].detach()
    rewards = table.total.view(-1, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(
        -1, 1
    )
    logps = plain_logps(model, completions, 0.7)[0]
    log_ratio = (logps - old) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    kl = (torch.exp(reference - logps) - (reference - logps) - 1) * ratio
    clipped = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    temperatures = torch.where(advantages > 0, 1.0, 1.05)
    softly = -torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures * advantages
    weighted = -ratio.detach().clamp(max=5) * advantages * logps
    per_token = {"cispo": weighted, "sapo": softly}.get(loss_type, clipped) + 0.1 * kl
    expected = {
        "grpo": ((per_token * mask).sum(1) / mask.sum(1)).mean(),
        "sapo": ((per_token * mask).sum(1) / mask.sum(1)).mean(),
        "cispo": (per_token * mask).sum() / mask.sum(),
        "dapo": (per_token * mask).sum() / mask.sum(),
        "bnpo": (per_token * mask).sum() / mask.sum(),
        "dr_grpo": (per_token * mask).sum() / (len(completions) * 6),
    }[loss_type]
    expected.backward()
    torch.testing.assert_close(ours, gradient(model), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_only_update_of_a_rollout_takes_its_own_log_probs_for_the_old_ones(
    updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 the engine's are not the trainer's.  One update needs one forward pass, two need three."""
    trainer = grpo(bf16=True, num_iterations=updates)
    passes: list[bool] = []
    forward = trainer.scorer.forward

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return forward(*args, **options)

    monkeypatch.setattr(trainer.scorer, "forward", counted)
    trainer.train_step(PROMPTS[:2])
    assert passes == ([True] if updates == 1 else [False, True, True])
    known = grpo(bf16=True, num_iterations=updates)
    monkeypatch.setattr(GRPOTrainer, "_knows_old_logps", True)
    known.train_step(PROMPTS[:2])
    pairs = zip(trainer.parameters, known.parameters, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_ppo_is_the_padded_loss(value_model: str) -> None:
    """Token rewards, GAE and both losses are written out here with plain loops."""
    trainer = ppo(
        value_model=value_model,
        kl_coef=0.3,
        missing_eos_penalty=0.5,
        gamma=0.9,
        lam=0.8,
        entropy_coef=0.01,
        whiten_advantages=False,
    )
    completions, table = rollout(trainer, PROMPTS)
    model: Any = trainer.model
    value: Any = trainer.value_model
    start = [each.tokens["old_values"] for each in completions]
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batches = list(trainer.micro_batches(completions))
    total = sum(trainer.num_loss_terms(batch, rows) for batch, rows in batches)
    loss: Any = sum(trainer.loss(batch, rows).loss for batch, rows in batches)
    (loss / total).backward()
    ours = gradient(trainer.scorer)

    reference = plain_logps(lm(), completions)[0].detach()
    logps, entropy = plain_logps(model, completions)
    losses = []
    for i, each in enumerate(completions):
        length, old = each.length, torch.tensor(each.rollout.logps)
        rewards = -0.3 * (old - reference[i, :length])
        ended = each.rollout.completion_ids[-1] == TOKENIZER.eos_token_id
        rewards[-1] += table.total[i] - (0.0 if ended else 0.5)
        advantage, advantages = 0.0, [0.0] * length
        for t in reversed(range(length)):
            later = float(start[i][t + 1]) if t + 1 < length else 0.0
            advantage = float(rewards[t]) + 0.9 * later - float(start[i][t]) + 0.9 * 0.8 * advantage
            advantages[t] = advantage
        advantages = torch.tensor(advantages)
        ids = torch.tensor([[*each.rollout.prompt_ids, *each.rollout.completion_ids]])
        if value_model == "shared":
            hidden = model.model(input_ids=ids).last_hidden_state[0, -length - 1 : -1]
            values = hidden @ value.weight[0] + value.bias
        else:
            values = value.model(input_ids=ids).logits[0, -length - 1 : -1, 0]
        ratio = (logps[i, :length] - old).exp()
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        returns = advantages + start[i]
        near = start[i] + (values - start[i]).clamp(-0.2, 0.2)
        error = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        losses.append(policy + 0.1 * error - 0.01 * entropy[i, :length])
    torch.cat(losses).mean().backward()
    torch.testing.assert_close(ours, gradient(trainer.scorer), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", [grpo, ppo])
def test_a_step_does_not_depend_on_how_it_is_cut(make: Any) -> None:
    """One pass over everything, or many of a few tokens each."""
    found = []
    for budget in (None, 12):
        trainer = make(max_tokens_per_batch=budget)
        metrics = trainer.train_step(PROMPTS[:2] if make is grpo else PROMPTS)
        found.append((metrics, torch.cat([p.detach().flatten() for p in trainer.parameters])))
    (whole, weights), (cut, other) = found
    for name, value in whole.items():
        if not name.startswith(("time/", *MACHINE_KEYS, "num_tokens")) and "clipfrac" not in name:
            assert cut[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(weights, other, rtol=0, atol=5e-5)  # AdamW blows up the last bits


def test_the_first_update_has_the_ratio_one() -> None:
    """Log-probs of the engine are those of the trainer."""
    metrics = ppo(num_ppo_epochs=1).train_step(PROMPTS)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["val/ratio_var"] == pytest.approx(0, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == 0


@pytest.mark.parametrize("make", by_default([grpo, ppo], grpo))
def test_rewards_rise(make: Any) -> None:
    """Both methods find out that even tokens pay."""
    own = {"learning_rate": 3e-2} if make is grpo else {"learning_rate": 1e-2, "kl_coef": 0.0}
    trainer = make(**own, num_generations=4, per_device_train_batch_size=8)
    rewards = [trainer.train_step([PROMPTS[0], PROMPTS[2]])["reward"] for _ in range(18)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def test_updates_end_when_the_policy_has_strayed() -> None:
    limit = ppo(learning_rate=1e-2, target_kl=1e-4)
    assert limit.train_step(PROMPTS)["num_updates"] == 2
    assert ppo(learning_rate=1e-2).train_step(PROMPTS)["num_updates"] == 4


@pytest.mark.parametrize(
    ("make", "settings"),
    [*((grpo, {"loss_type": each}) for each in LOSS_TYPES), (ppo, {})],
)
def test_a_step_whose_completions_are_all_masked_changes_nothing(
    make: Any, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout without end tokens is cut off; AdamW, which remembers a gradient, must not move on."""
    trainer = make(mask_truncated_completions=True, weight_decay=0.1, **settings)
    trainer.config = trainer.config.model_copy(update={"mask_truncated_completions": False})
    trainer.train_step(PROMPTS[:2])
    trainer.config = trainer.config.model_copy(
        update={"mask_truncated_completions": True, "max_completion_length": 1}
    )
    before = [p.detach().clone() for p in trainer.parameters]
    steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
    with caplog.at_level("INFO"):
        metrics = trainer.train_step(PROMPTS[:2])
    assert metrics["completions/clipped_ratio"] == 1 and metrics["num_updates"] == 0
    assert "loss" not in metrics and "step 2" in caplog.text
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == steps


def test_extremes_of_nothing_are_left_out() -> None:
    zero, inf = torch.tensor(0.0), torch.tensor(torch.inf)
    nothing = LossOutput(zero, lows={"low": inf}, highs={"high": -inf})
    metrics = reduce_outputs([(nothing, True)], 1, add=lambda x: x, maximum=lambda x: x)
    assert metrics == {"loss": 0.0}
    some = LossOutput(zero, lows={"low": torch.tensor(0.5)}, highs={"high": torch.tensor(0.25)})
    metrics = reduce_outputs([(nothing, True), (some, True)], 1, add=lambda x: x, maximum=lambda x: x)
    assert metrics == {"loss": 0.0, "low": 0.5, "high": 0.25}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss_type", by_default(LOSS_TYPES, "dapo", "dr_grpo"))
def test_the_entropy_bonus_of_grpo_is_the_mean_over_tokens(loss_type: str, masked: bool) -> None:
    """TRL: the same strength for every loss type; here over all tokens of the step, however it is cut."""
    settings = {"loss_type": loss_type, "mask_truncated_completions": masked, "max_tokens_per_batch": 20}
    plain, bonus = (grpo(entropy_coef=coef, max_completion_length=9, **settings) for coef in (0.0, 0.5))
    losses = []
    for trainer in (plain, bonus):
        trainer.prepare()
        rollouts = trainer.sample(PROMPTS[:2], 4, seed=7)
        for place, each in enumerate(each for group in rollouts for each in group):  # ragged, some cut off
            kept, reason = 2 + place % 5, "length" if place % 3 == 0 else "stop"
            each = replace(each, completion_ids=each.completion_ids[:kept], logps=each.logps[:kept])
            rollouts[place // 4][place % 4] = replace(each, finish_reason=reason)
        completions, table = trainer.score(PROMPTS[:2], rollouts, 4)
        trainer.compute_advantages(completions, table)
        counted = [each for each in completions if not (masked and each.truncated)]
        mask = padded(counted, [torch.ones(each.length) for each in counted])
        with torch.no_grad():
            entropy = float((plain_logps(trainer.model, counted)[1] * mask).sum() / mask.sum())
        losses.append(trainer.update(completions, 2)["loss"])
    assert losses[0] - losses[1] == pytest.approx(0.5 * entropy, abs=1e-5)


def test_whitened_rewards_keep_their_mean() -> None:
    """Token rewards of PPO by its reference implementation, masked_whiten(rewards, shift_mean=False)."""
    settings = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.5, "whiten_advantages": False}
    ref = tiny_model("llama", vocab_size=len(TOKENIZER), seed=1)
    rewards = []
    for whiten in (False, True):
        trainer = ppo(ref_model=ref, whiten_rewards=whiten, **settings)
        completions, _ = rollout(trainer)
        # without discount a return less the next one is the reward in between
        returns = [each.tokens["returns"] for each in completions]
        rewards.append(torch.cat([each - torch.cat([each[1:], torch.zeros(1)]) for each in returns]))
    plain, whitened = rewards
    expected = (plain - plain.mean()) * torch.rsqrt(plain.var() + 1e-8) + plain.mean()
    torch.testing.assert_close(whitened, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("processes", "horizon", "fits"), [(1, 2, True), (1, 1, False), (2, 2, False)])
def test_a_horizon_shorter_than_a_rollout_is_refused_before_the_run(
    processes: int, horizon: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 3 x 2 = 6 completions and of twice as many need a horizon above 1.2 and 2.4."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    settings = {"per_device_train_batch_size": 3, "num_mini_batches": 2, "kl_horizon": horizon}
    assert PPOConfig.from_dict(settings).kl_horizon == horizon  # a fixed coefficient has no horizon
    if fits:
        PPOConfig.from_dict(settings | {"kl_target": 1})
        return
    with pytest.raises(UserError, match="kl_horizon"):
        PPOConfig.from_dict(settings | {"kl_target": 1})


def test_the_overlong_penalty() -> None:
    """With a buffer of 6 tokens a completion of 6 tokens loses a whole point, one of 3 half of it."""
    trainer = grpo(overlong_buffer=6)
    completions, table = rollout(trainer)
    penalty = -table.lengths / 6
    total = table.total + penalty
    group = total[:4]
    expected = (group - group.mean()) / (group.std() + 1e-4)
    for each in completions[:4]:
        torch.testing.assert_close(each.tokens["advantages"], expected[each.index].expand(each.length))


def test_adapters_are_compared_with_the_model_below_them() -> None:
    model = add_adapters(lm(), ["default"], LoraSettings(lora_r=2), seed=0)
    trainer = grpo(model, beta=0.1)
    assert trainer.train_step(PROMPTS[:2])["kl"] == pytest.approx(0, abs=1e-7)
    assert trainer.train_step(PROMPTS[:2])["kl"] > 1e-7
    assert all("lora" in name for name, p in trainer.scorer.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("make", by_default([grpo, ppo], ppo))
def test_resuming_is_exact(make: Any, tmp_path: Path) -> None:
    def train(folder: Path, steps: int, *, resume: bool = False) -> Any:
        run = RunFolder.create(folder, resume=True)
        trainer = (
            make(max_steps=3, save_steps=1, save_total_limit=None, kl_target=1.0, normalize_rewards=True)
            if make is ppo
            else make(max_steps=3, save_steps=1, save_total_limit=None, beta=0.1)
        )
        trainer.run = run
        again = type(trainer)(
            trainer.model, trainer.config, PROMPTS, rewards=trainer.rewards, tokenizer=TOKENIZER, run=run
        )
        if resume:
            assert again.resume() and again.step == 2
        again.train()
        again.save_model(folder / "final")
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", *MACHINE_KEYS))}
            for row in run.read_metrics()
        ]

    whole = train(tmp_path / "run", 3)
    weights = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    for name in ("checkpoint-3", "final"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    assert train(tmp_path / "run", 3, resume=True) == whole
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == weights


def test_samples_are_kept(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    config = GRPOConfig.from_dict(GRPO | {"sample_steps": 2, "max_steps": 2})
    GRPOTrainer(
        lm(), config, PROMPTS, rewards=RewardFunctions([even_tokens]), tokenizer=TOKENIZER, run=run
    ).train()
    lines = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {2}
    assert set(lines[0]) == {"step", "prompt", "completion", "finish_reason", "reward", "advantage"}


def test_a_group_must_fit_a_step() -> None:
    with raises_error("uneven_groups"):
        grpo(per_device_train_batch_size=6)


def test_settings_that_contradict_each_other() -> None:
    for config, settings, part in (
        (GRPOConfig, {"num_generations": 1}, "a group needs two"),
        (GRPOConfig, {"epsilon": None, "epsilon_high": 0.3}, "epsilon_high is set without epsilon"),
        (GRPOConfig, {"loss_type": "cispo", "delta": 4.0}, "delta has no meaning"),
        (PPOConfig, {"kl_penalty": "loss"}, "k1 has no gradient"),
        (PPOConfig, {"kl_coef": 0, "kl_target": 1}, "kl_target adapts kl_coef"),
        (PPOConfig, {"min_completion_length": 300}, "is above max_completion_length"),
    ):
        with pytest.raises(UserError, match=part):
            config.from_dict(settings)


def test_rewards_read_the_space_between_prompt_and_completion():
    tokenizer = llama2_like_tokenizer()
    ids, sat = tokenizer("a cat")["input_ids"], tokenizer.convert_tokens_to_ids(["▁sat", "s", "</s>"])
    drawn = Rollout(ids, sat, [0.0] * 3, "stop")
    plain = PromptExample("a cat", tuple(ids), {})
    assert completion_text(tokenizer, plain, drawn) == " sats"
    chat = PromptExample([{"role": "user", "content": "a cat"}], tuple(ids), {})
    assert completion_text(tokenizer, chat, drawn) == [{"role": "assistant", "content": "sats"}]
    assert completion_text(tokenizer, plain, Rollout(ids, sat[2:], [0.0], "stop")) == ""


@pytest.mark.parametrize("disable", [True, False])
def test_the_value_model_has_dropout_only_if_it_is_wanted(disable: bool) -> None:
    model = tiny_model("gpt2", vocab_size=len(TOKENIZER))  # the family's own dropout is 0.1
    values = ppo(model, disable_dropout=disable).value_model.train()
    (batch,) = pack([TokenSequence([5, 9, 14, 60], 1)])
    with torch.no_grad():
        assert torch.equal(values(batch), values(batch)) == disable
