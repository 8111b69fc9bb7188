"""Prompts of the players and the judge for a record."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_data import Encoder, QADatasetConfig, QARecord, UserError, render_prompt
from rlhf_infer import Rollout
from rlhf_minmax.config.run import PlayerConfig
from rlhf_minmax.config.scorers import JudgeConfig
from rlhf_minmax.formats import ANSWER_TEMPLATE, MONITOR_TEMPLATE, POLICY_TEMPLATE, TextRules
from rlhf_models import encode_completion, encode_prompt


@dataclass(frozen=True)
class Prompts:
    """The templates of one run, and the rules of its data set.

    Args:
        dataset: the data set's own template.
        rules: rules for its answers and evidence.
        policy_template: prompt of the policy, from `{prompt}`.
        monitor_template: prompt of the monitor, from `{prompt}` and `{answer}` (with its leading space).
        answer_template: a made-up answer, from `{choice}`.
    """

    dataset: QADatasetConfig
    rules: TextRules
    policy_template: str = POLICY_TEMPLATE
    monitor_template: str = MONITOR_TEMPLATE
    answer_template: str = ANSWER_TEMPLATE

    def policy(self, record: QARecord) -> str:
        """Prompt of the policy."""
        return self.policy_template.format(prompt=render_prompt(record, self.dataset))

    def monitor(self, record: QARecord, answer: str) -> str:
        """Prompt of the monitor."""
        return self.monitor_template.format(prompt=render_prompt(record, self.dataset), answer=answer)

    def made_up(self, choice: str) -> str:
        """The answer that claims a choice, where the policy has not written one."""
        return self.answer_template.format(choice=choice)

    def judge(self, question: str, answer: str) -> str:
        """Prompt of the judge before the critique; it never contains the story."""
        return f"{question}\nanswer:{answer}\ncritique:"

    def drill(self, answer: str) -> str:
        """The monitor's prompt without a story."""
        return self.monitor_template.format(prompt="", answer=answer)

    def fingerprint(self) -> list[str]:
        """Identity of the demonstration's texts, for cache keys."""
        return [
            self.dataset.prompt_template,
            self.dataset.choice_separator,
            type(getattr(self.rules, "own", self.rules)).__name__,
            self.policy_template,
            self.monitor_template,
            *_source_of(self.rules),
        ]


def _source_of(rules: TextRules) -> list[str]:
    """The text of the module that rules of the user's come from, and of its own modules that it imports.

    Nothing for rules of this package.
    """
    kind = type(getattr(rules, "own", rules))
    if kind.__module__.startswith("rlhf_minmax."):
        return []
    return _sources(Path(inspect.getfile(kind)).resolve(), set())


def _sources(path: Path, seen: set[Path]) -> list[str]:
    """The text of a module, and of those in its folder or below that it imports."""
    seen.add(path)
    text = path.read_text(encoding="utf-8")
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
    files = [path.parent / f"{name.strip('.').replace('.', '/')}.py" for name in names]
    found = [text]
    for file in files:
        if file.is_file() and file not in seen:
            found += _sources(file, seen)
    return found


def prompt_ids(tokenizer: Any, text: str, model: PlayerConfig | JudgeConfig) -> list[int]:
    """Token ids of the prompt of a player or a prompted judge: plain text, or a user's message.

    The message ends where the reply starts.
    """
    if not uses_chat(tokenizer, model):
        return encode_prompt(tokenizer, text)
    return Encoder(tokenizer).prompt([{"role": "user", "content": text}])


def uses_chat(tokenizer: Any, model: PlayerConfig | JudgeConfig) -> bool:
    """Whether the prompts of a player or a prompted judge go through its chat template."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if model.chat and not has_template:
        role = "judge" if isinstance(model, JudgeConfig) else "player"
        raise UserError(
            f"chat is true for a {role} whose tokenizer has no chat template; set chat false, or take an "
            "instruction-tuned model",
            code="no_chat_template",
        )
    return has_template if model.chat is None else model.chat


def verdict_probability(tokenizer: Any, verdict: str, rollout: Rollout) -> float:
    """Probability with which a critique's verdict word was sampled: the product over the word's tokens."""
    length = len(encode_completion(tokenizer, " " + verdict))
    ids = rollout.completion_ids
    for end in range(len(ids), length - 1, -1):
        if tokenizer.decode(ids[end - length : end]).strip().startswith(verdict):
            return float(torch.tensor(rollout.logps[end - length : end]).sum().exp())
    return 0.5
