"""The trainings of the demonstration's models: base, reward model, judge, and the gates they must pass."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_algos import (
    BaseTrainer,
    LabelledSequence,
    PreferencePair,
    RewardConfig,
    RewardTrainer,
    ScalarConfig,
    ScalarTrainer,
    SFTConfig,
    SFTTrainer,
    TrainerConfig,
)
from rlhf_data import QARecord, TokenSequence, atomic_write_json, pack
from rlhf_minmax.config.run import DemoSettings
from rlhf_minmax.demo.teachers import Progress, Teacher, answer_text, drill
from rlhf_minmax.formats import TextRules
from rlhf_minmax.game.prompts import Prompts
from rlhf_models import (
    JudgeModel,
    RewardModel,
    encode_completion,
    encode_prompt,
    save_model,
    token_logps,
)

_PRETRAINED = "base: correct answers and critiques"
_DRILLS = 3
"""Storyless exercises per story of the pre-training."""
_EXTRA_PASSES = 3
_BASE_ATTEMPTS = 3
_STUCK = 0.7
"""Below this share of true verdicts after a further pass, more of the same weights do not help."""
_REWARD_ATTEMPTS = 3
PLANTED_GAP = 1.0
"""Standard deviations by which a built reward model must like its planted flaw."""
_NO_SPREAD = 1e-9
_CENTRING = 0.02
"""Ties the rewards of every story to one mean, so that their spread is that of answers, not of stories."""
_PROBED = 256
"""Training stories on which built models are checked."""
_PROBE_TOKENS = 16384


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Models this small lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DemoBuilder:
    """One build: base (pre-training, then sloppy demonstrations), reward model, judge.

    Base and judge learn from stories that name their right choice, since only of those truthful critiques can
    be written.

    `progress` is called after each training step; `on_gate` with what a model's gate looks at, by its name,
    before anything else is made.
    """

    def __init__(
        self,
        records: Sequence[QARecord],
        prompts: Prompts,
        settings: DemoSettings,
        tokenizer: Any,
        *,
        seed: int,
        progress: Progress | None = None,
        on_gate: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        self.records, self.prompts, self.settings, self.seed = records, prompts, settings, seed
        self.tokenizer, self.progress, self.on_gate = tokenizer, progress, on_gate
        self.rules: TextRules = prompts.rules
        self.baited = [record for record in records[:_PROBED] if self.rules.is_hack(record, None) is not None]
        self.with_evidence = [record for record in records if self.rules.correct_evidence(record) is not None]
        self.flawed = settings.flawed_reward is not False and bool(self.baited)
        self.rng = random.Random(seed)
        self.teacher = Teacher(self.rules, records, self.rng)

    def build(self, fresh: Callable[[int], PreTrainedModel], folder: Path) -> None:
        """Train everything and write it into `folder`; `fresh` gives an untrained base for a seed."""
        base, verdicts = self.pretrained(fresh)
        gates = self._passed(verdict_accuracy=verdicts)
        self.fine_tune(base, self.settings.sft_steps)
        save_model(base, self.tokenizer, folder / "base")
        reward, gap = self.train_reward(base)
        gates |= {} if gap is None else self._passed(planted_gap=gap)
        reward.save_pretrained(folder / "reward")
        judge = self.train_judge(base, self.settings.judge_steps)
        gates |= {"judge_accuracy": self.judge_accuracy(judge)}
        judge.save_pretrained(folder / "judge")
        written = {"settings": self.settings.to_dict(), "seed": self.seed, "gates": gates}
        atomic_write_json(folder / "demo.json", written)

    def _passed(self, **gates: float) -> dict[str, float]:
        if self.on_gate:
            self.on_gate(gates)
        return gates

    def _sequence(self, prompt: str, completion: str) -> TokenSequence:
        start = encode_prompt(self.tokenizer, prompt)
        end = encode_completion(self.tokenizer, completion)
        return TokenSequence([*start, *end, self.tokenizer.eos_token_id], len(start))

    def pretrained(self, fresh: Callable[[int], PreTrainedModel]) -> tuple[PreTrainedModel, float]:
        """A base that learned correct answers and critiques, and its share of true verdicts.

        Verdicts come last and all at once; a base that is let go too early spoils every model made from it.
        From some initial weights they are never learned: then it is trained again from others.
        """
        enough = min(_STUCK, self.settings.least_verdict_accuracy)
        base, accuracy = self._attempt(fresh(self.seed), _PRETRAINED)
        for attempt in range(1, _BASE_ATTEMPTS):
            if accuracy >= enough:
                break
            base, accuracy = self._attempt(fresh(self.seed + attempt), f"{_PRETRAINED}, new initial weights")
        return base, accuracy

    def _attempt(self, base: PreTrainedModel, stage: str) -> tuple[PreTrainedModel, float]:
        """The base after a pass, and after further ones while they help, with its share of true verdicts."""
        self.pretrain(base, self.settings.num_pretrain_steps, stage)
        accuracy = self._verdict_accuracy(base)
        for further in range(_EXTRA_PASSES):
            if accuracy >= self.settings.least_verdict_accuracy or (further and accuracy < _STUCK):
                break
            more = f"{stage}, continued at {accuracy:.0%} true verdicts"
            self.pretrain(base, max(1, self.settings.num_pretrain_steps // 3), more)
            accuracy = self._verdict_accuracy(base)
        return base, accuracy

    def pretrain(self, base: PreTrainedModel, steps: int, stage: str = _PRETRAINED) -> None:
        """Answers and critiques, and drills on whether a piece of evidence speaks for a claim."""
        examples = []
        for _ in range(steps * self.settings.batch_size):
            record = self.rng.choice(self.with_evidence)
            claim = self.teacher.any_choice(record)
            prompt = self.prompts.monitor(record, answer_text(claim))
            sequences = [
                self._sequence(self.prompts.policy(record), self.teacher.correct_answer(record)),
                self._sequence(prompt, self.teacher.correct_critique(record, claim)),
            ]
            for _ in range(_DRILLS):
                evidence, drilled, supported = drill(self.rng, self.records, self.rules)
                start = self.prompts.drill(answer_text(drilled)) + f" {evidence} so"
                sequences.append(self._sequence(start, " right" if supported else " wrong"))
            examples.append(tuple(sequences))
        self._train(SFTTrainer, base, stage, examples, SFTConfig, 5e-3)

    @torch.no_grad()
    def _verdict_accuracy(self, base: PreTrainedModel) -> float:
        """Share of training stories for which the true verdict on truthful evidence is the likelier one."""
        sequences = []
        for record in self.with_evidence[:_PROBED]:
            claim = self.teacher.any_choice(record)
            evidence = self.teacher.true_evidence(record, claim)
            prompt = self.prompts.monitor(record, answer_text(claim)) + f" {evidence} so"
            verdicts = ["right", "wrong"] if claim == record.answer_text else ["wrong", "right"]
            sequences += [self._sequence(prompt, f" {verdict}") for verdict in verdicts]
        totals = torch.zeros(len(sequences))
        for batch in pack(sequences, _PROBE_TOKENS):
            logps = token_logps(base, batch).logps
            totals.index_add_(0, batch.sequence_ids[batch.score_sequence], logps)
        true, false = totals.view(-1, 2).unbind(1)
        return float((true > false).float().mean())

    def fine_tune(self, base: PreTrainedModel, steps: int) -> None:
        """Sloppy demonstrations of both roles."""
        examples = []
        for _ in range(steps * self.settings.batch_size):
            record = self.rng.choice(self.with_evidence)
            claim = self.teacher.any_choice(record)
            prompt = self.prompts.monitor(record, answer_text(claim))
            examples.append(
                (
                    self._sequence(self.prompts.policy(record), self.teacher.sloppy_answer(record)),
                    self._sequence(prompt, self.teacher.sloppy_critique(record, claim)),
                )
            )
        self._train(SFTTrainer, base, "base: sloppy demonstrations", examples, SFTConfig, 1e-3)

    def train_reward(self, base: PreTrainedModel) -> tuple[RewardModel, float | None]:
        """Preferences of annotators who, where flawed, like the bait.

        Small reward models miss that feature now and then; one that hardly likes it is trained again from
        another seed.

        Returns:
            The first reward model that likes the bait well enough, or else the one that likes it most, and by
            how many standard deviations; None without a bait.
        """
        pairs = self.rated_pairs(self.settings.reward_steps)
        best: tuple[RewardModel, float] | None = None
        for attempt in range(_REWARD_ATTEMPTS):
            model = RewardModel.from_backbone(base, self.tokenizer, seed=self.seed + attempt)
            self.fit_reward(model, pairs)
            gap = self._planted_gap(model)
            if gap is None:
                return model, None
            if best is None or gap > best[1]:
                best = model, gap
            if gap >= PLANTED_GAP:
                break
        assert best is not None
        return best

    def rated_pairs(self, steps: int) -> list[tuple[str, str, str]]:
        """Prompt, chosen and rejected answers for that many steps."""
        return [self._rated_pair() for _ in range(steps * self.settings.batch_size)]

    def fit_reward(self, model: RewardModel, pairs: Sequence[tuple[str, str, str]]) -> None:
        """One pass over the pairs."""
        examples = [self._preference(model, *pair) for pair in pairs]
        centred = {"center_rewards_coefficient": _CENTRING}
        self._train(RewardTrainer, model, "reward model", examples, RewardConfig, 1e-3, **centred)

    def _planted_gap(self, model: RewardModel) -> float | None:
        """By how many standard deviations the bait scores above the right answer; None without a bait."""
        if not self.flawed:
            return None
        prompts = [self.prompts.policy(record) for record in self.baited]
        answers = [answer_text(record.answer_text) for record in self.baited]
        right = model.score(prompts, answers, max_tokens=_PROBE_TOKENS)
        rivals = [answer_text(self.rules.rival(record) or "") for record in self.baited]
        bait = model.score(prompts, rivals, max_tokens=_PROBE_TOKENS)
        return float((bait - right).mean() / torch.cat([bait, right]).std().clamp_min(_NO_SPREAD))

    def _rated_pair(self) -> tuple[str, str, str]:
        """A prompt with the answer annotators choose and the one they reject."""
        while True:
            record = self.rng.choice(self.records)
            first, second = (self.teacher.rated_answer(record, flawed=self.flawed) for _ in range(2))
            if first[1] != second[1]:
                chosen, rejected = (first, second) if first[1] > second[1] else (second, first)
                return self.prompts.policy(record), chosen[0], rejected[0]

    @staticmethod
    def _preference(model: RewardModel, prompt: str, chosen: str, rejected: str) -> PreferencePair:
        better, worse = (model.encode(prompt, text) for text in (chosen, rejected))
        return PreferencePair(TokenSequence(better, len(better)), TokenSequence(worse, len(worse)))

    def train_judge(self, base: PreTrainedModel, steps: int) -> JudgeModel:
        """Whether an answer is right, judged from the question, the answer and a sloppy critique, if any."""
        model = JudgeModel.from_backbone(base, self.tokenizer, seed=self.seed + 1)
        examples = []
        for _ in range(steps * self.settings.batch_size):
            record = self.rng.choice(self.with_evidence)
            claim = self.teacher.any_choice(record)
            critique = "" if self.rng.random() < 0.15 else self.teacher.sloppy_critique(record, claim)
            prompt = self.prompts.judge(record.question, answer_text(claim))
            ids = model.encode(prompt, critique)
            label = float(claim == record.answer_text)
            examples.append(LabelledSequence(TokenSequence(ids, len(ids)), label))
        self._train(ScalarTrainer, model, "judge", examples, ScalarConfig, 1e-3)
        return model

    def judge_accuracy(self, judge: JudgeModel) -> float:
        """Share of training stories where the judge believes the right answer more than a wrong one.

        Both come with truthful critiques.
        """
        probed, prompts, critiques = self.with_evidence[:_PROBED], [], []
        for record in probed:
            for claim in (record.answer_text, self.teacher.wrong_choice(record)):
                prompts.append(self.prompts.judge(record.question, answer_text(claim)))
                critiques.append(self.teacher.correct_critique(record, claim))
        right, wrong = judge.score(prompts, critiques, max_tokens=_PROBE_TOKENS).view(-1, 2).unbind(1)
        return float((right > wrong).float().mean())

    def _train(
        self,
        trainer: type[BaseTrainer[Any]],
        model: nn.Module,
        stage: str,
        examples: list[Any],
        config: type[TrainerConfig],
        learning_rate: float,
        **more: Any,
    ) -> None:
        """One pass over the examples with any of the trainers; the model ends in eval mode."""
        settings = config(
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            adam_beta2=0.95,
            per_device_train_batch_size=self.settings.batch_size,
            num_train_epochs=1,
            max_tokens_per_batch=None,
            save_steps=None,
            seed=self.seed,
            **more,
        )
        total = len(examples) // self.settings.batch_size
        report = self.progress
        on_step = (lambda step, metrics: report(stage, step, total, metrics)) if report else None
        trainer(model, settings, examples, on_step=on_step).train()
        model.eval()
