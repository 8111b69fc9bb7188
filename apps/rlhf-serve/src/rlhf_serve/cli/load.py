"""Loading the models and building the reward functions that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data import UserError, model_name
from rlhf_infer import RewardFunctions, load_scorer
from rlhf_models import check_available
from rlhf_serve.backends.transformers import check_backend, load_backend
from rlhf_serve.service.best_of_n import BestOfNService
from rlhf_serve.service.scoring_queue import Scoring, reads_messages
from rlhf_serve.service.served_model import Served
from rlhf_serve.service.tokenization import ChatTokenizer, give_template
from rlhf_serve.settings import ModelSettings, ServeSettings, load_options


@dataclass(frozen=True)
class Parts:
    """Models and reward functions of the settings, and prompts for them."""

    model: str
    name: str
    chat_template: str | None
    rewards: RewardFunctions | None
    examples: tuple[str, ...]


def load(
    settings: ServeSettings,
    say: Callable[[str], None],
    progress: Any = None,
    *,
    threads: int | None = None,
) -> Served:
    """The served model of the settings, loaded.

    Args:
        settings: the server's settings.
        say: called with a sentence that says what is loaded.
        progress: called with the steps of the demonstration's training, if it has to be built.
        threads: CPU threads for generating and scoring; None for what torch takes.
    """
    parts = load_parts(settings, say, progress)
    backend = load_backend(settings, parts.model, threads=threads)
    name = settings.served_model_name or parts.name
    say(f"policy: {parts.model} as {name}, on {backend.name}")
    give_template(backend.tokenizer, parts.chat_template)
    chat_tokenizer = ChatTokenizer(backend.tokenizer)
    scoring, names, messages = None, (), True
    if parts.rewards is not None:
        scoring = Scoring(parts.rewards, chat_tokenizer, run=backend.run_work, threads=threads)
        for reward, columns in scoring.columns.items():
            say(f"reward {reward} reads {', '.join(columns)}: requests must send that in reward_columns")
        names = parts.rewards.names
        messages = reads_messages(parts.rewards.functions)
    service = BestOfNService(backend, chat_tokenizer, scoring, messages=messages, answer=settings.answer)
    return Served(service, name, names, parts.examples)


def load_parts(settings: ModelSettings, say: Callable[[str], None], progress: Any = None) -> Parts:
    """The names that the settings give, the demonstration's where they give none, and the rewards."""
    check_backend(settings)
    for named in filter(None, (settings.model, settings.draft_model)):
        check_available(named)
    model, lines, examples, name = settings.model, list(settings.reward), (), ""
    template = _template(settings.chat_template)
    if model is None:
        from rlhf_serve.cli.demo import CHAT_TEMPLATE, NAME, demo

        built_now = ", built at the first start, which takes minutes, then cached" if settings.seed else ""
        say(f"model: the embedded demonstration{built_now}")
        built = demo(settings.seed, progress)
        model, examples, template = str(built.policy), built.examples, template or CHAT_TEMPLATE
        lines, name = lines or [str(built.reward)], NAME
    else:
        name = model_name(model)
    rewards = None
    if lines:
        rewards = load_scorer(lines, settings.reward_weights, **load_options(settings))
        say(f"reward: {', '.join(rewards.names)}")
    elif settings.reward_weights is not None:
        raise UserError(
            "reward_weights are given without a reward; give --reward-model too", code="unused_option"
        )
    return Parts(model, name, template, rewards, examples)


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the chat template {path} cannot be read ({error}); give a text file", code="unreadable_file"
        ) from error
