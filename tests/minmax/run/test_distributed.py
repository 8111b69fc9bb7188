"""Two real processes against one: replicated optimizers, and DeepSpeed's."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from files import CLOCK

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parents[1].joinpath("distributed_worker.py")
CONFIGS = Path(__file__).parents[3] / "configs"
ZERO2 = f"training.deepspeed={CONFIGS / 'zero2.json'}"
ZERO3 = f"training.deepspeed={CONFIGS / 'zero3.json'}"
FSDP = "training.fsdp=true"
OFFLOAD = "training.fsdp_cpu_offload=true"
FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
SLOW = ("training.policy_learning_rate=2e-4", "training.monitor_learning_rate=2e-4")
"""A step of Adam amplifies what rounding makes of gradients near zero, up to the learning rate."""
CRITIC = ("policy_model.baseline=critic",)
MIXED = ("monitor_model.use_lora=false",)
FEW = ("data.label_share=0.1", "training.batch_size=3")
"""Some steps have a story with a label, others none."""
CUT = "training.max_tokens_per_batch=120"
REMEMBERED = (*CRITIC, "diagnostics.cross_play_steps=1")
"""A critic and past players, which checkpoints have to hold."""
NOT_ALIKE = (*CLOCK, "num_tokens")
"""Where a prompt's samples are parted between processes, each computes the prompt."""


@pytest.fixture(scope="module")
def rounds(make_game, tmp_path_factory) -> Path:
    """Ten rounds of rollouts with advantages for either player, odd in number so that shares differ."""
    folder = tmp_path_factory.mktemp("rounds")
    pipeline, stories = make_game()
    found: dict[str, list[Any]] = {"policy": [], "monitor": []}
    for number in range(10):
        output = pipeline.forward_pass(stories.train[4 * number :][:3], seed=number)
        samples = {
            "policy": [answer.rollout for answer in output.answers],
            "monitor": [critique.rollout for critique in output.critiques],
        }
        for role, rollouts in samples.items():
            draw = torch.Generator().manual_seed(number)
            found[role].append((rollouts, torch.randn(len(rollouts), generator=draw)))
    torch.save(found, folder / "rounds.pt")
    return folder


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        pytest.param((), (), marks=pytest.mark.proof),
        pytest.param((CUT,), (CUT,), marks=pytest.mark.proof),
        pytest.param(CRITIC, CRITIC, marks=pytest.mark.proof),
        pytest.param((CUT,), (CUT, ZERO2), marks=pytest.mark.proof),
        pytest.param(CRITIC, (*CRITIC, ZERO2), marks=pytest.mark.proof),
        pytest.param(FULL, (*FULL, ZERO2), marks=pytest.mark.proof),
        ((CUT, *CRITIC), (CUT, *CRITIC, ZERO3)),
        pytest.param(FULL, (*FULL, ZERO3), marks=pytest.mark.proof),
        pytest.param(MIXED, (*MIXED, ZERO3), marks=pytest.mark.proof),
        pytest.param((CUT, *CRITIC), (CUT, *CRITIC, FSDP), marks=pytest.mark.proof),
        pytest.param((*FULL, *CRITIC), (*FULL, *CRITIC, FSDP), marks=pytest.mark.proof),
        pytest.param(MIXED, (*MIXED, FSDP), marks=pytest.mark.proof),
        pytest.param(CRITIC, (*CRITIC, FSDP, OFFLOAD), marks=pytest.mark.proof),
    ],
    ids=[
        *("adapters", "cut", "critic", "zero2-cut", "zero2-critic", "zero2-full", "zero3-cut-critic"),
        *("zero3-full", "zero3-mixed", "fsdp-cut-critic", "fsdp-full-critic", "fsdp-mixed", "fsdp-offload"),
    ],
)
def test_ten_updates_of_both_players_agree_with_one_process(
    rounds, demo_cache, run_processes, alone, together
):
    run_processes([WORKER, "replay", rounds, demo_cache, *SLOW, *alone], processes=1)
    run_processes([WORKER, "replay", rounds, demo_cache, *SLOW, *together])
    one, two = (torch.load(rounds / f"{count}.pt", weights_only=False) for count in (1, 2))
    assert one["norms"] == pytest.approx(two["norms"], rel=1e-3)
    for role in ("policy", "monitor"):
        for mine, its in zip(one["weights"][role], two["weights"][role], strict=True):
            assert torch.allclose(mine, its, rtol=0, atol=1e-5)
        assert any(mine.abs().sum() > 0 for mine in one["weights"][role])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ((), ()),
        ((), (ZERO2,)),
        (FULL, (*FULL, FSDP)),
        (FEW, FEW),
        (REMEMBERED, (*REMEMBERED, FSDP)),
        (REMEMBERED, (*REMEMBERED, ZERO3)),
    ],
    ids=["replicated", "zero2", "fsdp-full", "few-labels", "fsdp", "zero3"],
)
def test_a_run_of_two_processes_starts_as_that_of_one_and_resumes(
    make_game, demo_cache, run_processes, tmp_path, alone, together
):
    make_game()
    settings = ("training.save_total_limit=10", "held_out.judge.kind=rule")
    run_processes([WORKER, "play", tmp_path, demo_cache, *settings, *alone], processes=1)
    run_processes([WORKER, "play", tmp_path, demo_cache, *settings, *together])
    one, two = (_rows(tmp_path / str(count)) for count in (1, 2))
    assert [row["step"] for row in two] == [row["step"] for row in one] == [1, 2, 3]
    _assert_alike(one[0], two[0])
    before = [json.loads((tmp_path / str(count) / "preflight.json").read_text()) for count in (1, 2)]
    _assert_alike(before[0]["before"], before[1]["before"])
    assert (tmp_path / "2" / "report.html").is_file()

    for path in ("results.json", "report.html"):
        (tmp_path / "2" / path).unlink()
    newest = tmp_path / "2" / "checkpoint-3"
    newest.rename(tmp_path / "put-away")
    run_processes([WORKER, "play", tmp_path, demo_cache, *settings, *together])
    _assert_alike(two[2], _rows(tmp_path / "2")[2], tolerance=0)
    if {FSDP, ZERO3} & {*together}:  # a single process takes up what two have left
        own = tmp_path / "elsewhere" / "1"
        shutil.copytree(tmp_path / "2", own)
        shutil.rmtree(own / "checkpoint-3")
        for path in ("results.json", "report.html"):
            (own / path).unlink()
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, WORKER]
        run_processes([*start, "play", own.parent, demo_cache, *settings, *together], processes=1)
        _assert_alike(two[2], _rows(own)[2])


