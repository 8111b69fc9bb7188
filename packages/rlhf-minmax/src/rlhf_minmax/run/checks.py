"""Checks of a run's models and texts before anything is loaded, built or trained."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from rlhf_algos import check_evaluations, check_trackers, require_ray, samplers
from rlhf_data import QARecord, UserError, render_prompt
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.config.scorers import JudgeConfig, RewardModelConfig
from rlhf_minmax.demo.builder import build_seconds, demo_folder, demo_tokenizer, untrained_base
from rlhf_minmax.demo.teachers import answer_text, critique_text
from rlhf_minmax.evaluation.doctor import config_findings
from rlhf_minmax.game.prompts import prompt_ids, uses_chat
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.players.players import check_players
from rlhf_minmax.run.row_checks import row_warnings
from rlhf_minmax.scorers.chat_reward import as_chat, reads_chat
from rlhf_minmax.scorers.loading import check_scorers, needs_demo, scorer_hosts, scorer_sections
from rlhf_minmax.scorers.shared_trunk import Host
from rlhf_models import (
    DeviceManager,
    brings_head,
    check_prompt_fits,
    context_length,
    encode_completion,
    encode_prompt,
    encode_scored,
    is_adapter,
    load_shape,
    quantization_config,
)

_SHOWN = 40
"""Characters of a story that identify it in messages."""
_SPELLING = 2
"""Tokens allowed for a prompted judge's " yes" or " no"."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that do not need its weights.

    Args:
        name: folder or hub name; None for one of the demonstration's, which may not be built yet.
        config: its transformers config; of an adapter, that of the model it was trained on.
        tokenizer: its tokenizer.
    """

    name: str | None
    config: PreTrainedConfig
    tokenizer: Any

    @property
    def adapter(self) -> str | None:
        """Its folder, if it is an adapter: only scorers are."""
        return self.name if self.name is not None and is_adapter(self.name) else None


@dataclass(frozen=True)
class LongestText:
    """The longest text that a role may have in its context.

    Args:
        role: whose.
        story: the beginning of the story it belongs to.
        tokens: its length, with completions at their longest.
        context: what the role's model holds; None for no limit.
    """

    role: str
    story: str
    tokens: int
    context: int | None


@dataclass(frozen=True)
class Checked:
    """A run that can be played.

    Args:
        stories: the run's, without rows that are left out.
        models: config and tokenizer of every role's model.
        longest: the longest text of every role.
        hosts: scorers that are adapters on a player's backbone, with that player.
        warnings: what is allowed but probably not meant, one sentence each.
    """

    stories: Stories
    models: dict[str, ModelInfo]
    longest: list[LongestText]
    hosts: dict[str, Host]
    warnings: list[str]


def check_run(config: MinMaxConfig, stories: Stories, devices: DeviceManager) -> Checked:
    """Check all that can be checked without weights."""
    training = config.training
    check_evaluations(training, training.eval_steps, examples=len(stories.held_out), has_run=True)
    check_trackers(training.report_to)
    cluster = samplers(config)
    if cluster is not None:
        require_ray(cluster)
    check_players(config, devices)
    check_scorers(config)
    models = inspect_models(config, stories)
    hosts = scorer_hosts(config, devices)
    ruler = Ruler(config, stories, models)
    if left_out := ruler.too_long():
        return check_run(config, stories.without(left_out), devices)
    warnings = [
        *config_findings(config, len(stories.train)),
        *row_warnings(config, stories),
        *ruler.warnings(),
    ]
    return Checked(stories, models, ruler.longest(), hosts, warnings)


def time_to_build(
    config: MinMaxConfig, checked: Checked, cache_folder: Path | None = None, *, rebuild: bool = False
) -> float | None:
    """About how many seconds it takes to build the models that the config does not name.

    Args:
        config: the run's settings.
        checked: what `check_run` returned.
        cache_folder: see `demo_models`.
        rebuild: whether what is cached is built, too.

    Returns:
        See `build_seconds`; None if there is nothing to build.
    """
    if not needs_demo(config):
        return None
    built = checked.stories.building, checked.stories.prompts, config.demo_settings()
    if demo_folder(*built, seed=config.seed, cache_folder=cache_folder).is_dir() and not rebuild:
        return None
    tokenizer = next(info.tokenizer for info in checked.models.values() if info.name is None)
    return build_seconds(*built, tokenizer, seed=config.seed)


def inspect_models(config: MinMaxConfig, stories: Stories) -> dict[str, ModelInfo]:
    """Config and tokenizer of every role's model; those of the demonstration are made without training.

    A judge that is a rule or behind an API has no model here and no entry.
    """
    scorers = scorer_sections(config)
    sections = {"policy": config.policy_model, "monitor": config.monitor_model, **scorers}
    known: dict[str | None, ModelInfo] = {}
    if needs_demo(config):
        known[None] = _demo_info(config, stories)
    infos = {}
    for role, section in sections.items():
        name = section.model_name
        scores = role in scorers and getattr(section, "kind", "head") == "head"
        if name not in known:
            known[name] = _read_info(str(name), may_be_adapter=scores)
        infos[role] = known[name]
        if name is not None:
            _check_kind(role, infos[role], scores=scores)
        quantization_config(section.load_in_8bit, getattr(section, "load_in_4bit", False))
    return infos


def _demo_info(config: MinMaxConfig, stories: Stories) -> ModelInfo:
    tokenizer = demo_tokenizer(stories.building, stories.prompts, config.demo_settings())
    with torch.device("meta"):
        base = untrained_base(tokenizer, config.demo_settings(), seed=0)
    return ModelInfo(None, base.config, tokenizer)


def _read_info(name: str, *, may_be_adapter: bool) -> ModelInfo:
    adapted = may_be_adapter and is_adapter(name)
    config, tokenizer = load_shape(name, adapted=adapted)
    if adapted:
        config.num_labels = 1
    return ModelInfo(name, config, tokenizer)


def _check_kind(role: str, info: ModelInfo, *, scores: bool) -> None:
    """Refuse a language model where a scoring model is expected, and vice versa."""
    if info.adapter is not None and brings_head(info.adapter):
        return
    kind = (info.config.architectures or ["model of unknown kind"])[0]
    is_classifier = kind.endswith("Classification")
    if scores and not (is_classifier and info.config.num_labels == 1):
        raise UserError(
            f"the {role} model {info.name} is a {kind}, which gives no single score; "
            "expected a sequence classification model with num_labels 1",
            code="wrong_model_kind",
        )
    if not scores and is_classifier:
        raise UserError(
            f"the {role} model {info.name} is a {kind}, which writes no text; "
            "expected a causal language model",
            code="wrong_model_kind",
        )


class Ruler:
    """Measures a run's texts in tokens of each role's tokenizer, with completions at their longest.

    `models` is what `inspect_models` returned.
    """

    def __init__(self, config: MinMaxConfig, stories: Stories, models: dict[str, ModelInfo]) -> None:
        self.config, self.stories, self.models = config, stories, models
        self._made_up: dict[tuple[str, str], int] = {}

    def policy_prompt(self, record: QARecord, role: str = "policy") -> list[int]:
        """Token ids of the policy's prompt, as a role's tokenizer reads it."""
        tokenizer, text = self.models[role].tokenizer, self.stories.prompts.policy(record)
        if role != "policy":
            return encode_prompt(tokenizer, text)
        return prompt_ids(tokenizer, text, self.config.policy_model)

    def monitor_prompt(self, record: QARecord, answer: list[int]) -> list[int]:
        """Token ids of the monitor's prompt about an answer that is given in token ids."""
        tokenizer, prompts = self.models["monitor"].tokenizer, self.stories.prompts
        text = render_prompt(record, prompts.dataset)
        if uses_chat(tokenizer, self.config.monitor_model):
            return prompt_ids(tokenizer, prompts.monitor(record, ""), self.config.monitor_model) + answer
        ids: list[int] = []
        for literal, field, _, _ in string.Formatter().parse(prompts.monitor_template):
            for piece in (literal, text if field == "prompt" else ""):
                if piece:
                    ids += encode_completion(tokenizer, piece) if ids else encode_prompt(tokenizer, piece)
            ids += answer if field == "answer" else []
        return ids

    def answer_length(self, record: QARecord, role: str) -> int:
        """Tokens of the longest answer about a record: the policy's, or one made up for the monitor."""
        made_up = (self._made_up_length(role, choice) for choice in record.choices)
        return max(self.config.policy_model.max_new_tokens, *made_up)

    def _made_up_length(self, role: str, choice: str) -> int:
        if (role, choice) not in self._made_up:
            made_up = self.stories.prompts.made_up(choice)
            ids = encode_completion(self.models[role].tokenizer, made_up)
            self._made_up[role, choice] = len(ids)
        return self._made_up[role, choice]

    def length(self, role: str, record: QARecord) -> int:
        """Tokens of the longest text that a role may have in its context."""
        critique = self.config.monitor_model.max_new_tokens
        if role == "policy":
            return len(self.policy_prompt(record)) + self.config.policy_model.max_new_tokens
        answer = self.answer_length(record, role)
        if role == "monitor":
            return len(self.monitor_prompt(record, [0] * answer)) + critique
        scorer = scorer_sections(self.config)[role]
        if isinstance(scorer, RewardModelConfig):
            return len(self._reward_prompt(role, scorer, record)) + answer
        return self._judge_prompt(role, scorer, record) + answer + critique

    def _reward_prompt(self, role: str, reward: RewardModelConfig, record: QARecord) -> list[int]:
        """Token ids of what a reward model reads in addition to the answer."""
        tokenizer = self.models[role].tokenizer
        chats = uses_chat(self.models["policy"].tokenizer, self.config.policy_model)
        if not reads_chat(reward, tokenizer, policy_chats=chats):
            return self.policy_prompt(record, role)
        return encode_scored(tokenizer, *as_chat(self.stories.prompts.policy(record), ""), append_eos=False)

    def _judge_prompt(self, role: str, judge: JudgeConfig, record: QARecord) -> int:
        """Tokens of what a judge reads in addition to answer and critique."""
        tokenizer = self.models[role].tokenizer
        if judge.kind == "head":
            return len(encode_prompt(tokenizer, self.stories.prompts.judge(record.question, "")))
        text = judge.question_template.format(question=record.question, answer="", critique="")
        return len(prompt_ids(tokenizer, text, judge)) + _SPELLING

    @cached_property
    def _lengths(self) -> dict[str, list[tuple[int, QARecord]]]:
        """Length and record of every training and held-out story, by role."""
        records = (*self.stories.train, *self.stories.held_out)
        return {role: [(self.length(role, record), record) for record in records] for role in self.models}

    def too_long(self) -> dict[str, str]:
        """The rows whose texts do not fit a role's context, by their place, and what is wrong with each."""
        found: dict[str, str] = {}
        for role, lengths in self._lengths.items():
            for tokens, record in lengths:
                try:
                    check_prompt_fits(self.models[role].config, tokens, _what(role, record))
                except UserError as error:
                    if self.config.data.on_bad_row == "error" or not record.where:
                        hint = "; or skip such rows (--on-bad-row skip)" if record.where else ""
                        raise UserError(f"{error}{hint}", code=error.code, **error.fields) from None
                    found.setdefault(record.where, str(error))
        return found

    def longest(self) -> list[LongestText]:
        """The longest text of every role, over training and held-out stories."""
        found = []
        for role, lengths in self._lengths.items():
            tokens, record = max(lengths, key=lambda pair: pair[0])
            context = context_length(self.models[role].config)
            found.append(LongestText(role, _shown(record), tokens, context))
        return found

    def warnings(self) -> list[str]:
        """Warnings that `max_new_tokens` would cut off texts, or that made-up answers cannot be parsed."""
        train, rules = self.stories.labelled, self.stories.prompts.rules
        answers = [answer_text(r.answer_text) for r in train]
        if self.models["policy"].name is not None:
            answers = [f" {record.answer_text}" for record in train]
        evidence = [rules.correct_evidence(record) for record in train]
        critiques = [critique_text(each, "wrong") for each in evidence if each is not None]
        found = (
            self._cut_off("policy", answers, self.config.policy_model.max_new_tokens, "right answers"),
            self._cut_off(
                "monitor",
                critiques,
                self.config.monitor_model.max_new_tokens,
                "critiques with a whole sentence",
            ),
        )
        return [text for text in (*found, self._unread()) if text]

    def _unread(self) -> str | None:
        """A warning if made-up answers are not parsed as their own choice; checked on the probe stories."""
        prompts, records = self.stories.prompts, self.stories.labelled[: self.config.data.probe_stories]
        texts = [(prompts.made_up(record.answer_text), record) for record in records]
        unread = [text for text, record in texts if prompts.rules.claim(record, text) != record.answer_text]
        if not unread:
            return None
        return (
            f"{len(unread)} of {len(texts)} made-up right answers, such as {unread[0]!r}, do not read as the "
            "choice they name and count as wrong; give game.answer_template words that are in no choice"
        )

    def _cut_off(self, role: str, texts: list[str], limit: int, what: str) -> str | None:
        lengths = [len(encode_completion(self.models[role].tokenizer, text)) + 1 for text in texts]
        long = [length for length in lengths if length > limit]
        if not long:
            return None
        return (
            f"{len(long)} of {len(texts)} {what} would be cut off by {role}_model.max_new_tokens {limit}; "
            f"they need up to {max(long)}"
        )


def _shown(record: QARecord) -> str:
    return record.story if len(record.story) <= _SHOWN else f"{record.story[:_SHOWN]}…"


def _what(role: str, record: QARecord) -> str:
    """Name of a role's longest text about a record, for messages."""
    where = f"{record.where}: " if record.where else ""
    return (
        f"{where}the longest text of the {role} (story {_shown(record)!r}, completions of max_new_tokens "
        "included)"
    )
