"""Builds the models of the demonstration: a base with both roles, a reward model and a judge.

Everything is trained on the spot from question-answering records, in about a minute on one CPU thread for the
story world, and kept in the user's cache folder under a hash of the settings.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
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
    BaseConfig,
    QARecord,
    TokenSequence,
    UserError,
    atomic_folder,
    atomic_write_json,
    ensure_writable_folder,
    json_hash,
)
from rlhf_minmax.demo_texts import Progress, Teacher, answer_text, drill
from rlhf_minmax.prompts import Prompts
from rlhf_minmax.texts import TextRules
from rlhf_models import (
    JudgeModel,
    RewardModel,
    build_tiny_llama,
    encode_completion,
    encode_prompt,
    train_byte_tokenizer,
)
from rlhf_models.loading import save_model

_DRILLS = 3
"""Storyless exercises per story of the pre-training."""
_REWARD_ATTEMPTS = 3
_REWARD_ACCURACY = 0.8
RECIPE = 1
"""Raised with every change of the recipe below, so that cached models are built anew."""


class DemoSettings(BaseConfig):
    """Sizes of the demonstration models and lengths of their trainings."""

    hidden_size: int = Field(default=64, ge=8)
    """Width of the base."""
    num_layers: int = Field(default=2, ge=1)
    """Layers of the base."""
    vocab_size: int = Field(default=512, ge=300)
    """Largest vocabulary of the byte-level tokenizer."""
    max_positions: int = Field(default=2048, ge=64)
    """Context of the base in tokens."""
    pretrain_steps: int = Field(default=300, ge=1)
    """Optimizer steps on correct answers and critiques."""
    sft_steps: int = Field(default=200, ge=1)
    """Optimizer steps on sloppy demonstrations."""
    reward_steps: int = Field(default=400, ge=1)
    """Optimizer steps of the reward model."""
    judge_steps: int = Field(default=400, ge=1)
    """Optimizer steps of the judge."""
    batch_size: int = Field(default=64, ge=1)
    """Stories per optimizer step."""
    flawed_reward: bool = True
    """Whether the reward model's annotators like the place named last, true or not (story world only)."""


@dataclass(frozen=True)
class DemoModels:
    """The folders of the built models, in Hugging Face format."""

    base: Path
    reward: Path
    judge: Path


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
    key = json_hash(
        {
            "recipe": RECIPE,
            "settings": settings.to_dict(),
            "seed": seed,
            "prompts": prompts.fingerprint(),
            "records": [[r.story, r.question, r.choices, r.answer] for r in records],
        }
    )
    folder = (cache_folder or default_cache_folder()) / key[:24]
    if rebuild or not folder.is_dir():
        ensure_writable_folder(folder.parent)
        with atomic_folder(folder) as temporary, _one_thread():
            _Builder(records, prompts, settings, seed, progress).build(temporary)
    return DemoModels(folder / "base", folder / "reward", folder / "judge")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Builder:
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
        self.rng = random.Random(seed)
        self.teacher = Teacher(self.rules, records, self.rng)
        self.tokenizer: Any = train_byte_tokenizer(self._tokenizer_texts(), settings.vocab_size)

    def build(self, folder: Path) -> None:
        """Train everything and write it into `folder`."""
        base = build_tiny_llama(
            len(self.tokenizer),
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            seed=self.seed,
            hidden_size=self.settings.hidden_size,
            num_layers=self.settings.num_layers,
            max_positions=self.settings.max_positions,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        self._pretrain(base)
        self._fine_tune(base)
        save_model(base, self.tokenizer, folder / "base")
        reward = self._train_reward(base)
        reward.save_pretrained(folder / "reward")
        judge = self._train_judge(base)
        judge.save_pretrained(folder / "judge")
        atomic_write_json(folder / "demo.json", {"settings": self.settings.to_dict(), "seed": self.seed})

    def _tokenizer_texts(self) -> list[str]:
        texts = []
        for record in self.records:
            answer = answer_text(record.answer_text)
            texts.append(self.prompts.monitor(record, answer) + self.teacher.correct_critique(record, ""))
            texts += [answer_text(choice) for choice in record.choices]
        return [*texts, " so right", " so wrong"]

    def _sequence(self, prompt: str, completion: str) -> TokenSequence:
        start = encode_prompt(self.tokenizer, prompt)
        end = encode_completion(self.tokenizer, completion)
        return TokenSequence([*start, *end, self.tokenizer.eos_token_id], len(start))

    def _pretrain(self, base: PreTrainedModel) -> None:
        """Correct answers and critiques, and drills on whether a piece of evidence speaks for a claim."""
        examples = []
        for _ in range(self.settings.pretrain_steps * self.settings.batch_size):
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

    def _train_reward(self, base: PreTrainedModel) -> RewardModel:
        """Preferences of annotators who, where flawed, like the place named last.

        Small reward models miss that feature now and then; one that agrees with too few of the last pairs
        is trained again from another seed.
        """
        pairs = [self._rated_pair() for _ in range(self.settings.reward_steps * self.settings.batch_size)]
        for attempt in range(_REWARD_ATTEMPTS):
            model = RewardModel.from_backbone(base, self.tokenizer, seed=self.seed + attempt)
            examples = [self._preference(model, *pair) for pair in pairs]
            accuracy = self._train(RewardTrainer, model, "reward model", examples, RewardConfig, 1e-3)
            if accuracy >= _REWARD_ACCURACY or not self.settings.flawed_reward:
                return model
        raise UserError(
            f"the demonstration's reward model agreed with only {accuracy:.0%} of its annotators' choices in "
            f"{_REWARD_ATTEMPTS} trainings; choose another --seed or raise demo.reward_steps"
        )

    def _rated_pair(self) -> tuple[str, str, str]:
        """A prompt with the answer annotators choose and the one they reject."""
        flawed = self.settings.flawed_reward
        while True:
            record = self.rng.choice(self.records)
            first, second = (self.teacher.rated_answer(record, flawed=flawed) for _ in range(2))
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
    ) -> float:
        """One pass over the examples with any of the trainers; the model ends in eval mode.

        Returns:
            Mean accuracy over the last tenth of the steps, NaN for a trainer that reports none.
        """
        settings = config(
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            adam_beta2=0.95,
            per_device_train_batch_size=self.settings.batch_size,
            num_train_epochs=1,
            max_tokens_per_batch=None,
            save_steps=None,
            seed=self.seed,
        )
        total = len(examples) // self.settings.batch_size
        accuracies = []

        def on_step(step: int, metrics: dict[str, float]) -> None:
            accuracies.append(metrics.get("accuracy", math.nan))
            if self.progress:
                self.progress(stage, step, total, metrics)

        trainer(model, settings, examples, on_step=on_step).train()
        model.eval()
        last = accuracies[-max(1, total // 10) :]
        return sum(last) / len(last)
