"""Elastic weight consolidation: the penalty, both kinds of Fisher information, adapters, several tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_algos import METHODS, SFTConfig, SFTTrainer, TrainingJob
from rlhf_algos.safeguards.consolidation import ElasticWeightConsolidation, quadratic_penalty
from rlhf_data import RunFolder, TokenSequence
from rlhf_models import LoraSettings, apply_lora
from rlhf_models.loading.tiny import tiny_model

ROWS = [TokenSequence([1 + i % 5, 2 + i % 7, i % 11, (3 * i) % 13, 4], 2) for i in range(8)]


def model(seed: int = 0) -> Any:
    return tiny_model("llama", vocab_size=20, seed=seed)


def test_the_penalty_and_its_gradient() -> None:
    # ½ (2·(3−1)² + 4·(1−2)²) = ½ (8 + 4) = 6; gradient F (θ − θ*) = (2·2, 4·−1)
    values = torch.tensor([3.0, 1.0], requires_grad=True)
    loss = quadratic_penalty(values, torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    loss.backward()
    assert loss.item() == 6.0
    assert values.grad is not None and values.grad.tolist() == [4.0, -4.0]


def test_descent_on_two_quadratics_meets_at_their_weighted_mean() -> None:
    # ½ a (θ − 1)² with the penalty λ ½ F (θ − 0)² is least at θ = a / (a + λF): 3 / (3 + 2·0.5) = 0.75
    theta = torch.tensor([0.0], requires_grad=True)
    for _ in range(200):
        loss = 1.5 * (theta - 1).square().sum()
        loss = loss + 2.0 * quadratic_penalty(theta, torch.zeros(1), torch.tensor([0.5]))
        (grad,) = torch.autograd.grad(loss, theta)
        theta.data -= 0.1 * grad
    assert theta.item() == pytest.approx(0.75, abs=1e-5)


def test_without_an_estimate_it_is_l2_sp() -> None:
    held = model()
    ewc = ElasticWeightConsolidation(held, strength=0.5)
    assert ewc.penalty().item() == 0
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.add_(0.1)
    count = sum(parameter.numel() for parameter in held.parameters())
    # 0.5 · ½ · count · 0.1²
    assert ewc.penalty().item() == pytest.approx(0.0025 * count, rel=1e-4)
    found = ewc.add_gradient(scale=8.0)
    assert found["ewc_distance"] == pytest.approx(0.1 * count**0.5, rel=1e-4)
    for parameter in held.parameters():  # 8 · 0.5 · 0.1
        assert torch.allclose(parameter.grad, torch.full_like(parameter, 0.4), rtol=1e-3)


def test_the_empirical_fisher_is_that_of_a_plain_loop() -> None:
    held = model()
    found = ElasticWeightConsolidation(held, strength=1.0).estimate(ROWS, fisher="empirical")
    expected = {name: torch.zeros_like(each) for name, each in held.named_parameters()}
    for row in ROWS:
        ids = torch.tensor([row.input_ids])
        logps = held(input_ids=ids).logits.log_softmax(-1)[0, 1:-1]  # of the tokens from 2 on
        logp = logps.gather(1, ids[0, 2:, None]).sum()
        for (name, _), grad in zip(
            held.named_parameters(), torch.autograd.grad(logp, list(held.parameters())), strict=True
        ):
            expected[name] += grad.square()
    mean = sum(each.sum() for each in expected.values()) / sum(each.numel() for each in expected.values())
    for name in expected:
        assert torch.allclose(found[name], expected[name] / mean, rtol=1e-3, atol=1e-4), name


@pytest.mark.slow
def test_the_true_fisher_is_drawn_from_the_model() -> None:
    one, again, other = (
        ElasticWeightConsolidation(model(), strength=1.0).estimate(ROWS, seed=seed)["lm_head.weight"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, again) and not torch.allclose(one, other)
    labels = [TokenSequence([*row.input_ids[:2], 7, 8, 9], 2) for row in ROWS]  # of which only places count
    held = model()
    torch.nn.init.zeros_(held.lm_head.weight)  # every token is as likely, whatever stands before it
    empirical = ElasticWeightConsolidation(held, strength=1.0).estimate(labels, fisher="empirical")
    true = ElasticWeightConsolidation(held, strength=1.0).estimate(labels * 8)
    spread = [each["lm_head.weight"].sum(1) for each in (empirical, true)]
    assert spread[0][[7, 8, 9]].sum() > 0.5 * spread[0].sum() > spread[1][[7, 8, 9]].sum()


def test_a_further_task_adds_to_a_share_of_the_first() -> None:
    ewc = ElasticWeightConsolidation(model(), strength=1.0, decay=0.5)
    first = {name: each.clone() for name, each in ewc.estimate(ROWS[:4], fisher="empirical").items()}
    alone = ElasticWeightConsolidation(model(), strength=1.0).estimate(ROWS[4:], fisher="empirical")
    both = ewc.estimate(ROWS[4:], fisher="empirical")
    for name in both:
        assert torch.allclose(both[name], 0.5 * first[name] + alone[name])


def test_adapters_are_held_by_their_update(tmp_path: Path) -> None:
    held = apply_lora(model(), LoraSettings(lora_r=2, lora_alpha=4))
    ewc = ElasticWeightConsolidation(held, strength=1.0)
    importance = ewc.estimate(ROWS)
    assert ewc.penalty().item() == 0  # B is 0
    assert not any(each.requires_grad for name, each in held.named_parameters() if "lora" not in name)
    for name, parameter in held.named_parameters():
        if "lora" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for name, module in held.named_modules():
        if name in importance:
            update = 2.0 * module.lora_B["default"].weight @ module.lora_A["default"].weight  # alpha / r = 2
            expected += 0.5 * (importance[name] * update.square()).sum().item()
    assert ewc.penalty().item() == pytest.approx(expected, rel=1e-4) and expected > 0
    ewc.add_gradient()
    assert all(each.grad is not None for name, each in held.named_parameters() if "lora" in name)
    ewc.save(tmp_path / "ewc.safetensors")
    other = ElasticWeightConsolidation(held, strength=1.0)
    other.load(tmp_path / "ewc.safetensors")
    assert other.penalty().item() == pytest.approx(expected, rel=1e-4)
    with raises_error("weights_do_not_fit"):
        ElasticWeightConsolidation(model(), strength=1.0).load(tmp_path / "ewc.safetensors")


def test_a_trainer_with_it_goes_less_far() -> None:
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_steps": 10, "ref_kl_rows": 0}
    found = {}
    for strength in (0.0, 10.0):
        trainer = SFTTrainer(model(), SFTConfig.from_dict(settings), ROWS)
        trainer.consolidation = ElasticWeightConsolidation(trainer.model, strength=strength)
        found[strength] = trainer.train()
    assert found[0.0]["ewc_loss"] == 0 < found[10.0]["ewc_loss"]
    assert found[10.0]["ewc_distance"] < 0.5 * found[0.0]["ewc_distance"]
    assert found[0.0]["loss"] < found[10.0]["loss"]


def test_mistakes() -> None:
    with raises_error("nothing_trained"):
        ElasticWeightConsolidation(model().requires_grad_(False), strength=1.0)
    with raises_error("nothing_to_learn"):
        ElasticWeightConsolidation(model(), strength=1.0).estimate([])


@pytest.mark.slow
def test_a_job_holds_what_its_file_needs(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"prompt": "where is ball ?", "completion": " it is hall ."}\n' * 3)
    given = {
        "story_rows": 16,
        "story_eval_rows": 4,
        "max_steps": 3,
        "stage_samples": 0,
        "ewc_strength": 100.0,
    }
    found = {}
    for name, settings in (("ewc", {"ewc_data": str(earlier)}), ("l2_sp", {})):
        run = RunFolder.create(tmp_path / name)
        TrainingJob("dpo", METHODS["dpo"].resolve(given | settings), run).train()
        found[name] = [row["ewc_distance"] for row in run.read_metrics()]
        assert all(row["ewc_loss"] >= 0 for row in run.read_metrics()) and found[name][0] == 0
    assert found["ewc"][1:] != found["l2_sp"][1:]


@pytest.mark.slow
def test_two_processes_that_share_the_weights_hold_what_one_does(
    run_processes: Callable[..., str], tmp_path: Path
) -> None:
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"prompt": "where is ball ?", "completion": " it is hall ."}\n' * 3)
    settings = {"story_rows": 16, "story_eval_rows": 4, "max_steps": 3, "stage_samples": 0}
    settings |= {"ewc_strength": 100.0, "ewc_data": earlier}
    found = {}
    for processes, more in ((1, {}), (2, {"fsdp": "true"})):
        rows = {"per_device_train_batch_size": 4 // processes}
        given = [
            word for key, value in (settings | rows | more).items() for word in ("--set", f"{key}={value}")
        ]
        run = tmp_path / str(processes)
        run_processes(["-m", "rlhf_train", "sft", *given, "--output-dir", run], processes=processes)
        found[processes] = RunFolder(run).read_metrics()
    for one, two in zip(found[1], found[2], strict=True):
        for key in ("loss", "ewc_loss", "ewc_distance", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
    assert found[1][-1]["ewc_loss"] > 0


def test_what_sharded_weights_do_not_allow() -> None:
    adapted = apply_lora(model(), LoraSettings(lora_r=2))
    with raises_error("unsupported_key", key="ewc_strength"):
        ElasticWeightConsolidation(adapted, strength=1.0, scorer=torch.nn.Identity())
    with pytest.raises(ValueError):
        ElasticWeightConsolidation(model(), strength=1.0, scorer=torch.nn.Identity()).save("ewc.safetensors")


@pytest.mark.parametrize("more", [{"deepspeed": "zero2.json"}, {"fsdp": True, "use_peft": True}])
def test_what_cannot_be_held_is_refused_at_once(more: dict[str, Any]) -> None:
    with raises_error("invalid_value"):
        METHODS["sft"].resolve({"ewc_strength": 1.0} | more)


def test_a_file_needs_a_strength() -> None:
    with raises_error("invalid_value"):
        METHODS["sft"].resolve({"ewc_data": "rows.jsonl"})
