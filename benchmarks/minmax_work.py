"""What the sides of `minmax_speed.py` share: models, settings, and what the players are made to write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from offline_vs_trl import SHAPES, VOCABULARY
from online_pace import Task, vowels

from rlhf_data import StoryWorldConfig, UserError, atomic_write_text, generate_stories
from rlhf_data.worlds.story import split_sentences
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.game.stories import load_stories
from rlhf_models import (
    AdapterSet,
    JudgeModel,
    LoraSettings,
    PolicyModel,
    RewardModel,
    add_adapters,
    build_tiny_llama,
    train_byte_tokenizer,
)

ROLES = ("policy", "monitor")
SCORERS = ("reward", "judge")


def game_config(task: Task) -> MinMaxConfig:
    """The game's settings, which are the same on all sides."""
    return MinMaxConfig.from_dict(task.settings["game"])


def with_adapters_for_scorers(task: Task) -> MinMaxConfig:
    """The game's settings with reward model and judge on the players' backbone."""
    game = task.settings["game"]
    scorers = {
        f"{name}_model": {"model_name": task.path(f"{name}-adapter"), "share_backbone": True}
        for name in SCORERS
    }
    return MinMaxConfig.from_dict(game | scorers)


def write_stories(folder: Path, count: int, sentences: int) -> None:
    """Write `train.jsonl`, and a row of `eval.jsonl`: stories of the story world that are strung together.

    Args:
        folder: for the files.
        count: rows.
        sentences: of the longest story; others have up to a quarter less.
    """
    world = StoryWorldConfig(min_sentences=6, max_sentences=6)
    pieces = iter(generate_stories(world, (count + 1) * (sentences // 6 + 1), split="train", seed=0))
    rows = []
    for i in range(count + 1):
        parts = [next(pieces) for _ in range(sentences // 6 + 1)]
        told = [sentence for part in parts for sentence in split_sentences(part.story)]
        kept = sentences - sentences * (i % 8) // 32
        rows.append(
            {
                "story": " ".join(told[:kept]),
                "question": parts[0].question,
                "choices": list(parts[0].choices),
                "answer": parts[0].answer_text,
            }
        )
    for name, part in (("train", rows[1:]), ("eval", rows[:1])):
        atomic_write_text(folder / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in part))


def write_models(folder: Path, shape: str, game: dict[str, Any]) -> None:
    """Write random models with their tokenizer, and adapters that have moved away from their reference.

    Args:
        folder: for `base`, `reward`, `judge`, an adapter for each of `ROLES`, and `reward-adapter` and
            `judge-adapter`, the scorers as adapters of `base`.
        shape: of all models.
        game: the game's settings.
    """
    config = MinMaxConfig.from_dict(game)
    stories = load_stories(config)
    texts = [stories.prompts.monitor(record, f" {record.story}") for record in stories.train]
    tokenizer = train_byte_tokenizer([*texts, " so right so wrong"] * 2, VOCABULARY[shape])
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = build_tiny_llama(VOCABULARY[shape], max_positions=4096, **tokens, **SHAPES[shape])
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    RewardModel.from_backbone(model, tokenizer, seed=1).save_pretrained(folder / "reward")
    JudgeModel.from_backbone(model, tokenizer, seed=2).save_pretrained(folder / "judge")
    for seed, name in enumerate(SCORERS, start=1):
        scorer = RewardModel.from_language_model(folder / "base", seed=seed)
        scorer.add_lora(LoraSettings())
        scorer.save_pretrained(folder / f"{name}-adapter")
    adapters = AdapterSet(add_adapters(model, ROLES))
    for role in ROLES:
        _fill_adapter(adapters.parameters(role), seed=ROLES.index(role))
        PolicyModel(None, tokenizer, adapters=adapters, adapter=role).save_pretrained(folder / role)


@torch.no_grad()
def _fill_adapter(parameters: Sequence[torch.nn.Parameter], *, seed: int) -> None:
    """Give both factors entries, so that every gradient counts from the first update on."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def script(tokenizer: Any, prompt: str, sample: int, tokens: int) -> list[int]:
    """What takes the place of a sampled completion: words of the story, after a critique the verdict.

    Random models write nothing that could be parsed; and both sides can be compared on equal texts only.

    Args:
        tokenizer: which has every word of the stories as one token.
        prompt: a player's.
        sample: number of the sample; each begins elsewhere in the story.
        tokens: length, end token included.

    Raises:
        UserError: the tokenizer cuts words.
    """
    words = prompt.partition("\n")[0].split()
    end = f" so {('right', 'wrong')[sample % 2]}" if prompt.endswith("critique:") else ""
    count = tokens - 1 - len(end.split())
    begin = 5 * sample % max(len(words) - count, 1)
    text = f" {' '.join(words[begin : begin + count])}{end}"
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    if len(ids) != tokens:
        raise UserError(f"a completion has {len(ids)} tokens, {tokens} are wanted; take longer stories")
    return ids


class VowelReward:
    """A reward that costs nothing: the share of vowels."""

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """See `rlhf_minmax.game.scores.Scorer`."""
        del prompts, max_tokens
        return torch.tensor(vowels(completions))
