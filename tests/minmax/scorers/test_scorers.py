"""Which scorers a run loads, what is refused, and how far the game's own and held-out ones come apart."""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_data import UserError, apply_overrides
from rlhf_infer import APIJudge, PromptedJudge, RuleJudge
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.demo.builder import demo_models
from rlhf_minmax.demo.held_out import with_held_out_reward
from rlhf_minmax.demo.teachers import answer_text
from rlhf_minmax.game.scores import Scale
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.run.checks import check_run, inspect_models
from rlhf_minmax.run.dry_run import plan_run
from rlhf_minmax.run.memory import estimate_memory
from rlhf_minmax.scorers.held_out import held_out_metrics, measure_held_out_scales
from rlhf_minmax.scorers.loading import HeldOut, ScorerLoader, check_scorers, needs_demo
from rlhf_models import DeviceManager, RewardModel

API = ("judge_model.kind=api", "judge_model.model_name=m", "judge_model.base_url=http://127.0.0.1:1/v1")
TINY = ("data.train_stories=20", "data.eval_stories=8", "training.batch_size=4", "demo.num_stories=20")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


@pytest.fixture
def api() -> Iterator[str]:
    """An API that says yes at 75 % to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            top = [{"token": "yes", "logprob": math.log(0.75)}, {"token": "no", "logprob": math.log(0.25)}]
            choice = {"message": {"content": "yes"}, "logprobs": {"content": [{"top_logprobs": top}]}}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/v1"
        running.shutdown()
        thread.join()


def make(*overrides: str) -> MinMaxConfig:
    return MinMaxConfig.from_dict(apply_overrides({}, [*TINY, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kind=api", "model_name=m"], "needs base_url and model_name"),
        (["kind=api", "base_url=http://h/v1"], "needs base_url and model_name"),
        (["kind=prompted"], "a prompted judge needs model_name"),
        (["kind=rule", "model_name=m"], "kind rule has no model_name"),
        (["kind=rule", "load_in_8bit=true"], "kind rule has no load_in_8bit"),
        (["kind=head", "template='{answer}'"], "kind head has no template"),
        (["kind=head", "base_url=http://h/v1"], "kind head has no base_url"),
        (["kind=head", "prompt_price=1", "completion_price=1"], "kind head has no prompt_price"),
        (["kind=prompted", "model_name=m", "cache=false"], "kind prompted has no cache"),
        (
            [*(text.removeprefix("judge_model.") for text in API), "load_in_8bit=true"],
            "api has no load_in_8bit",
        ),
        ([*(text.removeprefix("judge_model.") for text in API), "prompt_price=1"], "give both or neither"),
        ([*(text.removeprefix("judge_model.") for text in API), "top_p=1"], "top_p"),
        (["kind=prompted", "model_name=m", "template='{story}'"], r"template has the field \{story\}"),
    ],
)
def test_fields_go_with_their_kind(overrides: list[str], message: str) -> None:
    for section in ("judge_model", "held_out.judge"):
        with pytest.raises(UserError, match=message):
            make(*(f"{section}.{text}" for text in overrides))


def test_a_written_config_can_be_read_back() -> None:
    held_out = ("held_out.judge.kind=rule", "held_out.reward_model.model_name=x")
    config = make(*API, "judge_model.answer=number", "judge_model.concurrency=3", *held_out)
    assert MinMaxConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "secret" not in json.dumps(config.to_dict())


def test_a_judge_behind_an_api(api: str, tmp_path: Path) -> None:
    config = make(*API[:2], f"judge_model.base_url={api}", "judge_model.template='{answer}'")
    prompts = load_stories(config).prompts
    judge = ScorerLoader(config, None, DeviceManager()).judge(prompts)
    assert isinstance(judge, APIJudge) and judge.template == "{answer}"
    assert judge.score(["q"], ["a"], [None]).tolist() == [pytest.approx(0.75)]
    again = ScorerLoader(config, None, DeviceManager()).judge(prompts)
    assert isinstance(again, APIJudge) and again.score(["q2"], ["a"], ["c"]).tolist() == [pytest.approx(0.75)]
    assert again.usage.cached == 1 and (tmp_path / "cache/rlhf/judge/judge.sqlite3").is_file()


def test_a_prompted_judge_takes_a_template(tmp_path: Path, byte_tokenizer: Any) -> None:
    from rlhf_models import tiny_model

    tiny_model("llama", vocab_size=len(byte_tokenizer)).save_pretrained(tmp_path / "judge")
    byte_tokenizer.save_pretrained(tmp_path / "judge")
    name = f"judge_model.model_name={tmp_path / 'judge'}"
    config = make("judge_model.kind=prompted", name, "judge_model.template='{answer}{critique}'")
    judge = ScorerLoader(config, None, DeviceManager()).judge(load_stories(config).prompts)
    assert isinstance(judge, PromptedJudge) and judge.template == "{answer}{critique}"


def test_an_api_has_no_model_here() -> None:
    config = make(*API)
    stories = load_stories(config)
    assert set(check_run(config, stories, DeviceManager()).models) == {"policy", "monitor", "reward"}


def test_a_missing_key_is_told_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with raises_error("no_api_key"):
        plan_run(make(*API))
    with raises_error("no_api_key"):
        plan_run(make(*(text.replace("judge_model", "held_out.judge", 1) for text in API)))
    plan_run(make(*API, "judge_model.api_key_env=null"))


@pytest.mark.slow
def test_requests_and_cost_of_a_dry_run() -> None:
    """5 steps of 4 stories, the first 2 for the monitor alone, with 20 probe stories and 8 held-out ones.

    A step: (4 sampled + 2 made-up answers) x 4 critiques + these 6 answers without one = 30, and 4 x 4 x 2
    = 32 for the policy. In all 5 x 30 + 3 x 32 = 246, and 3 requests for each of 8 stories in 3 evaluations
    (start, plain, end), 72, and 5 for each probe story, 100: 418. Exploitability asks for 4 answers x 4
    critiques of each of these stories besides, 128 in every evaluation: 802.
    """
    sizes = ("training.monitor_warmup_steps=2", "data.probe_stories=50")
    rows = dict(plan_run(make(*API, *sizes))["rows"])
    assert rows["judge"] == "m at http://127.0.0.1:1/v1"
    assert rows["judge requests"] == "about 62 per step, 802 in all"
    sizes = (*sizes, "diagnostics.exploitability_stories=0")
    assert dict(plan_run(make(*API, *sizes))["rows"])["judge requests"].endswith("418 in all")
    # With an evaluation at steps 2 and 4: 2 x 24 more; without the baseline one evaluation, 24, less.
    evaluated = ("training.eval_steps=2", "baseline=false")
    assert dict(plan_run(make(*API, *sizes, *evaluated))["rows"])["judge requests"].endswith("442 in all")
    # Probes of 2 rounds each ask for 24 critiques (the monitor's round) and 32 (the policy's), and for 4
    # critiques of every held-out story: 112 + 32. Two past policies meet two past monitors on 8 stories: 32.
    for setting, more in (("best_response_updates=2", 112 + 32), ("cross_play_steps=2", 32)):
        row = dict(plan_run(make(*API, *sizes, f"diagnostics.{setting}"))["rows"])["judge requests"]
        assert row.endswith(f"{418 + more} in all"), setting
    # Both: the probes also of two past pairs of players.
    both = ("diagnostics.best_response_updates=2", "diagnostics.cross_play_steps=2")
    row = dict(plan_run(make(*API, *sizes, *both))["rows"])["judge requests"]
    assert row.endswith(f"{418 + 3 * (112 + 32) + 32} in all")
    # 418 completion tokens at 1000 per million: 0.418.
    priced = ("judge_model.prompt_price=0", "judge_model.completion_price=1000")
    rows = dict(plan_run(make(*API, *sizes, *priced))["rows"])
    assert "418 in all, for about 0.418 (" in rows["judge requests"]
    held_out = (text.replace("judge_model", "held_out.judge", 1) for text in API)
    rows = dict(plan_run(make(*sizes, *held_out))["rows"])
    # One request per held-out story and evaluation, one per probe story.
    assert rows["held-out judge requests"] == "about 0 per step, 44 in all"
    assert "judge requests" not in rows


def test_the_prompt_price_counts_characters_and_completions() -> None:
    """A template of 40 characters without fields, and a question: (40 + question) / 4 + 16 + 24 tokens."""
    template = "x" * 40
    priced = ("judge_model.prompt_price=1000000", "judge_model.completion_price=0")
    config = make(*API, *priced, f"judge_model.template={template}", "training.max_steps=1", "baseline=false")
    stories = load_stories(config)
    question = sum(len(record.question) for record in stories.train) / len(stories.train)
    row = dict(plan_run(config)["rows"])["judge requests"]
    requests = int(row.split(" in all")[0].split()[-1])
    assert f"for about {requests * ((40 + question) / 4 + 16 + 24):.3g} " in row


def test_what_trains_cannot_be_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "./x", str(tmp_path / "x")):
        with raises_error("not_held_out", key="reward_model"):
            check_scorers(make("reward_model.model_name=x", f"held_out.reward_model.model_name={name}"))
    check_scorers(make("reward_model.model_name=x", "held_out.reward_model.model_name=y"))
    check_scorers(make("held_out.reward_model={}"))
    with raises_error("not_held_out", key="judge"):
        check_scorers(make("held_out.judge={}"))
    other = [text.replace("judge_model", "held_out.judge", 1) for text in API]
    with raises_error("not_held_out", key="judge"):
        check_scorers(make(*API, *other, "held_out.judge.answer=number"))
    check_scorers(make(*API, *other, "held_out.judge.model_name=m2"))


def test_what_the_demonstration_is_needed_for() -> None:
    given = ("policy_model.model_name=p", "monitor_model.model_name=p", "reward_model.model_name=r")
    assert not needs_demo(make(*given, *API))
    assert not needs_demo(make(*given, "judge_model.kind=rule", "held_out.reward_model.model_name=y"))
    assert needs_demo(make(*given))
    assert needs_demo(make(*given, *API, "held_out.reward_model={}"))
    assert needs_demo(make(*given, *API, "held_out.judge={}"))


def test_held_out_scorers_are_checked_and_measured() -> None:
    config = make("judge_model.kind=rule", "held_out.reward_model={}", "held_out.judge={}")
    models = inspect_models(config, load_stories(config))
    assert set(models) == {"policy", "monitor", "reward", "held-out reward", "held-out judge"}
    rows = dict(plan_run(config)["rows"])
    assert rows["held-out reward model"] == "llama, built from the training rows"
    assert rows["longest held-out judge sequence"].split()[0].isdigit()
    plain = make("judge_model.kind=rule")
    without = {name: info for name, info in models.items() if not name.startswith("held-out")}

    def weights(config: MinMaxConfig, models: dict[str, Any]) -> float:
        planned = estimate_memory(config, models, DeviceManager(num_gpus=0), pass_tokens=0, cache_tokens=0)
        (memory,) = planned.values()
        return memory["load"]["weights"]

    more, less = weights(config, models), weights(plain, without)
    only = weights(plain, {name: models[name] for name in ("policy", "monitor")})
    assert more - less == 2 * (less - only) > 0  # two more classifiers like the reward model


def test_held_out_scorers_of_the_demonstration(demo_cache: Path, make_config: Callable[..., Any]) -> None:
    config, devices = make_config("held_out.reward_model={}", "held_out.judge.kind=rule"), DeviceManager({})
    stories = load_stories(config)
    arguments = (stories.train, stories.prompts, config.demo)
    demo = demo_models(*arguments, seed=config.seed, cache_folder=demo_cache, force=True)
    stages: list[str] = []
    demo = with_held_out_reward(
        demo, *arguments, seed=config.seed, progress=lambda stage, *_: stages.append(stage)
    )
    held_out = ScorerLoader(config, demo, devices).held_out(stories.prompts)
    assert isinstance(held_out.judge, RuleJudge) and isinstance(held_out.reward_model, RewardModel)
    assert stages == ["reward model"] * config.demo.reward_steps
    prompts = [stories.prompts.policy(record) for record in stories.held_out]
    answers = [answer_text(record.answer_text) for record in stories.held_out]
    own = RewardModel.from_pretrained(demo.reward).score(prompts, answers)
    assert not torch.allclose(held_out.reward_model.score(prompts, answers), own, atol=1e-3)
    stages.clear()
    assert with_held_out_reward(demo, *arguments, seed=config.seed) == demo and not stages
    nothing = ScorerLoader(make_config(), demo, devices).held_out(stories.prompts)
    assert nothing == HeldOut(None, None)


class Fixed:
    """Gives stated scores, as a reward model."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        return torch.tensor(self.scores)