@pytest.mark.proof
@pytest.mark.usefixtures("ray_installed")
def test_two_processes_have_rollout_workers(make_game, demo_cache, run_processes, tmp_path):
    make_game()
    settings = ("held_out.judge.kind=rule", "training.prompts_per_batch=1")
    workers = "distributed={address: local, rollout_workers: 2, object_store_gb: 0.2}"
    run_processes([WORKER, "play", tmp_path / "without", demo_cache, *settings])
    run_processes([WORKER, "play", tmp_path / "with", demo_cache, *settings, workers])
    without, found = (_rows(tmp_path / name / "2") for name in ("without", "with"))
    assert len(without) == len(found) == 3
    for mine, its in zip(without, found, strict=True):
        _assert_alike(mine, its, tolerance=0)
    events = [json.loads(line) for line in (tmp_path / "with/2/workers.jsonl").read_text().splitlines()]
    assert [row["event"] for row in events] == ["start", "ready", "ready"]


@pytest.mark.proof
def test_two_processes_tell_all_that_was_asked(make_game, demo_cache, run_processes, tmp_path, monkeypatch):
    make_game()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "infer"))
    fake = importlib.import_module("judge_server")
    with fake.serve(fake.certain) as server:
        api = ("kind=api", "model_name=m", f"base_url={server.url}", "api_key_env=null", "cache=false")
        judge = (f"judge_model.{each}" for each in (*api, "prompt_price=2", "completion_price=500"))
        run_processes(
            [WORKER, "play", tmp_path, demo_cache, "training.max_steps=1", "baseline=false", *judge]
        )
        count = len(server.requests)
    usage = json.loads((tmp_path / "2" / "results.json").read_text())["api_usage"]["judge"]
    assert count == usage["requests"] > 0
    # 100 prompt tokens at 2 and one completion token at 500 a million are 0.0007 a request
    assert usage["prompt_tokens"] == 100 * count and usage["cost"] == pytest.approx(count * 7e-4)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _assert_alike(first: dict[str, Any], second: dict[str, Any], tolerance: float = 1e-4) -> None:
    numbers = {name: value for name, value in first.items() if isinstance(value, int | float)}
    for name in (name for name in numbers if not name.startswith(NOT_ALIKE)):
        assert second[name] == pytest.approx(numbers[name], rel=tolerance, abs=tolerance), name
