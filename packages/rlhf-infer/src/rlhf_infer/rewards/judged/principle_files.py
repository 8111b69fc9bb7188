"""Constitutions in files, and the judges that their texts are put to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import BaseConfig, UserError, load_config_file
from rlhf_infer.rewards.conventions import RewardFunction
from rlhf_infer.rewards.judged.constitutional import PRINCIPLE_TEMPLATE, Principle

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FromSpec = Callable[[str], RewardFunction]


class PrincipleConfig(BaseConfig):
    """One principle: at most one of `keywords`, `pattern` and `function`; without, a judge reads its text."""

    name: str
    """Name in metrics, after `constitution/`."""

    weight: float = 1.0
    """Weight of its score in the total."""

    text: str = ""
    """The principle's wording; a judge is asked about it."""

    keywords: tuple[str, ...] | None = None
    """Words or phrases that are looked for, whole and in any case."""

    pattern: str | None = None
    """Regular expression that is looked for, in any case."""

    found: float = -1.0
    """Score where keyword or pattern is found."""

    absent: float = 0.0
    """Score where it is not."""

    function: str | None = None
    """Reward function, as `--reward` names it: a rule, `pkg.mod:function`, a model, a URL."""


def load_principle_texts(path: str | Path) -> list[str]:
    """The wordings of the principles in a file.

    Raises:
        UserError: the file is missing or has another form, or a principle has no text.
    """
    texts = []
    for where, config in _read(path):
        if not config.text.strip():
            raise UserError(
                f"{where} has no text, by which a critique could be asked for; say what is expected",
                code="missing_value",
                key="text",
            )
        texts.append(config.text)
    return texts


def read_principles(path: str | Path, *, judge: Any, from_spec: FromSpec) -> list[Principle]:
    """See `load_principles`; `from_spec` makes the reward functions that principles name."""
    return [_principle(config, judge, where, from_spec) for where, config in _read(path)]


def _read(path: str | Path) -> list[tuple[str, PrincipleConfig]]:
    """The principles of a file, and the words for where each stands."""
    if not Path(path).is_file():
        raise UserError(f"there is no file {path} with principles; check the path", code="file_not_found")
    values = load_config_file(path)
    entries = values.get("principles")
    if set(values) != {"principles"} or not isinstance(entries, list) or not entries:
        raise UserError(
            f"file {path} has the keys {', '.join(values) or '(none)'}; expected one key principles with a "
            "list of at least one principle",
            code="no_principles",
        )
    found = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}, principle {number}"
        if not isinstance(entry, dict):
            raise UserError(
                f"{where} is {entry!r}; expected a mapping with name, weight, text and so on",
                code="not_a_mapping",
            )
        found.append((where, PrincipleConfig.from_dict(entry, where)))
    return found


def load_principle_judge(name_or_path: str | Path, **load_options: Any) -> Any:
    """Load a judge for principles: a model with one score, or a language model.

    The options are the `dtype`, `load_in_8bit`, `load_in_4bit` and `device` of `load_causal_lm`.
    """
    from rlhf_infer.judges.prompted import PromptedJudge
    from rlhf_infer.rewards.models import MAX_TOKENS
    from rlhf_models import JudgeModel, is_adapter, load_causal_lm, load_config, load_tokenizer

    if is_adapter(name_or_path) or _is_classifier(load_config(name_or_path)):
        return JudgeModel.from_pretrained(name_or_path, **load_options).eval()
    model = load_causal_lm(name_or_path, **load_options)
    return PromptedJudge(
        model, load_tokenizer(name_or_path), template=PRINCIPLE_TEMPLATE, max_tokens=MAX_TOKENS
    )


def _principle(config: PrincipleConfig, judge: Any, where: str, from_spec: FromSpec) -> Principle:
    name, weight, text = config.name, config.weight, config.text
    kinds = [kind for kind in ("keywords", "pattern", "function") if getattr(config, kind) is not None]
    if len(kinds) > 1 or not name:
        raise UserError(
            f"{where} is named {name!r} and has {' and '.join(kinds) or 'only a text'}; expected a name, and "
            "at most one of keywords, pattern, function",
            code="invalid_principle",
        )
    if kinds in ([], ["function"]) and config.model_fields_set & {"found", "absent"}:
        raise UserError(
            f"{where} has found or absent, which go with keywords or a pattern; take them out",
            code="unused_option",
        )
    scores = {"found": config.found, "absent": config.absent, "weight": weight, "text": text}
    if config.keywords is not None:
        return Principle.keywords(name, config.keywords, **scores)
    if config.pattern is not None:
        return Principle.pattern(name, config.pattern, **scores)
    if config.function is not None:
        return Principle.function(name, from_spec(config.function), weight=weight, text=text)
    if judge is None:
        raise UserError(
            f"{where} is only a text, which needs a judge; give one, or keywords, a pattern or a function",
            code="missing_judge",
        )
    return Principle.judged(name, text, judge, weight=weight)


def _is_classifier(config: PreTrainedConfig) -> bool:
    return (config.architectures or [""])[0].endswith("Classification")