class FixedJudge:
    """Gives stated scores, as a judge."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        return torch.tensor(self.scores)


def test_hacking_gap(game: Any) -> None:
    """Held-out rewards 3, 5 at mean 2, deviation 2: 0.5, 1.5, mean 1. Judge 0.2, 0.6 at 0.4, 0.4: mean 0.

    Own means 2 and 0.5, weights 1 and 3: gap 1 x (2 - 1) + 3 x (0.5 - 0) = 2.5.
    """
    pipeline, stories = game
    pipeline = replace(pipeline, w_judge=3.0)
    records = stories.held_out[:2]
    answers = pipeline.answer(pipeline.players.policy, records, 1, seed=0)
    critiques = pipeline.criticise(records, answers, 1, seed=0)
    reward, judge = Fixed(3.0, 5.0), FixedJudge(0.2, 0.6)
    scales = {"reward_scale": Scale(2.0, 2.0), "judge_scale": Scale(0.4, 0.4)}
    own = {"rewards": torch.tensor([1.0, 3.0]), "judge_scores": torch.tensor([0.0, 1.0])}

    def metrics(reward: Any, judge: Any) -> list[float | None]:
        held_out = HeldOut(reward, judge, **scales)
        found = held_out_metrics(held_out, pipeline, records, answers, critiques, **own)
        return [found[f"minmax/{name}"] for name in ("heldout_reward", "heldout_judge", "hacking_gap")]

    assert metrics(reward, judge) == pytest.approx([1.0, 0.0, 2.5], abs=1e-6)
    assert metrics(reward, None) == [pytest.approx(1.0), None, pytest.approx(1.0)]
    assert metrics(None, judge) == [None, pytest.approx(0.0, abs=1e-6), pytest.approx(1.5)]
    assert metrics(None, None) == [None, None, None]


def test_scales_are_those_of_the_start(game: Any) -> None:
    """Scores 1, 3, 8: mean 4, deviation √13; the judge is missing."""
    pipeline, stories = game
    held_out = HeldOut(Fixed(1.0, 3.0, 8.0), None, judge_scale=Scale(5.0, 5.0))
    measured = measure_held_out_scales(held_out, pipeline, stories.train[:3], seed=0)
    assert (measured.reward_scale.mean, measured.reward_scale.std) == pytest.approx((4.0, math.sqrt(13)))
    assert measured.judge_scale == Scale() and measured.reward_model is held_out.reward_model
