"""Judges as reward functions: a language model on this machine, or one behind an API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import Text, UserError, model_folder
from rlhf_infer.judges.settings import FENCED_TEMPLATE, JUDGE_TEMPLATE, APISettings
from rlhf_infer.rewards.spec_parser import converter
from rlhf_infer.rewards.texts import text_of

if TYPE_CHECKING:
    import torch

    from rlhf_infer.judges.api import APIJudge
    from rlhf_infer.judges.prompted import Judge

_OWN = ("url", "model", "path", "template", "name", "dtype", "device", "cache")
API_OPTIONS: dict[str, Any] = dict.fromkeys(_OWN, str) | {
    name: converter(field.annotation) for name, field in APISettings.model_fields.items()
}
"""Options of `judge:` in a line, and what a text is turned into."""
_LOCAL = {"dtype", "device"}


class JudgeReward:
    """A judge as a reward function: P(true) in [0, 1] of a completion as the answer to its prompt.

    `critiques` names a column with a critique of each completion, or None; None if there are no critiques.
    """

    scores_open_answers = True
    is_probability = True

    def __init__(self, judge: Judge, *, critiques: str | None = None, name: str = "judge") -> None:
        self.judge, self.critiques, self.name = judge, critiques, name

    def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float | None]:
        """Scores of B completions."""
        return _known(self.judge.score(*self._asked(prompts, completions, columns)))

    def _asked(
        self, prompts: Sequence[Text], completions: Sequence[Text], columns: Mapping[str, Any]
    ) -> tuple[list[str], list[str], Sequence[str | None]]:
        if self.critiques is not None and self.critiques not in columns:
            raise UserError(
                f"reward {self.name} needs the column {self.critiques} with critiques; add it to the data",
                code="missing_column",
                column=self.critiques,
            )
        critiques = [None] * len(completions) if self.critiques is None else columns[self.critiques]
        questions, answers = ([text_of(text) for text in texts] for texts in (prompts, completions))
        return questions, answers, critiques


class APIJudgeReward(JudgeReward):
    """The same for a judge behind an API; an asynchronous reward function.

    A completion that the judge gave no readable reply about gets None; the metric `<name>/unread` is the
    share of these.
    """

    judge: APIJudge
    may_leave_out = True
    """None may mean that it could not tell; see `RewardFunctions`."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Scores of B completions.

        Raises:
            ScorerUnavailable: see `APIJudge.score`.
            UserError: there is no column of that name.
        """
        scores = _known(await self.judge.score_async(*self._asked(prompts, completions, columns)))
        if log_metric is not None:
            log_metric(f"{self.name}/unread", scores.count(None) / len(scores))
        return scores


def judge_reward(model_options: Mapping[str, Any], **options: Any) -> JudgeReward:
    """Build the judge of `judge:path=FOLDER` or `judge:url=URL,model=NAME`.

    Args:
        model_options: for a model on this machine: `device`, `dtype`, `load_in_8bit`, `load_in_4bit` and
            `max_tokens`.
        **options: see `API_OPTIONS`; `max_tokens` is of a forward pass with `path`, of a reply with `url`.
    """
    name, template = options.pop("name", "judge"), options.pop("template", None)
    if ("path" in options) == ("url" in options):
        raise UserError(
            "reward judge needs a model: write judge:path=FOLDER, or judge:url=https://HOST/v1,model=NAME "
            "for one behind an API",
            code="missing_option",
            option="path",
        )
    if "path" in options:
        return _local(options, model_options, name=name, template=template)
    from rlhf_infer.judges.api import APIJudge

    if wrong := sorted(_LOCAL & options.keys()):
        raise UserError(
            f"reward judge: {wrong[0]} goes with path, not with url; take it out",
            code="unused_option",
            option=wrong[0],
        )
    if "model" not in options:
        raise UserError(
            "reward judge needs the model's name at the API; write judge:url=URL,model=NAME",
            code="missing_option",
            option="model",
        )
    url, model, cache = options.pop("url"), options.pop("model"), options.pop("cache", None)
    if options.get("api_key_env") in ("", "null", "none"):
        options["api_key_env"] = None
    judge = APIJudge(
        url,
        model,
        APISettings.from_dict(options, where="reward judge"),
        template=template,
        cache_folder=None if cache is None else Path(cache),
    )
    return APIJudgeReward(judge, name=name)


def _local(
    options: dict[str, Any], model_options: Mapping[str, Any], *, name: str, template: str | None
) -> JudgeReward:
    from rlhf_infer.judges.prompted import PromptedJudge
    from rlhf_infer.rewards.models import MAX_TOKENS
    from rlhf_models import load_causal_lm, load_tokenizer

    path = model_folder(options.pop("path"))
    if wrong := sorted(options.keys() - _LOCAL - {"max_tokens"}):
        raise UserError(
            f"reward judge: {wrong[0]} goes with url, not with path; take it out", code="conflicting_options"
        )
    loading = {**model_options, **options}
    budget = loading.pop("max_tokens", None)
    tokenizer = load_tokenizer(path)
    chat = getattr(tokenizer, "chat_template", None) is not None
    judge = PromptedJudge(
        load_causal_lm(path, **loading),
        tokenizer,
        template=template or (FENCED_TEMPLATE if chat else JUDGE_TEMPLATE),
        max_tokens=MAX_TOKENS if budget is None else budget,
        chat=chat,
    )
    return JudgeReward(judge, name=name)


def _known(scores: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(score) else score for score in scores.tolist()]
