"""Folders that TRL's trainers write load here, and give what plain transformers and peft give."""

import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_data import TokenSequence, pack
from rlhf_models import PolicyModel, RewardModel, load_tokenizer, token_logps

pytestmark = pytest.mark.slow

TRAIN = """
import sys
from datasets import Dataset
from peft import LoraConfig
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

base, out = sys.argv[1:]
common = dict(max_steps=1, learning_rate=0.01, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
              disable_tqdm=True, gradient_checkpointing=False)
rows = [{"prompt": "where is mary ?", "chosen": " it is kitchen .", "rejected": " garden"}] * 4
for name, lora in (("full", None), ("lora", LoraConfig(r=2, task_type="SEQ_CLS", modules_to_save=["score"]))):
    args = RewardConfig(f"{out}/run", **common)
    trainer = RewardTrainer(base, args=args, train_dataset=Dataset.from_list(rows), peft_config=lora)
    trainer.train()
    trainer.save_model(f"{out}/reward-{name}")
rows = [{"prompt": "where is mary ?", "completion": " it is kitchen ."}] * 4
for name, lora in (("full", None), ("lora", LoraConfig(r=2, init_lora_weights=False))):
    args = SFTConfig(f"{out}/run", **common)
    trainer = SFTTrainer(base, args=args, train_dataset=Dataset.from_list(rows), peft_config=lora)
    trainer.train()
    trainer.save_model(f"{out}/sft-{name}")
"""
PROMPTS = ["where is mary ?"] * 2
COMPLETIONS = [" it is kitchen .", " garden"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, byte_tokenizer):
    """A folder with what TRL trained for a step each, and the tiny base it started from."""
    from rlhf_models import build_tiny_llama

    pytest.importorskip("trl")
    out = tmp_path_factory.mktemp("trl")
    base = build_tiny_llama(
        len(byte_tokenizer), eos_token_id=2, pad_token_id=0, hidden_size=32, intermediate_size=64, seed=1
    )
    base.save_pretrained(out / "base")
    byte_tokenizer.save_pretrained(out / "base")
    command = [sys.executable, "-c", TRAIN, str(out / "base"), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    return out


def plain_classifier(folders, kind):
    if kind == "full":
        return AutoModelForSequenceClassification.from_pretrained(folders / "reward-full").eval()
    base = AutoModelForSequenceClassification.from_pretrained(folders / "base", num_labels=1)
    return PeftModel.from_pretrained(base, folders / "reward-lora").eval()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_reward_model_that_trl_trained_loads(kind, folders, tmp_path):
    model = RewardModel.from_pretrained(folders / f"reward-{kind}")
    model.append_eos = True
    scores = model.score(PROMPTS, COMPLETIONS)
    rows = [model.encode(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]
    plain = plain_classifier(folders, kind)
    with torch.no_grad():
        expected = torch.stack([plain(torch.tensor([ids])).logits[0, 0] for ids in rows])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    assert scores[0] != scores[1]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert kind == "full" or any("score.modules_to_save" in name for name in trained)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(RewardModel.from_pretrained(tmp_path / "again").score(PROMPTS, COMPLETIONS), scores)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_policy_that_trl_trained_loads(kind, folders):
    policy = PolicyModel.from_pretrained(folders / f"sft-{kind}")
    if kind == "full":
        plain = AutoModelForCausalLM.from_pretrained(folders / "sft-full")
    else:
        base = AutoModelForCausalLM.from_pretrained(folders / "base")
        plain = PeftModel.from_pretrained(base, folders / "sft-lora")
    ids = load_tokenizer(folders / f"sft-{kind}")(PROMPTS[0] + COMPLETIONS[0])["input_ids"]
    (batch,) = pack([TokenSequence(ids, 1)])
    with torch.no_grad():
        logits = plain.eval()(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(policy.logps(batch).logps.detach(), expected, rtol=1e-5, atol=1e-6)
    untrained = AutoModelForCausalLM.from_pretrained(folders / "base")
    assert (token_logps(untrained, batch).logps - policy.logps(batch).logps).abs().max() > 1e-3
