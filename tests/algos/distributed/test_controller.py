"""Workers in real Ray processes: their number, their deaths and the driver's change nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ahead_engine import AheadEngine
from online_trainers import PROMPTS, TOKENIZER, grpo, lm, ppo
from proofs import in_ci
from raises import raises_error
from rlhf_algos.distributed.config import DistributedConfig
from rlhf_data import RunFolder
from rlhf_infer import SamplingParams, TransformersEngine
from rolled_back import RolledBack, check_prompts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
_CLOCK = ("step_time", "time/rollout", "time/score", "time/update", "samples_per_second", "peak_memory_gb")
_IDS = [prompt.prompt_ids for prompt in PROMPTS]
_PARAMS = SamplingParams(6, seed=3)
Make = Callable[..., Any]


@pytest.fixture
def controller() -> Iterator[Make]:
    """Makes controllers, which are closed at the end; `events` of each holds what it told."""
    with contextlib.ExitStack() as stack:

        def make(*, ledger: Path | None = None, max_batch_tokens: int = 1 << 18, **settings: Any) -> Any:
            from rlhf_algos.distributed.controller import Controller
            from rlhf_algos.distributed.worker import EngineSetup, WorkerRole

            events: list[tuple[str, dict[str, Any]]] = []
            config = DistributedConfig.from_dict({"group_timeout": 30, "start_timeout": 300} | settings)
            made: Any = Controller(
                config,
                EngineSetup(max_batch_tokens, torch.get_num_threads()),
                {"": WorkerRole(lm(), TOKENIZER)},
                eos_token_ids=[int(TOKENIZER.eos_token_id)],  # pyright: ignore[reportArgumentType]
                ledger=ledger,
                tell=lambda event, facts: events.append((event, facts)),
            )
            made.events = events
            stack.callback(made.close)
            return made

        yield make


def _run(make: Any, engine: Any = None, **settings: Any) -> tuple[list[dict[str, float]], list[Any]]:
    found: list[dict[str, float]] = []
    options: dict[str, Any] = {
        "on_step": lambda step, metrics: found.append({k: v for k, v in metrics.items() if k not in _CLOCK})
    }
    trainer = make(options=options | ({"engine": engine} if engine else {}), prompts_per_batch=1, **settings)
    trainer.train()
    return found, [parameter.detach().clone() for parameter in trainer.parameters]


def _assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def _expected(model: Any) -> Any:
    engine = TransformersEngine(model, TOKENIZER)
    return [group for ids in _IDS for group in engine.generate([ids], 3, _PARAMS)]


def _pids(engine: Any) -> list[int]:
    return [facts["pid"] for event, facts in engine.events if event == "ready"]


def _all_ready(engine: Any, count: int) -> None:
    while len(_pids(engine)) < count:
        engine.generate(_IDS, 1, _PARAMS)


@pytest.mark.parametrize("workers", in_ci([1, 2, 4], 2))
def test_any_number_of_workers_is_as_none(workers: int, controller: Make):
    engine = controller(rollout_workers=workers)
    for make in (grpo, ppo):
        _assert_same(_run(make, engine), _run(make))


@pytest.mark.proof
@pytest.mark.parametrize("workers", [1, 3])
def test_sampling_ahead_goes_by_ordinals(workers: int, controller: Make):
    engine = controller(rollout_workers=workers, max_staleness=2)
    for make in (grpo, ppo):
        _assert_same(_run(make, engine, max_steps=6), _run(make, AheadEngine(TOKENIZER, 2), max_steps=6))
    told = [facts for event, facts in engine.events if event == "step"]
    assert [facts["staleness"] for facts in told] == [0, 1, 2, 2, 2, 2] * 2


def test_a_worker_that_is_killed_exits_breaks_or_hangs_is_replaced(controller: Make):
    engine, model = controller(rollout_workers=1, group_timeout=5), lm()
    engine.publish(model, 0)
    expected = _expected(model)
    assert engine.generate(_IDS, 3, _PARAMS) == expected
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP):
        os.kill(_pids(engine)[-1], number)
        assert engine.generate(_IDS, 3, _PARAMS) == expected
    lost = [facts for event, facts in engine.events if event == "lost"]
    assert len(lost) == 4 and len(set(_pids(engine))) == 5
    assert "group_timeout" in lost[3]["why"]


@pytest.mark.proof
def test_the_weights_actor_is_replaced(controller: Make):
    import ray

    engine, model = controller(rollout_workers=2), lm()
    engine.publish(model, 0)
    _all_ready(engine, 2)
    ray.kill(engine._published.actor)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    engine.publish(model, 1)
    assert engine.generate(_IDS, 3, _PARAMS) == _expected(model)
    failed = [facts["worker"] for event, facts in engine.events if event == "failed"]
    assert 0 < len(failed) == len(set(failed))  # the new one knows everything, so nobody fails twice


@pytest.mark.proof
def test_no_workers_left_is_said_in_time(controller: Make):
    engine = controller(rollout_workers=2, on_worker_loss="shrink")
    engine.publish(lm(), 0)
    _all_ready(engine, 2)
    first, second = _pids(engine)
    os.kill(first, signal.SIGKILL)
    assert engine.generate(_IDS, 3, _PARAMS) == _expected(lm())
    os.kill(second, signal.SIGKILL)
    started = time.monotonic()
    with raises_error("no_workers_left", workers=2):
        engine.generate(_IDS, 3, _PARAMS)
    assert time.monotonic() - started < 30


@pytest.mark.proof
def test_losses_have_a_budget(controller: Make):
    engine = controller(rollout_workers=1, max_worker_failures=0)
    engine.publish(lm(), 0)
    engine.generate(_IDS, 1, _PARAMS)
    os.kill(_pids(engine)[0], signal.SIGKILL)
    with raises_error("too_many_lost_workers", lost=1):
        engine.generate(_IDS, 1, _PARAMS)


def test_a_loss_can_end_the_run(controller: Make):
    engine = controller(rollout_workers=1, on_worker_loss="stop")
    engine.publish(lm(), 0)
    engine.generate(_IDS, 1, _PARAMS)
    os.kill(_pids(engine)[0], signal.SIGKILL)
    with raises_error("worker_lost", worker=0):
        engine.generate(_IDS, 1, _PARAMS)


def _fails(completion: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the processor broke")


def test_errors_of_the_sampling_have_a_budget_of_their_own_and_a_users_mistake_has_none(controller: Make):
    engine = controller(rollout_workers=1, max_worker_failures=0, max_group_failures=2, max_batch_tokens=20)
    engine.publish(lm(), 0)
    with raises_error("max_batch_tokens_too_small"):
        engine.generate(_IDS[:1], 1, SamplingParams(60))
    with raises_error("group_failed", failures=3):
        engine.generate(_IDS[:1], 1, SamplingParams(6, logits_processors=(_fails,)))
    assert len(_pids(engine)) == 1


@pytest.mark.parametrize("staleness", in_ci([0, 2], 2))
def test_a_resumed_run_takes_what_was_sampled(staleness: int, controller: Make, tmp_path: Path):
    steps: dict[str, Any] = {"max_steps": 8, "save_steps": 3}

    def train(name: str, workers: int, stop_after: int | None = None, *, resume: bool = False) -> Any:
        run = RunFolder.create(tmp_path / name, job="grpo", resume=resume)
        engine = controller(rollout_workers=workers, max_staleness=staleness, ledger=run.path / "ledger")

        def on_step(step: int, metrics: Any) -> None:
            if step == stop_after:
                raise KeyboardInterrupt

        options = {"run": run, "engine": engine, "on_step": on_step}
        trainer = grpo(options=options, prompts_per_batch=1, **steps)
        assert trainer.resume() == resume
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        engine.close()
        return trainer, engine, run

    whole, _, straight = train("whole", 1)
    train("halted", 1, stop_after=5)
    resumed, engine, run = train("halted", 2, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, resumed.parameters, strict=True))
    rows = [
        [{k: v for k, v in row.items() if k not in _CLOCK} for row in each.read_metrics()]
        for each in (run, straight)
    ]
    assert rows[0] == rows[1]
    known = [facts["from_ledger"] for event, facts in engine.events if event == "step"]
    assert known[:2] == [2, 2] and known[-1] == 0


def test_loading_a_state_drops_what_has_begun(controller: Make):
    engine = controller(max_staleness=2)
    engine.publish(lm(), 0)
    for step in range(3):
        engine.begin(step, PROMPTS, 2, _PARAMS)
    engine.load_state(engine.state())
    engine.begin(1, PROMPTS[::-1], 2, _PARAMS)
    groups, _ = engine.finish(1)
    assert [list(group[0].prompt_ids) for group in groups] == [list(ids) for ids in _IDS[::-1]]


def test_a_rollback_drops_what_was_sampled_ahead(controller: Make, tmp_path: Path):
    """Prompts come in another order then, and must not be scored with completions of the former ones."""
    steps: dict[str, Any] = {"max_steps": 8, "save_steps": 2}

    def train(name: str, stop_after: int | None = None, *, resume: bool = False) -> Any:
        run = RunFolder.create(tmp_path / name, job="grpo", resume=resume)
        engine = controller(max_staleness=2, ledger=run.path / "ledger")
        trainer = grpo(options={"run": run, "engine": engine}, prompts_per_batch=1, **steps)
        guard = trainer.guard = RolledBack(trainer, at=5, to=4)
        if resume:
            assert trainer.resume()
        check_prompts(trainer)

        def on_step(step: int, metrics: Any) -> None:
            if step == stop_after and guard.rollbacks:
                raise KeyboardInterrupt

        trainer.on_step = on_step
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        engine.close()
        return trainer, engine

    whole, engine = train("whole")
    told = [facts["version"] for event, facts in engine.events if event == "step"]
    assert told == [0, 0, 0, 1, 2, 4, 4, 4, 5]
    train("halted", 7)
    resumed, engine = train("halted", resume=True)
    told = [facts["from_ledger"] for event, facts in engine.events if event == "step"]
    assert told == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, resumed.parameters, strict=True))


def test_rollouts_that_are_lost_for_good_are_said(controller: Make, tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", job="grpo")
    options: dict[str, Any] = {"run": run}
    options["engine"] = controller(max_staleness=1, ledger=run.path / "ledger")
    trainer = grpo(options=options, save_steps=2, max_steps=2)
    trainer.train()
    trainer.close()
    (run.path / "ledger").unlink()
    options["engine"] = controller(max_staleness=1, ledger=run.path / "ledger")
    trainer = grpo(options=options, save_steps=2, max_steps=4)
    trainer.resume()
    options["engine"].load_state({"versions": {"1": "0" * 32}})
    with raises_error("lost_rollouts", step=3):
        trainer.train()


def test_a_cluster_without_room_says_so():
    from rlhf_algos.distributed.cluster import Cluster

    with raises_error("no_room_in_cluster", workers=3):
        Cluster(DistributedConfig(rollout_workers=3, cpus_per_worker=64, start_timeout=1))
