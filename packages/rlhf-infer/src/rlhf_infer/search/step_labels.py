"""Step labels without annotators: how often completions from a step on reach the right answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_data import Encoder, Text
from rlhf_infer.engines.protocol import GenerationEngine, SamplingParams
from rlhf_infer.engines.stop_strings import StopTexts, completion_text, goes_on_after
from rlhf_infer.search.scorers import PathScorer, ScoredPath, path_scorer
from rlhf_infer.search.settings import StepLabelSettings
from rlhf_infer.search.tree import SearchTree

_WINDOW = 64
"""Tokens; prefixes whose lengths differ by less are completed in one call."""


@dataclass(frozen=True)
class LabelledSolution:
    """A solution whose steps are labelled, a row of `rlhf-train prm`.

    Args:
        prompt: text or messages.
        completions: its steps, without separators; steps of white space alone are left out.
        labels: one per step, in [0, 1].
    """

    prompt: Text
    completions: tuple[str, ...]
    labels: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """`prompt`, `completions` and `labels`, as JSON values."""
        return {"prompt": self.prompt, "completions": list(self.completions), "labels": list(self.labels)}


class StepLabeller:
    """Labels the steps of sampled solutions by Monte Carlo (Math-Shepherd, arXiv:2312.08935, section 3.2.2).

    Solutions of all prompts are drawn in one call, completions after all their steps in another (in several
    where solutions are long), in which solutions share their beginnings. Completions have random numbers of
    their own, by seed, path and number.

    Args:
        engine: draws solutions and completions.
        verifier: scores finished completions: reward functions, such as a rule that reads a column.
        tokenizer: the policy's.
        params: how both are drawn; no completion gets longer than `max_new_tokens` with its beginning.
        settings: see `StepLabelSettings`.

    Attributes:
        generated_tokens: tokens drawn so far, solutions and completions.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        verifier: Any,
        tokenizer: Any,
        params: SamplingParams,
        settings: StepLabelSettings | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self.settings = settings or StepLabelSettings()
        self.verifier: PathScorer = path_scorer(verifier)
        self.generated_tokens = 0
        self._encoder = Encoder(tokenizer)
        self._stops = StopTexts(tokenizer, (self.settings.separator,))

    def label(
        self, prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[list[LabelledSolution]]:
        """The labelled solutions of every prompt, in their order.

        Args:
            prompts: texts or message lists.
            columns: for the verifier, one value per prompt for each further column.

        Raises:
            UserError: a prompt does not fit the model, or the verifier failed.
        """
        own = [{name: values[i] for name, values in (columns or {}).items()} for i in range(len(prompts))]
        ids = [tuple(self._encoder.prompt(prompt)) for prompt in prompts]
        groups = self.engine.generate(ids, self.settings.solutions, self.params)
        solutions = [
            list(dict.fromkeys(tuple(rollout.completion_ids) for rollout in group)) for group in groups
        ]
        self.generated_tokens += sum(len(r.completion_ids) for group in groups for r in group)
        ends = {
            (i, solution): self._step_ends(ids[i], solution)
            for i, group in enumerate(solutions)
            for solution in group
        }
        starts = list(dict.fromkeys((i, one[:end]) for (i, one), found in ends.items() for end in found[:-1]))
        drawn = self._complete(ids, starts)
        wholes = dict.fromkeys([*ends, *((i, whole) for (i, _), group in drawn.items() for whole in group)])
        paths = [
            ScoredPath(prompts[i], ids[i], whole, self._text(prompts[i], ids[i], whole), own[i])
            for i, whole in wholes
        ]
        scores = self.verifier.score(paths).values if paths else []
        right = {key: score >= self.settings.right_from for key, score in zip(wholes, scores, strict=True)}
        found: list[list[LabelledSolution]] = [[] for _ in prompts]
        for (i, solution), own_ends in ends.items():
            outcomes = [[right[i, whole] for whole in drawn[i, solution[:end]]] for end in own_ends[:-1]]
            labels = [_label(each, self.settings.estimation) for each in [*outcomes, [right[i, solution]]]]
            texts = [self._text(prompts[i], ids[i], solution[:end]) for end in own_ends]
            labelled = _labelled(prompts[i], texts, labels, self.settings.separator)
            found[i] += [labelled] if labelled else []
        return found

    def _step_ends(self, prompt: Sequence[int], solution: Sequence[int]) -> list[int]:
        """How many tokens of a solution each step ends after, the last one at its end."""
        ends, start = [], 0
        for end in range(1, len(solution)):
            if self._stops.end([*prompt, *solution[:start]], solution[start:end]):
                ends.append(end)
                start = end
        return [*ends, len(solution)]

    def _complete(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[tuple[int, tuple[int, ...]]]
    ) -> dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]]:
        """Completions after every beginning (prompt, tokens), each with the beginning."""
        windows: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for start in starts:
            windows.setdefault(len(start[1]) // _WINDOW * _WINDOW, []).append(start)
        found: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}
        for first, members in windows.items():
            params = replace(self.params, max_new_tokens=self.params.max_new_tokens - first)
            paths = [[*prompts[i], *begun] for i, begun in members]
            groups = self.engine.generate(paths, self.settings.completions, params)
            self.generated_tokens += sum(len(r.completion_ids) for group in groups for r in group)
            for (i, begun), group in zip(members, groups, strict=True):
                wholes = [begun + tuple(rollout.completion_ids) for rollout in group]
                found[i, begun] = [whole[: self.params.max_new_tokens] for whole in wholes]
        return found

    def _text(self, prompt: Text, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        return completion_text(self.tokenizer, ids, self.params, goes_on_after(prompt, prompt_ids))


def tree_step_labels(
    tree: SearchTree,
    tokenizer: Any,
    params: SamplingParams,
    settings: StepLabelSettings | None = None,
) -> list[LabelledSolution]:
    """Labels from a search whose finished completions a verifier has scored: one row for each of these.

    A step's completions are the finished ones of the tree that begin with it, each as often as it was drawn.
    A search prefers steps that score high, so that shares are larger than those of the policy's own
    completions; trees of best-of-n have too few branches. `StepLabeller` has neither fault.

    Args:
        tree: of a `TreeSearch` with `verifier`.
        tokenizer: the policy's.
        params: those of the search.
        settings: `estimation`, `right_from` and `separator` count.
    """
    settings = settings or StepLabelSettings()
    outcomes: list[list[bool]] = [[] for _ in tree.nodes]
    for parent in tree.nodes:
        for child in (tree.nodes[each] for each in parent.draws):
            if child.terminal is not None and child.score is not None:
                for each in tree.path(child.id):
                    outcomes[each].append(child.score >= settings.right_from)
    found = []
    after = goes_on_after(tree.prompt, tree.prompt_ids)
    for node in tree.finished:
        path = tree.path(node)[1:]
        texts = [completion_text(tokenizer, tree.completion_ids(each), params, after) for each in path]
        labels = [_label(outcomes[each], settings.estimation) for each in path]
        labelled = _labelled(tree.prompt, texts, labels, settings.separator)
        found += [labelled] if labelled else []
    return found


def _label(outcomes: Sequence[bool], estimation: str) -> float:
    return float(any(outcomes)) if estimation == "hard" else sum(outcomes) / len(outcomes)


def _labelled(
    prompt: Text, texts: Sequence[str], labels: Sequence[float], separator: str
) -> LabelledSolution | None:
    """A row from the texts of a solution up to the end of every step; None for one without steps.

    A process reward model cuts the whole text at separators; each of its steps gets the label of the first
    beginning that has all of it.
    """
    steps = [part for part in texts[-1].split(separator) if part.strip()]
    whole = [sum(bool(part.strip()) for part in text.split(separator)[:-1]) for text in texts]
    whole[-1] = len(steps)
    chosen = [next(k for k, count in enumerate(whole) if count > place) for place in range(len(steps))]
    if not steps:
        return None
    return LabelledSolution(prompt, tuple(steps), tuple(labels[k] for k in chosen))
