"""An engine and a scorer whose answers are given, for searches worked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlhf_infer import PathScores, Rollout, SamplingParams, ScoredPath

END = 0


class Letters:
    """A tokenizer whose tokens are letters; 0 ends, 1 is a line break, 2 is a, and so on."""

    eos_token, eos_token_id, unk_token_id, chat_template = "\0", END, None, None
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    characters = "\0\nabcdefghijklmnopqrstuvwxyz>"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.characters.index(each) for each in text]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        return "".join(self.characters[each] for each in ids if each or not skip_special_tokens)


class Script:
    """An engine whose draws after each text are given, in order; then the last one again and again."""

    def __init__(self, steps: Mapping[str, Sequence[str]]) -> None:
        self.eos_token_ids = [END]
        self.steps, self.tokenizer, self.calls = steps, Letters(), 0

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        self.calls += 1
        groups = []
        for prompt in prompts:
            known = self.steps[self.tokenizer.decode(prompt)]
            texts = [known[min(i, len(known) - 1)] for i in range(first, first + n)]
            ids = [self.tokenizer(text)["input_ids"][: params.max_new_tokens] for text in texts]
            groups.append(
                [
                    Rollout(prompt, own, [-0.5] * len(own), "stop" if len(own) == len(text) else "length")
                    for own, text in zip(ids, texts, strict=True)
                ]
            )
        return groups

    def update_weights(self, model: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Table:
    """A scorer of given values."""

    name, bounded = "table", True

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = values

    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        lengths = sum(len(path.completion_ids) for path in paths)
        return PathScores([self.values[path.text] for path in paths], lengths, lengths)
