"""Results of a search: the finished completions of a tree, their order and their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rlhf_infer.engines.protocol import Rollout
from rlhf_infer.sampling.candidates import Candidate, Extract, SamplingCost, Selected, Selection, select
from rlhf_infer.search.scorers import packed_tokens
from rlhf_infer.search.tree import SearchTree


@dataclass(frozen=True)
class SearchCost:
    """Cost of a search of several prompts, without what a resumed one found in its trees.

    Args:
        waves: rounds of choosing, drawing and scoring.
        engine_calls: calls of the engine; one a wave, more where numbers or lengths of draws differ.
        generated_tokens: tokens drawn.
        prefill_tokens: tokens of the paths that the engine computed before its draws, each shared prefix once
            a call.
        prefill_tokens_alone: the same if every draw computed its path by itself.
        scored_nodes: steps scored by the scorer.
        scored_tokens: tokens that the scorer computed, each shared prefix once a wave.
        scored_tokens_alone: the same if every path were scored by itself.
    """

    waves: int = 0
    engine_calls: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefill_tokens_alone: int = 0
    scored_nodes: int = 0
    scored_tokens: int = 0
    scored_tokens_alone: int = 0

    def plus(self, **more: int) -> SearchCost:
        """The cost with more of some of its parts."""
        return SearchCost(**{name: value + more.get(name, 0) for name, value in asdict(self).items()})

    @property
    def scoring_factor(self) -> float:
        """How many times more tokens scoring every path by itself takes; 1 if nothing was scored."""
        return self.scored_tokens_alone / self.scored_tokens if self.scored_tokens else 1.0


@dataclass(frozen=True)
class SearchResult:
    """The search of one prompt.

    Args:
        tree: everything that was drawn.
        selected: the finished completions, one for each time that one was drawn, and their order; if none was
            finished within the budget, the longest paths instead.
    """

    tree: SearchTree
    selected: Selected

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.selected.best


def selected(
    tree: SearchTree,
    text: Callable[[Sequence[int]], str],
    selection: Selection,
    extract: Extract | None,
    *,
    probabilities: bool,
) -> Selected:
    """The candidates of a tree and their order.

    Args:
        tree: with at least one draw.
        text: decodes a completion.
        selection: see `rlhf_infer.select`.
        extract: finds a text's answer.
        probabilities: what scores are, see `rlhf_infer.select`.
    """
    drawn = [child for node in tree.nodes for child in node.draws]
    leaves = [child for child in drawn if not tree.nodes[child].draws]
    chosen = sorted(child for child in drawn if tree.nodes[child].terminal is not None) or sorted(leaves)
    candidates = [_candidate(tree, node, i, text, extract) for i, node in enumerate(chosen)]
    extended = [tree.completion_ids(node.id) for node in tree.nodes if node.draws]
    reached = [[*tree.prompt_ids, *tree.completion_ids(node.id)] for node in tree.nodes[1:]]
    cost = SamplingCost(
        samples=len(drawn),
        prompt_tokens=packed_tokens([[*tree.prompt_ids, *ids] for ids in extended]),
        completion_tokens=tree.spent,
        scored_tokens=packed_tokens(reached),
    )
    ranking = select(candidates, selection, probabilities=probabilities)
    return Selected(tree.prompt, tuple(candidates), ranking, cost)


def _candidate(
    tree: SearchTree,
    node: int,
    index: int,
    text: Callable[[Sequence[int]], str],
    extract: Extract | None,
) -> Candidate:
    own, ids = tree.nodes[node], list(tree.completion_ids(node))
    reason = "stop" if own.terminal in ("end", "stop", "checked") else "length"
    read = text(ids)
    verifier = tree.made_with.get("verifier") if own.terminal else None
    name = verifier or tree.made_with.get("scorer") or "score"
    return Candidate(
        index,
        read,
        Rollout(tree.prompt_ids, ids, tree.logps(node), reason),
        score=own.score,
        scores={} if own.score is None else {name: own.score},
        answer=None if extract is None else extract(read),
    )
