"""Reward workers in real Ray processes: their number and their deaths change nothing, errors come through."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ahead_engine import AheadEngine
from online_trainers import TOKENIZER, grpo, lm, ppo
from proofs import in_ci
from raises import raises_error
from rlhf_algos.distributed.config import DistributedConfig
from rlhf_data import RunFolder, UserError
from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions
from rlhf_models import RewardModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
_CLOCK = ("step_time", "time/rollout", "time/score", "time/update", "samples_per_second", "peak_memory_gb")
_SOURCE = '''
import os, signal, time
from pathlib import Path
_HERE = Path(__file__).parent

def even(completions, completion_ids, odd, trainer_state, log_metric, **columns):
    for ids in completion_ids:
        log_metric("longest", len(ids))
    with (_HERE / "calls").open("a") as file:
        file.write(f"{trainer_state.global_step}\\n")
    return [sum(t % 2 == o for t in ids) / len(ids) for ids, o in zip(completion_ids, odd, strict=True)]

def once(how):
    """Whether this is the first call of all."""
    try:
        (_HERE / how).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def kill(completions, **columns):
    if once("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(text) for text in completions]

def other_code(completions, **columns):
    if once("edited"):
        with Path(__file__).open("a") as file:
            file.write("# edited")
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(text) for text in completions]

def terminate(completions, **columns):
    if once("terminate"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3600)
    return [len(text) for text in completions]

def hang(completions, **columns):
    if once("hang"):
        time.sleep(3600)
    return [len(text) for text in completions]

def broken(completions, trainer_state, **columns):
    if trainer_state.global_step == 1:
        raise SystemExit("no such thing")
    return [1.0 for _ in completions]

class Counts:
    name = "counts"
    def __init__(self):
        self.calls = 0
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]
    def state(self):
        return {"calls": self.calls}
    def load_state(self, state):
        self.calls = state["calls"]

def ledger_lines(completions, **columns):
    """Notes how much was sampled when the first batch was scored."""
    if once("first"):
        (_HERE / "sampled").write_text(str((_HERE / "ledger").read_bytes().count(b'"rollouts":')))
    return [float(len(text)) for text in completions]
'''
Make = Callable[..., Any]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(_SOURCE)
    return file


@pytest.fixture
def pooled() -> Iterator[Make]:
    """Makes controllers and the rewards of their reward workers; `events` of each holds what it told."""
    with contextlib.ExitStack() as stack:

        def make(*specs: str, ledger: Path | None = None, **settings: Any) -> dict[str, Any]:
            from rlhf_algos.distributed.controller import Controller
            from rlhf_algos.distributed.scoring import PooledRewards, RewardSetup
            from rlhf_algos.distributed.worker import EngineSetup, WorkerRole

            events: list[tuple[str, dict[str, Any]]] = []
            settings = {"group_timeout": 30, "start_timeout": 300, "reward_workers": 1} | settings
            engine: Any = Controller(
                DistributedConfig.from_dict(settings),
                EngineSetup(1 << 18, torch.get_num_threads()),
                {"": WorkerRole(lm(), TOKENIZER)},
                eos_token_ids=[int(TOKENIZER.eos_token_id)],  # pyright: ignore[reportArgumentType]
                ledger=ledger,
                tell=lambda event, facts: events.append((event, facts)),
            )
            engine.events = events
            stack.callback(engine.close)
            setup = RewardSetup(specs, None, TOKENIZER, torch.get_num_threads())
            return {"engine": engine, "rewards": PooledRewards(engine, setup)}

        yield make


def _alone(*specs: str, staleness: int | None = None) -> dict[str, Any]:
    """Rewards in this process; with a staleness also an engine that samples ahead."""
    rewards = {"rewards": RewardFunctions([RewardFunctionFactory.from_spec(spec) for spec in specs])}
    return rewards if staleness is None else rewards | {"engine": AheadEngine(TOKENIZER, staleness)}


def _run(make: Any, options: dict[str, Any], **settings: Any) -> tuple[list[dict[str, float]], list[Any]]:
    found: list[dict[str, float]] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        found.append({name: value for name, value in metrics.items() if name not in _CLOCK})

    trainer = make(options=options | {"on_step": on_step}, **({"prompts_per_batch": 1} | settings))
    trainer.train()
    return found, [parameter.detach().clone() for parameter in trainer.parameters]


def _assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def _lost(options: dict[str, Any]) -> list[str]:
    return [facts["pool"] for event, facts in options["engine"].events if event == "lost"]


def _models(folder: Path) -> list[str]:
    """A reward model and a judge on the disk, as lines of a command."""
    torch.manual_seed(1)
    RewardModel.from_backbone(lm(), TOKENIZER).save_pretrained(folder / "reward")
    lm().save_pretrained(folder / "judge")
    TOKENIZER.save_pretrained(folder / "judge")
    return [f"model:path={folder / 'reward'}", f"judge:path={folder / 'judge'}"]


@pytest.mark.parametrize("workers", in_ci([1, 2], 2))
def test_any_number_of_reward_workers_is_as_none(workers: int, code: Path, pooled: Make):
    specs = (f"{code}:even", "length:target=20,unit=characters", *_models(code.parent))
    options = pooled(*specs, reward_workers=workers)
    for make in (grpo, ppo):
        found = _run(make, options)
        assert found[0][0]["longest"] > 0
        _assert_same(found, _run(make, _alone(*specs)))


@pytest.mark.proof
def test_scoring_goes_by_ordinals_ahead_of_the_trainer(code: Path, pooled: Make):
    specs = (f"{code}:even",)
    options = pooled(*specs, rollout_workers=2, reward_workers=2, max_staleness=2)
    _assert_same(_run(grpo, options, max_steps=6), _run(grpo, _alone(*specs, staleness=2), max_steps=6))
    steps = sorted(map(int, (code.parent / "calls").read_text().split()))
    assert steps == sorted([step for step in range(6) for _ in range(2)] * 2)


@pytest.mark.parametrize("how", in_ci(["kill", "terminate", "hang"], "kill"))
def test_what_a_lost_reward_worker_scored_is_scored_again(how: str, code: Path, pooled: Make):
    options = pooled(f"{code}:{how}", group_timeout=3)
    found = _run(grpo, options)
    assert _lost(options) == ["reward"]
    _assert_same(found, _run(grpo, _alone(f"{code}:{how}")))


@pytest.mark.proof
def test_an_idle_reward_worker_is_replaced(code: Path, pooled: Make):
    options = pooled(f"{code}:even")
    expected = _run(grpo, options)
    pids = [facts["pid"] for event, facts in options["engine"].events if event == "ready"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _assert_same(_run(grpo, options), expected)
    assert sorted(_lost(options)) == ["reward", "rollout"]


@pytest.mark.proof
@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_of_a_function_is_that_without_workers(staleness: int, code: Path, pooled: Make):
    steps: list[int] = []
    errors: list[UserError] = []
    here = _alone(f"{code}:broken", staleness=staleness)
    for options in (pooled(f"{code}:broken", max_staleness=staleness), here):
        on_step = {"on_step": lambda step, metrics: steps.append(step)}
        with raises_error("reward_failed", index=0) as caught:
            grpo(options=options | on_step, prompts_per_batch=1).train()
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1]) and "broken" in str(errors[0])
    assert steps == [1, 1]


def test_what_cannot_be_loaded_or_has_a_state_is_said(code: Path, pooled: Make):
    with raises_error("stateful_reward", name="counts"):
        pooled(f"{code}:Counts")
    with pytest.raises(UserError, match="nowhere"):
        pooled(f"{code}:nowhere")


@pytest.mark.proof
def test_scoring_begins_while_others_are_sampled(code: Path, pooled: Make):
    options = pooled(f"{code}:ledger_lines", ledger=code.parent / "ledger")
    settings = {"max_completion_length": 100, "min_completion_length": 100, "max_steps": 1}
    _run(grpo, options, per_device_train_batch_size=24, **settings)
    assert int((code.parent / "sampled").read_text()) < 6


def test_a_resumed_run_does_not_score_again(code: Path, pooled: Make):
    def train(stop_after: int | None = None, *, resume: bool = False) -> Any:
        run = RunFolder.create(code.parent / "run", job="grpo", resume=resume)
        options = pooled(f"{code}:even", ledger=run.path / "ledger")

        def on_step(step: int, metrics: Any) -> None:
            if step == stop_after:
                raise KeyboardInterrupt

        trainer = grpo(options=options | {"run": run, "on_step": on_step}, max_steps=6, save_steps=2)
        assert trainer.resume() == resume
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        options["engine"].close()
        return trainer

    train(stop_after=3)
    calls = code.parent / "calls"
    assert calls.read_text().split() == [str(step) for step in range(3) for _ in range(2)]
    calls.unlink()
    resumed = train(resume=True)
    assert calls.read_text().split() == [str(step) for step in range(3, 6) for _ in range(2)]
    _, expected = _run(grpo, _alone(f"{code}:even"), max_steps=6)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters, expected, strict=True))


def test_a_replacement_with_another_function_ends_the_run(pooled: Make, code: Path) -> None:
    with raises_error("not_the_same_files", path=str(code)):
        _run(grpo, pooled(f"{code}:other_code"))
