"""The search of several prompts: budgets, seeds, resuming, greedy decoding, scoring, and whether it pays."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lively import lively
from proofs import by_default
from raises import raises_error
from rlhf_infer import (
    BestOfNSampler,
    MCTSGenerator,
    ProcessReward,
    SamplingParams,
    ScoredPath,
    SearchSettings,
    SearchTree,
    TransformersEngine,
    TreeSearch,
    path_scorer,
    read_trees,
    select,
    write_trees,
)
from rlhf_infer.rewards import RewardFunctions
from rlhf_infer.search.scorers import RewardScorer, packed_tokens
from rlhf_infer.search.settings import SearchStrategy
from rlhf_models import ProcessRewardModel, RewardModel, ValueModel

PROMPTS: list[Any] = ["where is mary ?", "where is ball ?", "so"]
STRATEGIES: tuple[SearchStrategy, ...] = ("mcts", "beam", "dvts", "best-first", "best-of-n")
SETTINGS = SearchSettings(width=4, branch=2, budget_tokens=60, max_step_tokens=6, separator=" ", rounds=None)
PARAMS = SamplingParams(20, seed=3)


@pytest.fixture
def engine(tiny_llama: Any, byte_tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(lively(tiny_llama, 3.0), byte_tokenizer)


@pytest.fixture
def process_model(tiny_llama: Any, byte_tokenizer: Any) -> ProcessRewardModel:
    return ProcessRewardModel.from_backbone(tiny_llama, byte_tokenizer).eval()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("search")


def vowels(completions: list[str]) -> list[float]:
    return [sum(text.count(each) for each in "aeiou") / (1 + len(text)) for text in completions]


def searching(engine: Any, scorer: Any, *, params: SamplingParams = PARAMS, **settings: Any) -> TreeSearch:
    return TreeSearch(engine, scorer, engine.tokenizer, SETTINGS.model_copy(update=settings), params)


def lines(trees: Sequence[SearchTree]) -> list[list[str]]:
    return [list(tree.lines()) for tree in trees]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_budgets_are_exact(engine: TransformersEngine, strategy: SearchStrategy) -> None:
    for budget in (1, 7, 60):
        search = searching(engine, vowels, strategy=strategy, budget_tokens=budget)
        results = search.run(PROMPTS)
        assert [result.tree.spent for result in results] == [budget] * 3
        assert search.cost.generated_tokens == 3 * budget
        for result in results:
            drawn = (child for node in result.tree.nodes for child in node.draws)
            assert sum(len(result.tree.nodes[child].token_ids) for child in drawn) == budget
            assert result.tree.nodes[0].visits == result.selected.cost.samples
            assert all(len(c.rollout.completion_ids) <= 20 for c in result.selected.candidates)
            assert all(
                len(c.rollout.logps) == len(c.rollout.completion_ids) for c in result.selected.candidates
            )


@pytest.mark.parametrize(("own", "separator"), [(None, " "), ("e", "e")])
def test_steps_end_where_the_process_reward_models_do(
    engine: TransformersEngine, process_model: ProcessRewardModel, own: str | None, separator: str
) -> None:
    process_model.step_separator = " "
    settings = SETTINGS.model_copy(update={"separator": own, "budget_tokens": 200})
    results = TreeSearch(engine, process_model, engine.tokenizer, settings, PARAMS).run(PROMPTS)
    assert [result.tree.made_with["steps"] for result in results] == [[separator, 6]] * len(PROMPTS)
    ended = [node for result in results for node in result.tree.nodes if node.finish_reason == "stop"]
    texts = [engine.tokenizer.decode(node.token_ids) for node in ended if node.terminal is None]
    assert texts and all(separator in text for text in texts)
    beside = path_scorer([ProcessReward(process_model), vowels])
    assert TreeSearch(engine, beside, engine.tokenizer, SearchSettings(), PARAMS).waves.separator == " "
    default = TreeSearch(engine, vowels, engine.tokenizer, SearchSettings(), PARAMS)
    assert default.waves.separator == "\n"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_search_gives_the_same_tree(
    engine: TransformersEngine, process_model: ProcessRewardModel, tmp_path: Path, strategy: SearchStrategy
) -> None:
    process_model.step_separator = " "
    search = searching(engine, process_model, strategy=strategy, budget_tokens=100)
    whole = lines([result.tree for result in search.run(PROMPTS)])
    cost = search.cost
    assert lines([result.tree for result in search.run(PROMPTS)]) == whole
    path, waves = tmp_path / "tree.jsonl", []

    def interrupt(trees: Sequence[SearchTree]) -> None:
        write_trees(path, trees)
        waves.append(None)
        if len(waves) == (1 if strategy == "best-of-n" else 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.run(PROMPTS, on_wave=interrupt)
    assert lines(read_trees(path)) == lines(search.trees) != whole
    resumed = search.run(PROMPTS, resume=read_trees(path))
    assert lines([result.tree for result in resumed]) == whole
    assert search.cost.generated_tokens < cost.generated_tokens
    # With more tokens: the steps that the smaller budget cut short are drawn to their ends.
    more = searching(engine, process_model, strategy=strategy, budget_tokens=150)
    longer = more.run(PROMPTS)
    again = more.run(PROMPTS, resume=search.trees)
    for ours, theirs in zip(again, longer, strict=True):
        # What was drawn and scored in other batches may differ in its last bits.
        for a, b in zip(ours.tree.nodes, theirs.tree.nodes, strict=True):
            known = {**vars(b), "score": pytest.approx(b.score, abs=1e-5)}
            known |= {name: pytest.approx(getattr(b, name), abs=1e-4) for name in ("logps", "value", "prior")}
            assert vars(a) == known


def test_a_search_of_something_else_is_not_resumed(engine: TransformersEngine) -> None:
    trees = [result.tree for result in searching(engine, vowels).run(PROMPTS)]
    with raises_error("different_config"):
        searching(engine, vowels).run(PROMPTS[:1], resume=trees)
    with raises_error("different_config"):
        searching(engine, vowels).run(PROMPTS[::-1], resume=trees)
    with raises_error("different_config", key="seed"):
        searching(engine, vowels, params=SamplingParams(20, seed=4)).run(PROMPTS, resume=trees)


def test_a_greedy_beam_is_greedy_decoding(engine: TransformersEngine) -> None:
    for params in (SamplingParams(20, temperature=0), SamplingParams(20, temperature=0, stop=("a", "the"))):
        expected = engine.generate([engine.tokenizer(p)["input_ids"] for p in PROMPTS], 1, params)
        search = searching(
            engine, vowels, params=params, strategy="beam", width=1, branch=None, rounds=1, max_step_tokens=3
        )
        for result, [rollout] in zip(search.run(PROMPTS), expected, strict=True):
            assert list(result.best.rollout.completion_ids) == rollout.completion_ids
            assert result.best.rollout.logps == pytest.approx(rollout.logps, abs=1e-4)
            assert result.best.rollout.finish_reason == rollout.finish_reason


def test_best_of_n_finds_what_the_sampler_finds(engine: TransformersEngine, tiny_llama: Any) -> None:
    reward = RewardModel.from_backbone(tiny_llama, engine.tokenizer)
    search = searching(engine, reward, strategy="best-of-n", budget_tokens=160)
    scorer = path_scorer(reward)
    assert isinstance(scorer, RewardScorer)
    for prompt, result in zip(PROMPTS, search.run(PROMPTS), strict=True):
        n = len(result.selected.candidates)
        sampler = BestOfNSampler(engine, scorer.functions, engine.tokenizer, n=n, params=PARAMS)
        [expected] = sampler.sample([prompt])
        assert [c.text for c in result.selected.candidates] == [c.text for c in expected.candidates]
        assert result.best.text == expected.best.text
        assert result.best.score == pytest.approx(expected.best.score, abs=1e-5)


def test_packed_scores_equal_those_of_each_path_alone(
    engine: TransformersEngine, process_model: ProcessRewardModel, tiny_llama: Any
) -> None:
    value = ValueModel.from_backbone(tiny_llama, engine.tokenizer)
    process_model.step_separator = " "
    for scorer in (process_model, RewardModel.from_backbone(tiny_llama, engine.tokenizer), value):
        search = searching(engine, scorer, budget_tokens=120, width=8)
        for result in search.run([5 * prompt for prompt in PROMPTS]):
            tree = result.tree
            for node in tree.nodes[1:]:
                ids = tree.completion_ids(node.id)
                path = ScoredPath(
                    tree.prompt, tree.prompt_ids, ids, engine.tokenizer.decode(ids, skip_special_tokens=True)
                )
                [alone] = search.scorer.score([path]).values
                assert node.score == pytest.approx(alone, abs=1e-5)
        cost = search.cost
        assert cost.scored_nodes and cost.scored_tokens < cost.scored_tokens_alone / 2
        assert cost.scoring_factor == cost.scored_tokens_alone / cost.scored_tokens
        assert cost.prefill_tokens < cost.prefill_tokens_alone / 2


@pytest.mark.parametrize("aggregate", by_default(["last", "min", "product", "mean"], "last", "product"))
def test_aggregates_are_those_of_the_model(
    engine: TransformersEngine, process_model: ProcessRewardModel, aggregate: Any
) -> None:
    process_model.step_separator = " "
    search = searching(engine, process_model, aggregate=aggregate)
    [result, *_] = search.run(PROMPTS)
    for candidate in result.selected.candidates:
        steps = [step for step in candidate.text.split(" ") if step.strip()]
        expected = process_model.score([PROMPTS[0]], [steps], aggregate=aggregate) if steps else [0.0]
        assert candidate.score == pytest.approx(float(expected[0]), abs=1e-5)


def test_packed_tokens_count_shared_prefixes_once() -> None:
    assert packed_tokens([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [6]]) == 6


def test_a_verifier_scores_what_is_finished_and_a_checker_ends_it(engine: TransformersEngine) -> None:
    search = TreeSearch(
        engine,
        vowels,
        engine.tokenizer,
        SETTINGS,
        PARAMS,
        verifier=lambda completions: [7.0 for _ in completions],
        checker=lambda text: len(text) > 8,
    )
    for result in search.run(PROMPTS):
        for node in result.tree.nodes[1:]:
            assert (node.score == 7.0) == (node.terminal is not None)
        assert result.best.score == 7.0 and "checked" in {node.terminal for node in result.tree.nodes}
    # The first finished completion is enough.
    early = searching(engine, vowels, stop_score=-1.0, budget_tokens=5000)
    assert all(0 < result.tree.spent < 5000 for result in early.run(PROMPTS))


@pytest.mark.parametrize("bounded", [False, True])
def test_weighted_votes_take_a_bounded_scorers_probabilities(
    engine: TransformersEngine, bounded: bool
) -> None:
    def rare(text: str) -> str:
        return str(len(text) % 4 == 0)

    def probability(completions: list[str]) -> list[float]:
        return [0.9 if rare(text) == "True" else 0.05 for text in completions]

    scorer = RewardScorer(RewardFunctions([probability]))
    scorer.bounded = scorer.gives_probability = bounded
    weighted = SETTINGS.model_copy(update={"selection": "weighted", "budget_tokens": 300})
    search = TreeSearch(engine, scorer, engine.tokenizer, weighted, PARAMS, extract=rare)
    results = [each.selected for each in search.run(PROMPTS)]
    by_kind = [
        [select(each.candidates, "weighted", probabilities=kind) for each in results]
        for kind in (False, True)
    ]
    assert by_kind[0] != by_kind[1] and [each.ranking for each in results] == by_kind[bounded]


def test_settings_that_make_no_sense_are_refused(engine: TransformersEngine) -> None:
    with raises_error("invalid_value", key="temperature"):
        searching(engine, vowels, params=SamplingParams(20, temperature=0))
    with raises_error("unsupported_setting", key="min_new_tokens"):
        searching(engine, vowels, params=SamplingParams(20, min_new_tokens=2))
    with raises_error("missing_extract"):
        searching(engine, vowels, selection="majority")
    with raises_error("no_applicable_reward"):
        searching(engine, lambda completions: [None for _ in completions]).run(PROMPTS)
    with raises_error("context_too_short"):
        searching(engine, vowels, params=SamplingParams(100_000)).run(PROMPTS)
    with raises_error("invalid_value", key=""):
        SearchSettings.from_dict({"width": 6, "branch": 4}, "settings")


def test_a_damaged_file_is_no_tree(engine: TransformersEngine, tmp_path: Path) -> None:
    path = tmp_path / "tree.jsonl"
    write_trees(path, [result.tree for result in searching(engine, vowels).run(PROMPTS)])
    written = path.read_text().splitlines()
    for damaged in (written[:-1], [written[0], *written[2:]], ["{}"], ["[1]"], ["x"]):
        path.write_text("\n".join(damaged))
        with raises_error("not_a_search_tree"):
            read_trees(path)
    with raises_error("unreadable_file"):
        read_trees(tmp_path / "none.jsonl")


@pytest.mark.slow
def test_search_pays_with_a_good_process_reward_only(planted: Any) -> None:
    planted.ARMS = {name: planted.ARMS[name] for name in ("best-of-n", "dvts", "mcts")}
    found = {
        kind: planted.planted_task(kind, prompts=30, budgets=[256], seeds=[0])["budgets"]["256"]
        for kind in ("good", "wrong")
    }
    for arm in ("dvts", "mcts"):
        assert found["good"][arm]["minus_best_of_n"][1] > 0.1
        assert found["wrong"][arm]["accuracy"] <= found["wrong"]["best-of-n"]["accuracy"]
    assert {row["tokens"] for rows in found.values() for row in rows.values()} == {256.0}


def test_mcts_in_one_call(engine: TransformersEngine, process_model: ProcessRewardModel) -> None:
    settings = SETTINGS.model_copy(update={"strategy": "beam"})
    generator = MCTSGenerator(engine, process_model, engine.tokenizer, settings=settings, params=PARAMS)
    found = generator.generate(PROMPTS)
    expected = searching(engine, process_model, strategy="mcts").run(PROMPTS)
    assert lines([each.tree for each in found]) == lines([each.tree for each in expected])
