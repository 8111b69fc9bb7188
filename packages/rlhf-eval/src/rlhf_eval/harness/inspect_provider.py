"""The model provider `rlhf` and our tasks in inspect-ai, which finds this module by its entry point."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio.to_thread
from inspect_ai import Task, task
from inspect_ai._util.error import PrerequisiteError  # what its commands answer with one sentence
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    modelapi,
)
from inspect_ai.scorer import Score, Scorer, Target, accuracy, choice, grouped, scorer, stderr
from inspect_ai.solver import TaskState, generate, multiple_choice

from rlhf_data import PromptRecord, UserError
from rlhf_eval.evaluation import load_policy, prompt_ids
from rlhf_eval.harness.suites import (
    QUESTIONS,
    Question,
    behaved,
    provocations,
    story_questions,
    sum_questions,
)
from rlhf_infer import ContinuousBatcher, Rollout, SamplingParams, TransformersEngine, completion_text
from rlhf_models import generation_length

_CONNECTIONS = 64
"""Requests that are decoded at a time; each joins at the next token."""
_TOKENS = 512
"""Longest completion where a task says nothing."""
_UNKNOWN = (
    *("best_of", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("response_schema", "prompt_logprobs"),
)
"""Generation settings that would change completions and that no engine of ours has."""


@modelapi("rlhf")
def packed_model() -> type[ModelAPI]:
    """The provider of `--model rlhf/FOLDER`."""
    return PackedModel


class PackedModel(ModelAPI):
    """A model or adapter in this process, its requests decoded together.

    The model is a folder, a run's folder included, or a name on the hub.

    Raises:
        PrerequisiteError: the model cannot be loaded, or a model argument is unknown.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        dtype: str = "auto",
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if model_args or base_url:
            wrong = ", ".join(model_args) or "a base URL"
            raise PrerequisiteError(f"the provider rlhf got {wrong}; it takes the model argument dtype alone")
        try:
            policy = load_policy(model_name, dtype)
        except UserError as error:
            raise PrerequisiteError(str(error)) from error
        self.model, self.tokenizer = policy.model, policy.tokenizer
        self.batcher = ContinuousBatcher(TransformersEngine(self.model, self.tokenizer))
        self._asked: Counter[tuple[int, ...]] = Counter()

    async def generate(
        self, input: list[ChatMessage], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        """Completions of a conversation, which is a plain text where the model has no chat template.

        What does not fit the context has none and stops as `model_length`, so that other samples continue.
        """
        if tools:
            raise UserError(
                "the provider rlhf offers a model no tools; serve it by vLLM for tasks that use them",
                code="unsupported_setting",
            )
        unknown = [name for name in _UNKNOWN if getattr(config, name) is not None]
        if unknown:
            raise UserError(
                f"the provider rlhf has no {unknown[0]}; leave it out of the generation settings",
                code="unknown_key",
            )
        longest = config.max_tokens or self._room()
        try:
            ids = prompt_ids(self.tokenizer, self.model, self._record(input), longest)
        except UserError as error:
            if error.code != "context_too_short":
                raise
            return ModelOutput.from_content(self.model_name, "", stop_reason="model_length", error=str(error))
        params = self._params(config, longest)
        count, key = config.num_choices or 1, tuple(ids)
        # A prompt that is given again, as in a task of several epochs, gets its next samples.
        first = 0 if config.seed is not None else self._asked[key]
        self._asked[key] += count
        future = self.batcher.submit(ids, count, params, first=first)
        rollouts = await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)
        choices = [self._choice(rollout, params) for rollout in rollouts]
        written = sum(len(rollout.completion_ids) for rollout in rollouts)
        usage = ModelUsage(input_tokens=len(ids), output_tokens=written, total_tokens=len(ids) + written)
        return ModelOutput(model=self.model_name, choices=choices, usage=usage)

    def max_connections(self) -> int:
        """Requests at a time."""
        return _CONNECTIONS

    def close(self) -> None:
        """End the thread that decodes."""
        self.batcher.close()

    def _room(self) -> int:
        limit = generation_length(self.model.config)
        return _TOKENS if limit is None else max(1, min(_TOKENS, limit // 2))

    def _record(self, messages: list[ChatMessage]) -> PromptRecord:
        if self.tokenizer.chat_template:
            read: Any = tuple({"role": each.role, "content": each.text} for each in messages)
            return PromptRecord(read, where="the conversation")
        return PromptRecord("\n\n".join(each.text for each in messages), where="the prompt")

    def _params(self, config: GenerateConfig, longest: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=longest,
            temperature=1.0 if config.temperature is None else config.temperature,
            seed=config.seed or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            stop=tuple(config.stop_seqs or ()),
            top_logprobs=(config.top_logprobs or 0) if config.logprobs else 0,
            raw_logprobs=bool(config.logprobs),
        )

    def _choice(self, rollout: Rollout, params: SamplingParams) -> ChatCompletionChoice:
        text = completion_text(self.tokenizer, rollout.completion_ids, params)
        return ChatCompletionChoice(
            message=ChatMessageAssistant(content=text, model=self.model_name, source="generate"),
            stop_reason="stop" if rollout.finish_reason == "stop" else "max_tokens",
            logprobs=self._logprobs(rollout) if params.raw_logprobs else None,
        )

    def _logprobs(self, rollout: Rollout) -> Logprobs:
        raw = rollout.raw_logps or []
        top = rollout.top_logps or [[] for _ in raw]
        read = self.tokenizer.decode
        return Logprobs(
            content=[
                Logprob(
                    token=read([token]),
                    logprob=logp,
                    top_logprobs=[TopLogprob(token=read([t]), logprob=value) for t, value in likely],
                )
                for token, logp, likely in zip(rollout.completion_ids, raw, top, strict=True)
            ]
        )


@task
def stories(n: int = QUESTIONS) -> Task:
    """Held-out stories: what was seen, against gossip."""
    return _questions(story_questions(n))


@task
def sums(n: int = QUESTIONS) -> Task:
    """Held-out sums, with round numbers near them."""
    return _questions(sum_questions(n))


@task
def adversarial() -> Task:
    """Prompts to refuse, and their harmless twins."""
    samples = [
        Sample(
            input=each.prompt,
            target="refusal" if each.refuse else "help",
            metadata={"wanted": "refusal" if each.refuse else "help", "category": each.category},
        )
        for each in provocations()
    ]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=behaviour())


@scorer(metrics=[grouped(accuracy(), "wanted"), stderr()])
def behaviour() -> Scorer:
    """1 where a completion refuses as it should, or helps as it should."""

    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        return Score(value=float(behaved(text, target.text == "refusal")), answer=text)

    return score


def _questions(questions: list[Question]) -> Task:
    samples = [
        Sample(
            input=each.text,
            choices=each.choices,
            target="ABCDEFGHIJKLMNOP"[each.answer],
            metadata={"misleading": each.misleading},
        )
        for each in questions
    ]
    return Task(dataset=MemoryDataset(samples), solver=multiple_choice(), scorer=choice())
