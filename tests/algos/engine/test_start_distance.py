"""The KL to the model at the start, against a sum written out over the vocabulary."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from proofs import by_default
from rlhf_algos import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from rlhf_algos.engine import start_distance
from rlhf_data import PreferencePair, PromptExample, RunFolder, TokenSequence
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import LoraSettings, apply_lora
from rlhf_models.loading.tiny import tiny_model

VOCABULARY = 40
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "max_steps": 3, "per_device_train_batch_size": 4}


def model(seed: int = 0) -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY, seed=seed)


def sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    rng = random.Random(seed)
    lengths = [rng.randrange(4, 12) for _ in range(count)]
    return [TokenSequence([rng.randrange(3, VOCABULARY) for _ in range(n)], 3) for n in lengths]


def enumerated(now: Any, start: Any, rows: list[TokenSequence]) -> float:
    """Mean over scored tokens of Σ_v p (log p − log q), one plain forward pass for each sequence."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            p, q = (each(input_ids=ids).logits[0].double().log_softmax(-1) for each in (now, start))
        for at in row.scored():
            total += sum(float(p[at - 1, v].exp() * (p[at - 1, v] - q[at - 1, v])) for v in range(VOCABULARY))
            count += 1
    return total / count


def sft(lm: Any, rows: list[TokenSequence], held_out: list[TokenSequence], **settings: Any) -> SFTTrainer:
    config = SFTConfig.from_dict(SETTINGS | settings)
    return SFTTrainer(lm, config, rows, eval_examples=held_out)


@pytest.mark.parametrize("adapters", [False, True])
def test_it_is_the_sum_over_the_vocabulary_and_0_at_the_start(adapters: bool) -> None:
    held_out = sequences(5, seed=1)
    lm = apply_lora(model(), LoraSettings(lora_r=4), seed=0) if adapters else model()
    trainer = sft(lm, sequences(8), held_out)
    assert trainer.evaluate()["eval_ref_kl"] == 0.0
    found = trainer.train()["eval_ref_kl"]
    assert found == pytest.approx(enumerated(lm.eval(), model().eval(), held_out), abs=1e-5)
    assert found > 1e-3


def test_a_resumed_run_measures_from_where_it_began(tmp_path: Any) -> None:
    def run(name: str, steps: int) -> dict[str, float]:
        config = SFTConfig.from_dict(SETTINGS | {"max_steps": steps, "lr_scheduler_type": "constant"})
        folder = RunFolder.create(tmp_path / name, resume=True)
        trainer = SFTTrainer(model(), config, sequences(8), eval_examples=sequences(3, seed=1), run=folder)
        trainer.resume()
        return trainer.train()

    run("cut", 2)
    assert run("cut", 4)["eval_ref_kl"] == run("whole", 4)["eval_ref_kl"]


def test_training_is_the_same_to_the_bit() -> None:
    weights = []
    for rows in (0, 32):
        lm = model()
        sft(lm, sequences(8), sequences(5, seed=1), ref_kl_rows=rows, eval_steps=1).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in lm.parameters()]))
    assert torch.equal(*weights)


def test_long_completions_are_cut_and_the_first_rows_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_distance, "MAX_TOKENS", 2)
    monkeypatch.setattr(start_distance, "_KEPT_BYTES", 5 * VOCABULARY * 4)  # room for 5 tokens: 3 rows of 2
    held_out = [TokenSequence([5, 6, 7, 8, 9, 10 + i], 2, [i % 2 > 0] * 3 + [True] * 3) for i in range(6)]
    lm = model()
    trainer = sft(lm, sequences(8), held_out)
    found = trainer.train()["eval_ref_kl"]
    cut = [TokenSequence(row.input_ids[: row.scored()[1] + 1], 2, row.score_mask) for row in held_out[:3]]
    assert found == pytest.approx(enumerated(lm.eval(), model().eval(), cut), abs=1e-5)


def test_pairs_are_measured_along_the_chosen_completions() -> None:
    rows = sequences(8)
    pairs = [PreferencePair(*sides) for sides in zip(rows[:4], rows[4:], strict=True)]
    lm = model()
    config = DPOConfig.from_dict(SETTINGS)
    found = DPOTrainer(lm, config, pairs, eval_examples=pairs).train()["eval_ref_kl"]
    expected = enumerated(lm.eval(), model().eval(), [pair.chosen for pair in pairs])
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("make", [(GRPOTrainer, GRPOConfig), (PPOTrainer, PPOConfig)])
@pytest.mark.parametrize("shared", by_default([False, True], True))
def test_online_it_is_measured_along_completions_of_the_start(
    make: Any, shared: bool, byte_tokenizer: Any
) -> None:
    trainer_class, config_class = make
    lm, start = (tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0) for _ in range(2))
    settings = SETTINGS | {"max_completion_length": 6, "num_generations": 4}
    if config_class is PPOConfig:
        settings |= {"value_model": "shared" if shared else "separate", "kl_coef": 0.0}
    prompts = [PromptExample("p", (5, 6, 7 + i), {}) for i in range(3)]
    rewards = RewardFunctions(
        [lambda completions: [float(len(text)) for text in completions]], names=["long"]
    )
    trainer = trainer_class(
        lm,
        config_class.from_dict(settings),
        prompts,
        eval_examples=prompts,
        rewards=rewards,
        tokenizer=byte_tokenizer,
    )
    assert trainer.evaluate()["eval_ref_kl"] == 0.0
    rows = trainer.compared_sequences(3)
    assert [len(row.scored()) for row in rows] and all(len(row.scored()) <= 6 for row in rows)
    found = trainer.train()["eval_ref_kl"]
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            p, q = (each.eval()(input_ids=ids).logits[0].log_softmax(-1) for each in (lm, start))
        at = torch.tensor(row.scored()) - 1
        total, count = total + float((p[at].exp() * (p[at] - q[at])).sum()), count + len(at)
    assert found == pytest.approx(total / count, abs=1e-5) and found > 0
