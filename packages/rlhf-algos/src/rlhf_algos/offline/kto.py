"""Kahneman-Tversky optimisation: single completions labelled good or bad, against a reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_algos.configs.offline import KTOConfig
from rlhf_algos.engine.language_model import ReferenceTrainer
from rlhf_algos.engine.loss_output import LossOutput, mean_where, side_metrics
from rlhf_algos.losses import kl_ema, kto_kl, kto_loss
from rlhf_data import KTOExample, PackedBatch, TokenSequence, UserError, pack


class KTOTrainer(ReferenceTrainer[KTOExample]):
    """Trains a policy on labelled completions by KTO; the loss is the mean over a step's completions.

    The KL that rewards are measured against is one number for a whole optimizer step.  With `kl_estimate`
    mismatched it is the mean log-ratio of the step's `kl_sequence`s.  With ema no further forward pass is
    needed: it is a moving average, over the steps before, of the completions' own mean log-ratio.

    A reward is beta (log π - log reference) of a completion.  Metrics: `kl` (nats per completion);
    `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `logps/chosen`, `logps/rejected`,
    `logits/chosen`, `logits/rejected` of the desirable (chosen) and undesirable (rejected) completions, left
    out of a step without any; `entropy` (nats, all completion tokens).

    See `ReferenceTrainer` for the reference and the arguments.

    Raises:
        UserError: no examples; or an example without `kl_sequence`, when its step comes.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "kl", "rewards/margins")
    config: KTOConfig

    def __init__(self, model: Any, config: KTOConfig, examples: Sequence[KTOExample], **options: Any) -> None:
        self._kl, self._ref_logps = 0.0, dict[int, Tensor]()
        self._mismatched = config.kl_estimate == "mismatched"
        self.reference_fields = ("ref_logps", "ref_kl_logps") if self._mismatched else ("ref_logps",)
        super().__init__(model, config, examples, **options)

    def sequences(self, example: KTOExample) -> Sequence[TokenSequence]:
        """The completion after its prompt."""
        return (example.sequence,)

    def reference_sequences(self, example: KTOExample) -> Sequence[TokenSequence]:
        """The completion after its prompt, and the one of the KL estimate."""
        if not self._mismatched:
            return (example.sequence,)
        if example.kl_sequence is None:
            raise UserError(
                "a row has no completion of another prompt to estimate the KL from; "
                "give more than one row, or set kl_estimate to ema",
                code="too_few_rows",
            )
        return (example.sequence, example.kl_sequence)

    @torch.no_grad()
    def before_step(self, examples: Sequence[KTOExample]) -> None:
        """The KL of the whole step, and the reference's log-probs, which share a pass with it."""
        if not self._mismatched:
            return
        self._ref_logps = {}
        log_ratio = torch.zeros(2, device=self.device, dtype=torch.float64)
        for batch, rows, real in self._passes(examples):
            known = self.known_logps(rows)
            if known is None:
                known = self.reference_logps(batch.to(self.device)).view(-1, 2)
            (kl_batch,) = pack([self.reference_sequences(row)[1] for row in rows])
            kl_batch = kl_batch.to(self.device)
            kl_logps = kl_batch.sequence_sums(self.forward(kl_batch).logps)
            if real:
                self._ref_logps |= {id(row): ref for row, ref in zip(rows, known[:, 0], strict=True)}
                ratios = (kl_logps - known[:, 1]).double()
                log_ratio += torch.stack([ratios.sum(), ratios.new_tensor(len(rows))])
        total, count = self.sum_over_processes(log_ratio)
        self._kl = float(kto_kl(total, count))

    def loss(self, batch: PackedBatch, examples: Sequence[KTOExample]) -> LossOutput:
        """KTO's loss of the completions, and TRL's metrics."""
        ref_logps = self._reference_of(batch, examples)
        scores = self.policy_scores(batch, with_stats=True)
        logps = batch.sequence_sums(scores.logps)
        labels = torch.tensor([bool(example.label) for example in examples], device=logps.device)
        desirable = labels[batch.score_sequence]
        result = kto_loss(
            logps,
            ref_logps,
            labels,
            kl=self._kl,
            beta=self.config.beta,
            desirable_weight=self.config.desirable_weight,
            undesirable_weight=self.config.undesirable_weight,
        )
        output = LossOutput(
            result.loss,
            sums={"kl": logps.new_tensor(self._kl * len(logps)), "log_ratio": (logps - ref_logps).sum()},
            means={
                "rewards/chosen": mean_where(result.rewards, labels),
                "rewards/rejected": mean_where(result.rewards, ~labels),
                "logps/chosen": mean_where(logps, labels),
                "logps/rejected": mean_where(logps, ~labels),
                **side_metrics(scores, desirable, ~desirable),
            },
        )
        return self.balanced(output, scores, self.num_loss_terms(batch, examples))

    def train_step(self, examples: Sequence[KTOExample]) -> dict[str, float]:
        """See `BaseTrainer.train_step`; moves the average of the KL along."""
        metrics = super().train_step(examples)
        estimate = kto_kl(torch.tensor(metrics.pop("log_ratio"), dtype=torch.float64), 1)
        if not self._mismatched:
            self._kl = float(kl_ema(self._kl, estimate, decay=self.config.kl_ema_decay))
        return _with_margins(metrics, "rewards")

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; a mismatched KL is taken over as many examples as a step has."""
        metrics = super().evaluate()
        del metrics["eval_log_ratio"]
        return _with_margins(metrics, "eval_rewards")

    def extra_state(self) -> dict[str, Any]:
        """The KL's moving average."""
        return {"kl": self._kl}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the moving average of the KL."""
        self._kl = state["kl"]

    def _passes(self, examples: Sequence[KTOExample]) -> list[tuple[PackedBatch, list[KTOExample], bool]]:
        """Batches of completions and KL completions, as many on every process; whether each counts.

        Wrapped modules talk to each other in each pass, so a process with fewer batches repeats one.
        """
        batches = list(self.micro_batches(examples, self.reference_sequences))
        most = int(self.parallel.maximum(torch.tensor([len(batches)], device=self.device)))
        filler = batches or list(self.micro_batches([next(iter(self.examples))], self.reference_sequences))
        passes = [(batch, rows, True) for batch, rows in batches]
        return passes + [(*filler[0], False)] * (most - len(batches))

    def _reference_of(self, batch: PackedBatch, examples: Sequence[KTOExample]) -> Tensor:
        if not self._mismatched:
            known = self.known_logps(examples)
            return self.reference_logps(batch) if known is None else known[:, 0]
        nothing = torch.zeros((), device=self.device)  # for a row that only fills up a process's share
        return torch.stack([self._ref_logps.get(id(example), nothing) for example in examples])


def _with_margins(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    sides = (f"{prefix}/chosen", f"{prefix}/rejected")
    if not all(side in metrics for side in sides):
        return metrics
    return metrics | {f"{prefix}/margins": metrics[sides[0]] - metrics[sides[1]]}
