"""The search of all prompts together, in waves, as a generator of what is to be drawn and scored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlhf_data import Text, UserError
from rlhf_infer.engines.protocol import Rollout, SamplingParams, ends_of
from rlhf_infer.engines.stop_strings import completion_text, goes_on_after
from rlhf_infer.rewards.requirements import check_column_lengths
from rlhf_infer.sampling.candidates import Extract, Selected
from rlhf_infer.search.checks import check_resumed, check_search_settings
from rlhf_infer.search.mcts import MCTS
from rlhf_infer.search.results import SearchCost, SearchResult, selected
from rlhf_infer.search.scorers import PathScorer, PathScores, ScoredPath, packed_tokens
from rlhf_infer.search.settings import SearchSettings
from rlhf_infer.search.strategies import DVTS, Beam, BestFirst, BestOfN, Expansion, Strategy
from rlhf_infer.search.tree import Draw, SearchTree, Terminal
from rlhf_infer.search.treequest import ab_mcts

Checker = Callable[[str], bool]
"""Whether the text of a completion so far is a finished one, for instance because it gives an answer."""
_STRATEGIES = {"best-of-n": BestOfN, "beam": Beam, "dvts": DVTS, "best-first": BestFirst}


@dataclass
class _Search:
    """The search of one prompt."""

    tree: SearchTree
    strategy: Strategy
    columns: Mapping[str, Any]
    recorded: Mapping[tuple[int, ...], tuple[list[Draw], float | None]]
    ended: bool = False


@dataclass
class _Order:
    """Draws `first` to `first + count - 1` after a node, of at most `cap` tokens each."""

    search: _Search
    node: int
    first: int
    count: int
    cap: int
    expansion: int
    draws: list[Draw]


@dataclass(frozen=True)
class DrawSteps:
    """Samples `first` to `first + count - 1` of every path, a prompt and the completion so far, in one call.

    Answered with the rollouts, a list for each path, as `GenerationEngine.generate` gives them.
    """

    paths: list[list[int]]
    count: int
    params: SamplingParams
    first: int


@dataclass(frozen=True)
class ScorePaths:
    """Paths that have no score yet, for the scorer or the verifier; answered with their `PathScores`."""

    paths: list[ScoredPath]
    verified: bool


StepCalls = Generator[DrawSteps | ScorePaths, Any, list[SearchResult]]
"""Yields what is to be done, takes the answer, and returns the results."""


class SearchWaves:
    """The search without an engine: says what is to be drawn and scored, and takes the answers.

    `TreeSearch` answers with an engine of this process, a server with requests to what it serves.

    Args:
        scorer: what scores unfinished completions.
        tokenizer: the policy's.
        settings: see `SearchSettings`.
        params: see `TreeSearch`.
        eos_token_ids: tokens that end a completion.
        verifier: what scores finished ones, if something else does.
        checker: see `TreeSearch`.
        extract: see `TreeSearch`.

    Attributes:
        trees: those of the last or the interrupted run.
        cost: what the last run took.

    Raises:
        UserError: settings that do not go together.
    """

    def __init__(
        self,
        scorer: PathScorer,
        tokenizer: Any,
        settings: SearchSettings,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        verifier: PathScorer | None = None,
        checker: Checker | None = None,
        extract: Extract | None = None,
    ) -> None:
        self.separator = settings.separator or getattr(scorer, "separator", None) or "\n"
        check_search_settings(settings, params, extract, separator=self.separator)
        self.scorer, self.verifier, self.tokenizer = scorer, verifier, tokenizer
        self.settings, self.params = settings, params
        self.checker, self.extract = checker, extract
        self.trees: list[SearchTree] = []
        self.cost = SearchCost()
        self._ends = ends_of(params, eos_token_ids)
        self._by_steps = settings.strategy != "best-of-n"

    def calls(
        self,
        prompts: Sequence[Text],
        prompt_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        resume: Sequence[SearchTree] = (),
        on_wave: Callable[[Sequence[SearchTree]], None] | None = None,
        strategy: Callable[[], Strategy] | None = None,
    ) -> StepCalls:
        """Search all prompts; arguments as of `TreeSearch.run`, and the token ids of the prompts."""
        self.cost = SearchCost()
        searches = self._start(prompts, prompt_ids, dict(columns or {}), resume, strategy or self._strategy)
        self.trees = [search.tree for search in searches]
        while orders := [order for search in searches for order in self._orders(search)]:
            yield from self._draw(orders)
            yield from self._grow(orders)
            self.cost = self.cost.plus(waves=1)
            if on_wave is not None:
                on_wave(self.trees)
        if any(len(search.tree.nodes) == 1 for search in searches):
            raise UserError(
                "the search strategy expanded no node; its first call of choose must return the root",
                code="nothing_drawn",
            )
        return [SearchResult(*self._selected(search)) for search in searches]

    def _start(
        self,
        prompts: Sequence[Text],
        ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        resume: Sequence[SearchTree],
        strategy: Callable[[], Strategy],
    ) -> list[_Search]:
        check_column_lengths(columns, len(prompts))
        made_with = self._made_with()
        if resume:
            check_resumed(resume, prompts, ids, made_with)
        return [
            _Search(
                SearchTree(prompt, own, made_with),
                strategy(),
                {name: values[i] for name, values in columns.items()},
                resume[i].recorded() if resume else {},
            )
            for i, (prompt, own) in enumerate(zip(prompts, ids, strict=True))
        ]

    def _strategy(self) -> Strategy:
        if self.settings.strategy == "mcts":
            return MCTS(self.settings, bounded=self.scorer.bounded)
        if self.settings.strategy == "ab-mcts":
            return ab_mcts(self.settings.width, self.params.seed or 0, bounded=self.scorer.bounded)
        return _STRATEGIES[self.settings.strategy](self.settings)

    def _made_with(self) -> dict[str, Any]:
        names = ("seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
        found = {name: getattr(self.params, name) for name in names}
        found |= {"stop": list(self.params.stop), "stop_token_ids": list(self.params.stop_token_ids)}
        found |= {"logit_bias": [list(pair) for pair in self.params.logit_bias]}
        steps = [self.separator, self.settings.max_step_tokens] if self._by_steps else None
        verifier = None if self.verifier is None else self.verifier.name
        aggregate = getattr(self.scorer, "aggregate", None)
        return found | {
            "steps": steps,
            "scorer": self.scorer.name,
            "aggregate": aggregate,
            "verifier": verifier,
        }

    def _orders(self, search: _Search) -> list[_Order]:
        """Next draws of a tree; the budget is charged with each draw's longest length, so that it holds."""
        if search.ended:
            return []
        tree, left = search.tree, self.settings.budget_tokens - search.tree.spent
        orders: list[_Order] = []
        planned: dict[int, int] = {}
        for place, expansion in enumerate(search.strategy.choose(tree) if left > 0 else ()):
            cap = self._cap(tree, expansion.node)
            if left < cap and not orders:
                cap = left  # the last steps are drawn one by one, until no token is left
            count = min(expansion.count, left // cap)
            if not count:
                break
            first = len(tree.nodes[expansion.node].draws) + planned.get(expansion.node, 0)
            planned[expansion.node] = planned.get(expansion.node, 0) + count
            orders.append(_Order(search, expansion.node, first, count, cap, place, []))
            left -= count * cap
            if count < expansion.count:
                break
        search.ended = not orders
        return orders

    def _cap(self, tree: SearchTree, node: int) -> int:
        """Maximum number of tokens of a step after a node, regardless of the budget."""
        room = self.params.max_new_tokens - len(tree.completion_ids(node))
        return min(self.settings.max_step_tokens, room) if self._by_steps else room

    def _draw(self, orders: Sequence[_Order]) -> Generator[DrawSteps, Any, None]:
        """Fill in the draws; those with the same number and length go to the engine together."""
        calls: dict[tuple[int, int, int], list[_Order]] = {}
        for order in orders:
            if not _from_record(order):
                calls.setdefault((order.first, order.count, order.cap), []).append(order)
        for (first, count, cap), members in calls.items():
            stop = (self.separator, *self.params.stop) if self._by_steps else self.params.stop
            params = replace(self.params, max_new_tokens=cap, stop=stop)
            paths = [
                [*each.search.tree.prompt_ids, *each.search.tree.completion_ids(each.node)]
                for each in members
            ]
            groups: Sequence[Sequence[Rollout]] = yield DrawSteps(paths, count, params, first)
            for order, rollouts in zip(members, groups, strict=True):
                order.draws = [_as_draw(rollout) for rollout in rollouts]
            self.cost = self.cost.plus(
                engine_calls=1,
                generated_tokens=sum(len(d.token_ids) for order in members for d in order.draws),
                prefill_tokens=packed_tokens(paths),
                prefill_tokens_alone=count * sum(map(len, paths)),
            )

    def _grow(self, orders: Sequence[_Order]) -> Generator[ScorePaths, Any, None]:
        """Put the draws into the trees, score what is new, back up, and tell the strategies."""
        drawn = [(order, [self._add(order, draw) for draw in order.draws]) for order in orders]
        yield from self._score([(order.search, child) for order, children in drawn for child in children])
        of_search: dict[int, list[tuple[Expansion, Sequence[int]]]] = {}
        for order, children in drawn:
            tree = order.search.tree
            for child in children:
                score = tree.nodes[child].score
                assert score is not None
                tree.back_up(child, score, self.settings.backup)
            own = of_search.setdefault(id(order.search), [])
            own.append((Expansion(order.node, order.count), children))
        for search in {id(order.search): order.search for order in orders}.values():
            search.strategy.take(search.tree, of_search[id(search)])
            enough = self.settings.stop_score
            scores = (search.tree.nodes[node].score or 0.0 for node in search.tree.finished)
            search.ended = enough is not None and any(score >= enough for score in scores)

    def _add(self, order: _Order, draw: Draw) -> int:
        tree = order.search.tree
        ids = tree.completion_ids(order.node) + draw.token_ids
        terminal = self._terminal(tree, ids, draw)
        short = order.cap < self._cap(tree, order.node)
        cut = terminal is None and short and draw.finish_reason == "length"
        return tree.add(order.node, draw, terminal=terminal, cut=cut)

    def _terminal(self, tree: SearchTree, ids: tuple[int, ...], draw: Draw) -> Terminal | None:
        """End of the completion; None if it goes on."""
        if draw.finish_reason == "stop" and ids[-1] in self._ends:
            return "end"
        if self.params.stop:
            whole = completion_text(self.tokenizer, ids, replace(self.params, stop=()))
            if any(stop in whole for stop in self.params.stop):
                return "stop"
        if self.checker is not None and self.checker(self._text(tree, ids)):
            return "checked"
        return "length" if len(ids) >= self.params.max_new_tokens else None

    def _text(self, tree: SearchTree, ids: Sequence[int]) -> str:
        after = goes_on_after(tree.prompt, tree.prompt_ids)
        return completion_text(self.tokenizer, ids, self.params, after)

    def _score(self, nodes: Sequence[tuple[_Search, int]]) -> Generator[ScorePaths, Any, None]:
        """Score the nodes that have no score, each once."""
        waiting: dict[bool, list[tuple[_Search, int]]] = {}
        for search, node in {(id(search), node): (search, node) for search, node in nodes}.values():
            own = search.tree.nodes[node]
            if own.score is None:
                own.score = search.recorded.get(search.tree.completion_ids(node), ((), None))[1]
            if own.score is None:
                verified = self.verifier is not None and own.terminal is not None
                waiting.setdefault(verified, []).append((search, node))
        for verified, members in waiting.items():
            found: PathScores = yield ScorePaths([self._path(*member) for member in members], verified)
            for (search, node), value in zip(members, found.values, strict=True):
                search.tree.nodes[node].score = value
            if not verified:
                self.cost = self.cost.plus(
                    scored_nodes=len(members),
                    scored_tokens=found.tokens,
                    scored_tokens_alone=found.tokens_alone,
                )

    def _path(self, search: _Search, node: int) -> ScoredPath:
        tree, ids = search.tree, search.tree.completion_ids(node)
        return ScoredPath(tree.prompt, tree.prompt_ids, ids, self._text(tree, ids), search.columns)

    def _selected(self, search: _Search) -> tuple[SearchTree, Selected]:
        tree, text = search.tree, partial(self._text, search.tree)
        finished = any(node.terminal is not None for node in tree.nodes)
        judge = self.verifier if self.verifier and finished else self.scorer
        probabilities = getattr(judge, "gives_probability", judge.bounded)
        return tree, selected(tree, text, self.settings.selection, self.extract, probabilities=probabilities)


def _as_draw(rollout: Rollout) -> Draw:
    return Draw(tuple(rollout.completion_ids), tuple(rollout.logps), rollout.finish_reason)


def _from_record(order: _Order) -> bool:
    """Fill in draws that the resumed tree has, if it has them all, at least as long as they may be now."""
    ids = order.search.tree.completion_ids(order.node)
    known = order.search.recorded.get(ids, ([], None))[0][order.first : order.first + order.count]
    if len(known) < order.count:
        return False
    if any(draw.finish_reason == "length" and len(draw.token_ids) < order.cap for draw in known):
        return False
    order.draws = [
        draw
        if len(draw.token_ids) <= order.cap
        else Draw(draw.token_ids[: order.cap], draw.logps[: order.cap], "length")
        for draw in known
    ]
    return True
