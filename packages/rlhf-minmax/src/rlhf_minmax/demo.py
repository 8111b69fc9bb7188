"""Builds the models of the demonstration: a base with both roles, a reward model and a judge.

Everything is trained on the spot from question-answering records, in about a minute on one CPU thread for a
procedural world, and kept in the user's cache folder under a hash of the settings.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_algos import (
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
from rlhf_data import (
    QARecord,
    TokenSequence,
    UserError,
    atomic_folder,
    atomic_write_json,
    ensure_writable_folder,
    json_hash,
    pack,
)
from rlhf_minmax.config import DemoSettings
from rlhf_minmax.demo_texts import Progress, Teacher, answer_text, drill
from rlhf_minmax.prompts import Prompts
from rlhf_minmax.texts import TextRules
from rlhf_models import (
    JudgeModel,
    RewardModel,
    build_tiny_llama,
    encode_completion,
    encode_prompt,
    token_logps,
    train_byte_tokenizer,
)
from rlhf_models.loading import save_model

_DRILLS = 3
"""Storyless exercises per story of the pre-training."""
_EXTRA_PASSES = 3
_VERDICT_ACCURACY = 0.98
_REWARD_ATTEMPTS = 3
_PLANTED_GAP = 1.0
_CENTRING = 0.02
"""Ties the rewards of every story to one mean, so that their spread is that of answers, not of stories."""
_PROBED = 256
"""Training stories on which built models are checked."""
_PROBE_TOKENS = 16384
RECIPE = 6
"""Raised with every change of the recipe below, so that cached models are built anew."""


@dataclass(frozen=True)
class DemoModels:
    """The folders of the built models, in Hugging Face format; a held-out reward model only where wanted."""

    base: Path
    reward: Path
    judge: Path
    held_out_reward: Path | None = None


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rlhf/demo`, by default `~/.cache/rlhf/demo`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlhf" / "demo"


def demo_models(
    records: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    cache_folder: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> DemoModels:
    """The demonstration models for these records, from the cache or built now.

    Args:
        records: training records; nothing else is learned from.
        prompts: how records are put to the players, with the data set's rules.
        settings: sizes and lengths.
        seed: of weights, texts and orders; part of the cache key.
        cache_folder: where built models are kept.
        rebuild: build even what is cached.
        progress: told of every training step.
    """
    folder = demo_folder(records, prompts, settings, seed=seed, cache_folder=cache_folder)
    if rebuild or not folder.is_dir():
        ensure_writable_folder(folder.parent)
        with atomic_folder(folder) as temporary, one_thread():
            DemoBuilder(records, prompts, settings, seed, progress).build(temporary)
    return DemoModels(folder / "base", folder / "reward", folder / "judge")


def demo_folder(
    records: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    cache_folder: Path | None = None,
) -> Path:
    """Where `demo_models` keeps what it builds from these arguments."""
    key = json_hash(
        {
            "recipe": RECIPE,
            "settings": settings.to_dict(),
            "seed": seed,
            "prompts": prompts.fingerprint(),
            "records": [[r.story, r.question, r.choices, r.answer] for r in records],
        }
    )
    return (cache_folder or default_cache_folder()) / key[:24]


def demo_tokenizer(records: Sequence[QARecord], prompts: Prompts, settings: DemoSettings) -> Any:
    """The byte-level tokenizer of the demonstration models, trained on everything they are shown."""
    teacher = Teacher(prompts.rules, records, random.Random(0))
    texts = []
    for record in records:
        answer = answer_text(record.answer_text)
        texts.append(prompts.monitor(record, answer) + teacher.correct_critique(record, ""))
        texts += [answer_text(choice) for choice in record.choices]
    return train_byte_tokenizer([*texts, " so right", " so wrong"], settings.vocab_size)


def untrained_base(tokenizer: Any, settings: DemoSettings, *, seed: int) -> PreTrainedModel:
    """The base of the demonstration models as it is before its first training step."""
    return build_tiny_llama(
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        max_positions=settings.max_positions,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )


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
    """One build: tokenizer, base (pre-training, then sloppy demonstrations), reward model, judge."""

    def __init__(
        self,
        records: Sequence[QARecord],
        prompts: Prompts,
        settings: DemoSettings,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.records, self.prompts, self.settings, self.seed = records, prompts, settings, seed
        self.progress = progress
        self.rules: TextRules = prompts.rules
        self.baited = [record for record in records[:_PROBED] if self.rules.is_hack(record, None) is not None]
        self.flawed = settings.flawed_reward and bool(self.baited)
        self.rng = random.Random(seed)
        self.teacher = Teacher(self.rules, records, self.rng)
        self.tokenizer = demo_tokenizer(records, prompts, settings)

    def build(self, folder: Path) -> None:
        """Train everything and write it into `folder`."""
        base = untrained_base(self.tokenizer, self.settings, seed=self.seed)
        self._pretrain(base)
        self._fine_tune(base)
        save_model(base, self.tokenizer, folder / "base")
        reward = self.train_reward(base)
        reward.save_pretrained(folder / "reward")
        judge = self._train_judge(base)
        judge.save_pretrained(folder / "judge")
        atomic_write_json(folder / "demo.json", {"settings": self.settings.to_dict(), "seed": self.seed})

    def _sequence(self, prompt: str, completion: str) -> TokenSequence:
        start = encode_prompt(self.tokenizer, prompt)
        end = encode_completion(self.tokenizer, completion)
        return TokenSequence([*start, *end, self.tokenizer.eos_token_id], len(start))

    def _pretrain(self, base: PreTrainedModel) -> None:
        """Correct answers and critiques, for as long as verdicts need.

        Verdicts come last and all at once; a base that is let go too early spoils every model made from it.
        """
        self._pretrain_pass(base, self.settings.pretrain_steps)
        for _ in range(_EXTRA_PASSES):
            if self._verdict_accuracy(base) >= _VERDICT_ACCURACY:
                return
            self._pretrain_pass(base, max(1, self.settings.pretrain_steps // 3))

    def _pretrain_pass(self, base: PreTrainedModel, steps: int) -> None:
        """Answers and critiques, and drills on whether a piece of evidence speaks for a claim."""
        examples = []
        for _ in range(steps * self.settings.batch_size):
            record = self.rng.choice(self.records)
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
        self._train(SFTTrainer, base, "base: correct answers and critiques", examples, SFTConfig, 5e-3)

    @torch.no_grad()
    def _verdict_accuracy(self, base: PreTrainedModel) -> float:
        """Share of training stories for which the true verdict on truthful evidence is the likelier one."""
        sequences = []
        for record in self.records[:_PROBED]:
            claim = self.teacher.any_choice(record)
            evidence = self.rules.correct_evidence(record)
            prompt = self.prompts.monitor(record, answer_text(claim)) + f" {evidence} so"
            verdicts = ["right", "wrong"] if claim == record.answer_text else ["wrong", "right"]
            sequences += [self._sequence(prompt, f" {verdict}") for verdict in verdicts]
        totals = torch.zeros(len(sequences))
        for batch in pack(sequences, _PROBE_TOKENS):
            logps = token_logps(base, batch).logps
            totals.index_add_(0, batch.sequence_ids[batch.score_sequence], logps)
        true, false = totals.view(-1, 2).unbind(1)
        return float((true > false).float().mean())

    def _fine_tune(self, base: PreTrainedModel) -> None:
        """Sloppy demonstrations of both roles."""
        examples = []
        for _ in range(self.settings.sft_steps * self.settings.batch_size):
            record = self.rng.choice(self.records)
            claim = self.teacher.any_choice(record)
            prompt = self.prompts.monitor(record, answer_text(claim))
            examples.append(
                (
                    self._sequence(self.prompts.policy(record), self.teacher.sloppy_answer(record)),
                    self._sequence(prompt, self.teacher.sloppy_critique(record, claim)),
                )
            )
        self._train(SFTTrainer, base, "base: sloppy demonstrations", examples, SFTConfig, 1e-3)

    def train_reward(self, base: PreTrainedModel) -> RewardModel:
        """Preferences of annotators who, where flawed, like the bait.

        Small reward models miss that feature now and then; one that hardly likes it is trained again from
        another seed.
        """
        pairs = [self._rated_pair() for _ in range(self.settings.reward_steps * self.settings.batch_size)]
        for attempt in range(_REWARD_ATTEMPTS):
            model = RewardModel.from_backbone(base, self.tokenizer, seed=self.seed + attempt)
            examples = [self._preference(model, *pair) for pair in pairs]
            self._train(
                RewardTrainer,
                model,
                "reward model",
                examples,
                RewardConfig,
                1e-3,
                center_rewards_coefficient=_CENTRING,
            )
            gap = self._planted_gap(model)
            if gap is None or gap >= _PLANTED_GAP:
                return model
        raise UserError(
            f"the demonstration's reward model likes the planted flaw by only {gap:.2f} standard deviations "
            f"after {_REWARD_ATTEMPTS} trainings; choose another --seed or raise demo.reward_steps"
        )

    def _planted_gap(self, model: RewardModel) -> float | None:
        """By how many standard deviations the bait scores above the right answer; None without a bait."""
        if not self.flawed:
            return None
        prompts = [self.prompts.policy(record) for record in self.baited]
        answers = [answer_text(record.answer_text) for record in self.baited]
        right = model.score(prompts, answers, max_tokens=_PROBE_TOKENS)
        rivals = [answer_text(self.rules.rival(record) or "") for record in self.baited]
        bait = model.score(prompts, rivals, max_tokens=_PROBE_TOKENS)
        return float((bait - right).mean() / torch.cat([bait, right]).std())

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

    def _train_judge(self, base: PreTrainedModel) -> JudgeModel:
        """Whether an answer is right, judged from the question, the answer and a sloppy critique, if any."""
        model = JudgeModel.from_backbone(base, self.tokenizer, seed=self.seed + 1)
        examples = []
        for _ in range(self.settings.judge_steps * self.settings.batch_size):
            record = self.rng.choice(self.records)
            claim = self.teacher.any_choice(record)
            critique = "" if self.rng.random() < 0.15 else self.teacher.sloppy_critique(record, claim)
            prompt = self.prompts.judge(record.question, answer_text(claim))
            ids = model.encode(prompt, critique)
            label = float(claim == record.answer_text)
            examples.append(LabelledSequence(TokenSequence(ids, len(ids)), label))
        self._train(ScalarTrainer, model, "judge", examples, ScalarConfig, 1e-3)
        return model

    def _train(
        self,
        trainer: Any,
        model: Any,
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
