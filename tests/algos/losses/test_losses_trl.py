"""The losses equal TRL's own on random log-probabilities."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_algos import losses

pytestmark = pytest.mark.slow  # importing TRL takes longer than all other tests of the losses

PROMPT, LENGTHS = 3, torch.tensor([4, 1, 6, 3, 2, 5])  # tokens of three chosen, then of three rejected


@pytest.fixture(scope="module")
def trl() -> Any:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        warnings.simplefilter("ignore")  # what TRL's imports say is not ours to fix
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer

    return SimpleNamespace(dpo=DPOTrainer, kto=KTOTrainer, cpo=CPOTrainer, orpo=ORPOTrainer)


def _batch(lengths: torch.Tensor, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A padded batch, and log-probabilities of its next tokens that are 0 outside the completions."""
    width = PROMPT + int(lengths.max())
    column = torch.arange(width)
    mask = (column >= PROMPT) & (column < PROMPT + lengths[:, None])
    logps = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * 3
    ids = torch.zeros(mask.shape, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask.long()}
    return batch, (logps * mask)[:, 1:]


def _trainer(logps: torch.Tensor, **settings: Any) -> SimpleNamespace:
    """What TRL's loss methods read of a trainer whose model gives `logps`."""
    outputs = SimpleNamespace(
        log_probs=logps, entropy=logps, mean_logits=logps, is_top1=torch.ones_like(logps, dtype=torch.bool)
    )
    model = SimpleNamespace(training=False)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    common = {
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_tp_size": 1,
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(
        model=model,
        accelerator=accelerator,
        answer=lambda **_: outputs,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **common,
        **settings,
    )


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1)]
)
def test_dpo_equals_trls(trl, loss_type, label_smoothing):
    batch, logps = _batch(LENGTHS, seed=0)
    reference = -torch.rand(6, generator=torch.Generator().manual_seed(1)) * 6
    chosen, rejected = logps.sum(1).split(3)
    ref_chosen, ref_rejected = reference.split(3)
    trainer = _trainer(
        logps,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=label_smoothing,
        use_weighting=False,
    )
    inputs = {**batch, "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    expected = trl.dpo._compute_loss(trainer, trainer.answer, inputs, return_outputs=False)
    result = losses.dpo_loss(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        beta=0.3,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
        lengths=(LENGTHS[:3], LENGTHS[3:]),
    )
    torch.testing.assert_close(result.loss / 3, expected)
    metrics = trainer._metrics["eval"]
    assert result.chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"][0], rel=1e-5)
    assert result.rejected_rewards.mean().item() == pytest.approx(metrics["rewards/rejected"][0], rel=1e-5)


@pytest.mark.parametrize("kl_shift", [0.0, -9.0])  # a positive estimate of the divergence, and a clamped one
def test_kto_equals_trls(trl, kl_shift):
    batch, logps = _batch(LENGTHS, seed=2)
    generator = torch.Generator().manual_seed(3)
    ref_logps, kl_logps, ref_kl_logps = -torch.rand(3, 6, generator=generator) * 6
    kl_logps = kl_logps + kl_shift + 3
    labels = torch.tensor([True, False, True, True, False, True])
    settings = {"beta": 0.2, "desirable_weight": 1.4, "undesirable_weight": 0.6}
    trainer = _trainer(
        logps,
        calculate_KL=True,
        loss_type="kto",
        _compute_kl_logps=lambda model, batch: kl_logps,
        **settings,
    )
    inputs = {**batch, "label": labels, "ref_logps": ref_logps, "ref_KL_logps": ref_kl_logps}
    expected = trl.kto._compute_loss(trainer, trainer.answer, inputs, return_outputs=False)
    kl = losses.kto_kl((kl_logps - ref_kl_logps).sum(), 6)
    result = losses.kto_loss(logps.sum(1), ref_logps, labels, kl=kl, **settings)
    torch.testing.assert_close(result.loss / 6, expected)
    metrics = trainer._metrics["eval"]
    assert (kl.item() == 0) == (kl_shift < 0)
    assert metrics["kl"][0] == pytest.approx(kl.item())
    assert metrics["rewards/chosen"][0] == pytest.approx(result.rewards[labels].mean().item(), rel=1e-5)
    assert metrics["rewards/rejected"][0] == pytest.approx(result.rewards[~labels].mean().item(), rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_simpo_equals_trls(trl, label_smoothing):
    generator = torch.Generator().manual_seed(4)
    chosen, rejected = -torch.rand(2, 5, generator=generator) * 9
    chosen_lengths, rejected_lengths = torch.randint(1, 8, (2, 5), generator=generator)
    settings = {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": label_smoothing}
    trainer = _trainer(chosen, alpha=0.0, loss_type="simpo", **settings)
    averages = chosen / chosen_lengths, rejected / rejected_lengths
    expected, chosen_rewards, rejected_rewards = trl.cpo.cpo_loss(trainer, *averages)
    result = losses.simpo_loss(chosen, rejected, lengths=(chosen_lengths, rejected_lengths), **settings)
    torch.testing.assert_close(result.loss, expected.sum())
    torch.testing.assert_close(result.chosen_rewards, chosen_rewards)
    torch.testing.assert_close(result.rejected_rewards, rejected_rewards)


def test_orpo_equals_trls(trl):
    generator = torch.Generator().manual_seed(5)
    chosen, rejected = (-torch.rand(2, 5, generator=generator) * 9).requires_grad_()
    chosen_lengths, rejected_lengths = torch.randint(1, 8, (2, 5), generator=generator)
    trainer = _trainer(chosen, beta=0.4)
    averages = chosen / chosen_lengths, rejected / rejected_lengths
    terms, chosen_rewards, rejected_rewards, ratio, log_odds = trl.orpo.odds_ratio_loss(trainer, *averages)
    result = losses.orpo_loss(chosen, rejected, lengths=(chosen_lengths, rejected_lengths), beta=0.4)
    torch.testing.assert_close(result.loss, -terms.sum())
    torch.testing.assert_close(result.chosen_rewards, chosen_rewards)
    torch.testing.assert_close(result.rejected_rewards, rejected_rewards)
    torch.testing.assert_close(result.log_odds.mean(), log_odds)
    torch.testing.assert_close(torch.nn.functional.logsigmoid(result.log_odds).mean(), ratio)
    for side in (chosen, rejected):
        ours, theirs = (
            torch.autograd.grad(x, side, retain_graph=True)[0] for x in (result.loss, -terms.sum())
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
