"""Process reward models and judges as reward functions, and scorers from lines of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proofs import by_default
from raises import raises_error
from rlhf_infer import JudgeReward, ProcessReward, PromptedJudge, RuleJudge, load_scorer
from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions
from rlhf_models import LoraSettings, ProcessRewardModel, RewardEnsemble, RewardModel

PROMPTS: list[Any] = ["where is mary ?", "where is ball ?", "where is mary ?"]
SOLUTIONS: list[Any] = ["mary went to kitchen .\nso it is kitchen\n", "it is garden .", "\n \n"]


@pytest.fixture
def process_model(tiny_llama: Any, byte_tokenizer: Any) -> ProcessRewardModel:
    model = ProcessRewardModel.from_backbone(tiny_llama, byte_tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # probabilities away from 1/2
    return model


@pytest.mark.parametrize("aggregate", ["min", "mean", "last", "product"])
def test_steps_of_a_completion_are_scored(process_model: ProcessRewardModel, aggregate: Any) -> None:
    reward = ProcessReward(process_model, aggregate=aggregate)
    scores = reward(PROMPTS, SOLUTIONS)
    steps = process_model.score_steps(PROMPTS[0], ["mary went to kitchen .", "so it is kitchen"])
    odds = torch.logit(steps)
    expected = {
        "min": steps.min(),
        "mean": odds.mean().sigmoid(),
        "last": steps[-1],
        "product": steps.prod(),
    }[aggregate]
    assert abs(float(steps[0] - steps[1])) > 1e-3
    assert scores[0] == pytest.approx(float(expected), abs=1e-5)
    assert scores[1] == pytest.approx(
        float(process_model.score_steps(PROMPTS[1], ["it is garden ."])), abs=1e-5
    )
    assert scores[2] == 0.0  # nothing but white space
    assert reward(PROMPTS[:1], ["  "]) == [0.0]
    total = RewardFunctions([reward])(PROMPTS, SOLUTIONS, completion_ids=[[1]] * 3, columns={}).total
    assert total.tolist() == pytest.approx(scores)


def test_steps_end_at_the_model_s_separator(process_model: ProcessRewardModel) -> None:
    process_model.step_separator = " ; "
    reward = ProcessReward(process_model)
    assert reward.steps("one ; two\nmore ; ") == ["one", "two\nmore"]
    message = [{"role": "assistant", "content": "one ; two"}]
    assert reward.steps(message) == ["one", "two"]
    with raises_error("invalid_value", key="aggregate"):
        ProcessReward(process_model, aggregate="max", name="steps")  # pyright: ignore[reportArgumentType]


def test_a_judge_scores_answers() -> None:
    def rule(question: str, answer: str, critique: str | None) -> float:
        return 0.25 * (answer in question) + 0.5 * (critique == "right")

    reward = JudgeReward(RuleJudge(rule))
    assert reward(["is it a?", "is it a?"], ["a", "b"]) == [0.25, 0.0]
    criticised = JudgeReward(RuleJudge(rule), critiques="critique")
    assert criticised(["is it a?", "is it a?"], ["a", "b"], critique=["right", None]) == [0.75, 0.0]
    messages = [[{"role": "user", "content": "is it a?"}]], [[{"role": "assistant", "content": "a"}]]
    assert reward(*messages) == [0.25]
    with raises_error("missing_column", column="critique"):
        criticised(["is it a?"], ["a"])


def score(scorer: RewardFunctions) -> torch.Tensor:
    return scorer(PROMPTS, SOLUTIONS, completion_ids=[[1]] * 3, columns={}).rewards


def test_lines_name_models_of_every_kind(
    tiny_llama: Any, byte_tokenizer: Any, process_model: ProcessRewardModel, tmp_path: Path
) -> None:
    reward = RewardModel.from_backbone(tiny_llama, byte_tokenizer)
    ensemble = RewardEnsemble.from_backbone(tiny_llama, byte_tokenizer, size=2, kind="heads")
    for name, model in {"reward": reward, "ensemble": ensemble, "steps": process_model}.items():
        model.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in ("reward", "ensemble", "steps")]
    scorer = load_scorer([*folders, "length:minimum=1"], [1.0, 2.0, 0.5, 0.0], device="cpu")
    assert scorer.names == ("reward", "ensemble", "steps", "length") and scorer.weights == (
        1.0,
        2.0,
        0.5,
        0.0,
    )
    model, mean_minus_std, steps, _ = score(scorer)
    torch.testing.assert_close(model, reward.score(PROMPTS, SOLUTIONS))
    expected = ensemble.score(PROMPTS, SOLUTIONS, aggregate="mean_minus_std", k=1.0)
    torch.testing.assert_close(mean_minus_std, expected)
    assert steps.tolist() == pytest.approx(ProcessReward(process_model)(PROMPTS, SOLUTIONS), abs=1e-6)
    for same in (str(tmp_path / "steps"), f"model:path={tmp_path / 'steps'},aggregate=min"):
        built = RewardFunctionFactory.from_spec(same)
        assert isinstance(built, ProcessReward) and built.name == "steps"
        assert score(RewardFunctions([built])).tolist() == [steps.tolist()]
    assert isinstance(RewardFunctionFactory.from_model(process_model), ProcessReward)
    for line, code in (
        (f"process:path={folders[0]}", "wrong_model_kind"),
        (f"model:path={folders[0]},aggregate=min", "unused_option"),
        (f"model:path={folders[2]},k=2", "unused_option"),
        (f"process:path={folders[2]},aggregate=most", "invalid_value"),
    ):
        with raises_error(code):
            load_scorer([line])
    last = load_scorer([f"process:path={folders[2]},aggregate=last,name=end"])
    assert last.names == ("end",)
    expected = ProcessReward(process_model, aggregate="last")(PROMPTS, SOLUTIONS)
    assert score(last)[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("head", by_default(["linear", "mlp"], "mlp"))
def test_process_models_are_known_whatever_their_head(
    head: Any, tiny_llama: Any, byte_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    ProcessRewardModel.from_backbone(tiny_llama, byte_tokenizer, head=head).save_pretrained(tmp_path / "full")
    adapted = ProcessRewardModel.from_language_model(tiny_model_folder, head=head)
    adapted.add_lora(LoraSettings(lora_r=2)).save_pretrained(tmp_path / "adapter")
    scores = score(load_scorer([str(tmp_path / "full"), str(tmp_path / "adapter")]))
    assert scores[:, 2].tolist() == [0.0, 0.0] and bool((scores[:, :2] > 0).all())


@pytest.mark.parametrize("adapter", [False, True])
def test_a_process_model_comes_with_its_aggregate(
    adapter: bool, byte_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    model = ProcessRewardModel.from_language_model(tiny_model_folder)
    assert model.aggregate == ProcessReward(model).aggregate == "min"
    model.aggregate = "product"
    if adapter:
        model.add_lora(LoraSettings(lora_r=2))
    model.save_pretrained(tmp_path / "steps")
    scorer = load_scorer([str(tmp_path / "steps")])
    [reward] = scorer.functions
    assert isinstance(reward, ProcessReward) and reward.aggregate == "product"
    steps = model.score_steps(PROMPTS[0], ["mary went to kitchen .", "so it is kitchen"])
    assert score(scorer)[0, 0].item() == pytest.approx(float(steps.prod()), abs=1e-5)
    assert model.score(PROMPTS[:1], [["mary went to kitchen .", "so it is kitchen"]]).item() == pytest.approx(
        float(steps.prod()), abs=1e-5
    )
    with raises_error("invalid_value", key="aggregate"):
        model.aggregate = "most"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_language_model_is_a_judge(tiny_model_folder: Path) -> None:
    from rlhf_models import load_causal_lm, load_tokenizer

    template = "{question} {answer} true?"
    scorer = load_scorer([f"judge:path={tiny_model_folder},template={template}"])
    judge = PromptedJudge(
        load_causal_lm(tiny_model_folder), load_tokenizer(tiny_model_folder), template=template
    )
    expected = judge.score(PROMPTS, SOLUTIONS, [None] * 3)
    torch.testing.assert_close(score(scorer)[0], expected)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("process:aggregate=min", "missing_option"),
        ("process:agregate=min,path=x", "unknown_option"),
        ("judge:path=/nowhere/at/all", "model_not_found"),
        ("lenght", "unknown_reward"),
    ],
)
def test_wrong_lines(line: str, code: str) -> None:
    with raises_error(code):
        load_scorer([line])
