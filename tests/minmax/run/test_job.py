"""A whole tiny run: what lies in its folder, and what an interrupted one becomes."""

import json
import shutil
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rlhf_minmax.run.minmax_job
from files import CLOCK
from proofs import in_ci
from raises import raises_error
from rlhf_data import RunFolder
from rlhf_minmax import Events, MinMaxJob
from rlhf_minmax.evaluation.doctor import config_findings
from rlhf_models import DeviceManager

BLOCK = {
    "policy/accuracy",
    "policy/hack_rate",
    "policy/reward_score",
    "policy/parse_rate",
    "monitor/verdict_balanced_accuracy",
    "monitor/evidence_valid_rate",
    "constraint/violation",
    "dual/lambda",
    "minmax/value",
}


class Killed(Exception):
    """Stands for a kill."""


def die(*args, **kwargs):
    raise Killed


class Log(Events):
    """Notes what happens, and dies at the entry it is told to."""

    def __init__(self, die_at=None):
        self.entries, self.die_at = [], die_at

    def note(self, *entry):
        self.entries.append(entry)
        if entry == self.die_at:
            raise Killed

    def device_plan(self, rows):
        self.note("devices", len(rows))

    def break_even(self, check):
        self.note("break_even")

    def phase(self, name, start, total):
        self.note("phase", name, start, total)

    def step(self, phase, step, total, metrics):
        self.note("step", phase, step)

    def evaluated(self, block, metrics):
        self.note("evaluated", block)


def job_in(folder, config, cache, events=None):
    return MinMaxJob(config, RunFolder.create(folder, resume=True), events or Events(), cache_folder=cache)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_config, demo_cache):
    """An uninterrupted run: its folder, results and log."""
    folder, log = tmp_path_factory.mktemp("job") / "run", Log()
    results = job_in(folder, make_config(), demo_cache, log).play()
    return RunFolder(folder), results, log.entries


def metrics(run):
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCK)}
        for part in (RunFolder(run.path / "plain"), run)
        for row in part.read_metrics()
    ]


def assert_same_run(run, whole):
    """Everything but the wall clock agrees."""
    other, results, _ = whole
    assert metrics(run) == metrics(other)
    mine = run.read_results()
    for key in ("before", "plain", "after", "break_even", "findings", "steps", "num_tokens", "prompts"):
        assert mine[key] == results[key], key
    assert run.read_config() == other.read_config()
    for name in ("samples.jsonl", "preflight.json"):
        assert (run.path / name).read_bytes() == (other.path / name).read_bytes(), name
    for role in ("policy", "monitor"):
        weights = f"final/{role}/adapter_model.safetensors"
        assert (run.path / weights).read_bytes() == (other.path / weights).read_bytes()


def test_the_folder_of_a_run(whole, make_config):
    run, results, _ = whole
    names = {path.name for path in run.path.iterdir()}
    expected = {"config.json", "metrics.jsonl", "results.json", "samples.jsonl", "report.html", "final"}
    expected |= {"checkpoint-2", "checkpoint-3", "plain", "preflight.json"}
    expected |= {"minmax.png", "training_curves.png"}
    assert names == expected
    assert run.read_config() == make_config().to_dict()
    assert run.read_results() == json.loads(json.dumps(results))
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert (run.path / "minmax.png").read_bytes().startswith(b"\x89PNG")


def test_the_results(whole, make_config):
    _, results, _ = whole
    warned = [found["text"] for found in results["findings"] if found["step"] == 0]
    assert warned and set(config_findings(make_config(), results["labels"]["stories"])) <= set(warned)
    for block in ("before", "plain", "after"):
        assert set(results[block]) >= BLOCK, block
    assert results["before"]["dual/lambda"] == 5.0 and results["plain"]["dual/lambda"] is None
    assert results["after"]["constraint/violation_ema"] >= 0
    split = results["wall_time"]
    assert set(split) == {"demo", "plain", "game", "evaluation", "total"}
    assert sum(split[part] for part in split if part != "total") <= split["total"]
    assert results["steps"] == 3 and results["num_tokens"] > 0 and results["resumed"] is False
    assert results["findings"][-1]["step"] == 3  # too short to tell what is dead
    assert {row["role"] for row in results["device_plan"]} == {"policy", "monitor", "reward", "judge"}
    assert results["break_even"]["w_judge"] >= 0 and results["break_even"]["advice"]
    assert "torch" in results["versions"] and set(results["models"]) >= {"policy", "monitor", "reward"}


def test_the_prompts_are_shown_as_the_players_saw_them(whole, make_game):
    _, results, _ = whole
    _, stories = make_game()
    record = stories.held_out[0]
    policy, monitor = results["prompts"][:2]
    assert policy == {"role": "policy", "text": stories.prompts.policy(record)}
    assert monitor["role"] == "monitor" and monitor["text"].startswith(policy["text"])
    assert monitor["text"].endswith("critique:")


def test_the_report_stands_alone_and_shows_the_run(whole):
    run, results, _ = whole
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page.replace("https://www.w3.org", "")
    assert "data:image/svg+xml;base64," in page
    assert f"{results['after']['policy/accuracy']:.2f}" in page


def test_sample_exchanges_of_every_stage(whole):
    run, _, _ = whole
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert [s["stage"] for s in samples] == ["start"] * 8 + ["plain"] * 8 + ["minmax"] * (4 + 8)
    assert [s.get("step") for s in samples] == [None] * 16 + [2] * 4 + [None] * 8
    assert [s["story"] for s in samples[16:20]] == [s["story"] for s in samples[:4]]


def test_the_final_players_load_with_plain_peft(whole):
    run, results, _ = whole
    base = AutoModelForCausalLM.from_pretrained(results["models"]["policy"])
    model: Any = PeftModel.from_pretrained(base, str(run.path / "final" / "policy"))
    saved = load_file(run.path / "final" / "policy" / "adapter_model.safetensors")
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)
    assert model.peft_config["default"].r == 16


def test_the_order_of_a_run(whole):
    _, _, log = whole
    plain = [("phase", "plain", 0, 2), ("step", "plain", 1), ("step", "plain", 2), ("evaluated", "plain")]
    game = [("phase", "minmax", 0, 3), *[("step", "minmax", i) for i in (1, 2, 3)], ("evaluated", "after")]
    assert log == [("devices", 4), ("break_even",), ("evaluated", "before"), *plain, *game]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(("step", "minmax", 2), marks=pytest.mark.slow),
        *(
            pytest.param(moment, marks=[pytest.mark.slow, pytest.mark.proof])
            for moment in (("devices", 4), ("step", "plain", 1), ("evaluated", "plain"))
        ),
    ],
    ids=lambda moment: "-".join(map(str, moment)),
)
def test_a_killed_run_resumes_to_the_same_end(tmp_path, make_config, demo_cache, whole, moment, no_figures):
    with pytest.raises(Killed):
        job_in(tmp_path, make_config(), demo_cache, Log(die_at=moment)).play()
    job = job_in(tmp_path, make_config(), demo_cache)
    assert job.play(resume=True)["resumed"] is True
    assert_same_run(job.run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("measure_scales", marks=pytest.mark.slow), "measure_game"])
def test_a_run_killed_during_the_pre_flight_check_resumes(
    tmp_path, make_config, demo_cache, whole, where, monkeypatch, no_figures
):
    with monkeypatch.context() as patch:
        patch.setattr(rlhf_minmax.run.minmax_job, where, die)
        with pytest.raises(Killed):
            job_in(tmp_path, make_config(), demo_cache).play()
    assert not (tmp_path / "preflight.json").exists()
    job = job_in(tmp_path, make_config(), demo_cache)
    job.play(resume=True)
    assert_same_run(job.run, whole)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_rules_or_stories(tmp_path, make_config, demo_cache, no_figures):
    config = make_config("baseline=false")
    with pytest.raises(Killed):
        job_in(tmp_path, config, demo_cache, Log(die_at=("step", "minmax", 1))).play()
    path = tmp_path / "preflight.json"
    written = path.read_text()
    for key, code in (("texts", "rules_changed"), ("data", "different_training_data")):
        path.write_text(json.dumps(json.loads(written) | {key: "others"}))
        for go_on in (lambda job: job.play(resume=True), lambda job: job.evaluate_only()):
            with raises_error(code):
                go_on(job_in(tmp_path, config, tmp_path / "no models are built"))
    assert not (tmp_path / "no models are built").exists()
    path.write_text(written)
    assert job_in(tmp_path, config, demo_cache).play(resume=True)["resumed"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "role"), [("base", "policy_model"), ("reward", "reward_model"), ("judge", "judge_model")]
)
def test_a_run_is_not_resumed_with_another_model(
    tmp_path, make_config, make_game, demo_cache, no_figures, part, role
):
    make_game()
    built = next(demo_cache.rglob("demo.json")).parent
    for name in ("base", "reward", "judge"):
        shutil.copytree(built / name, tmp_path / name)
    named = {
        "policy_model": "base",
        "monitor_model": "base",
        "reward_model": "reward",
        "judge_model": "judge",
    }
    models = [f"{key}.model_name={tmp_path / name}" for key, name in named.items()]
    config = make_config("baseline=false", *models)
    with pytest.raises(Killed):
        job_in(tmp_path / "run", config, demo_cache, Log(die_at=("step", "minmax", 1))).play()
    weights = tmp_path / part / "model.safetensors"
    tensors = load_file(weights)
    generator = torch.Generator().manual_seed(0)
    other = {k: v + v.std() * torch.randn(v.shape, generator=generator) for k, v in tensors.items()}
    save_file(other, weights, {"format": "pt"})
    for go_on in (lambda job: job.play(resume=True), lambda job: job.evaluate_only()):
        with raises_error("different_model", role=role):
            go_on(job_in(tmp_path / "run", config, demo_cache))
    save_file(tensors, weights, {"format": "pt"})
    assert job_in(tmp_path / "run", config, demo_cache).play(resume=True)["resumed"] is True


@pytest.mark.slow
@pytest.mark.parametrize("where", in_ci(["training_curves", "write_minmax_report"], "training_curves"))
def test_a_run_killed_while_it_publishes(tmp_path, make_config, demo_cache, whole, where, monkeypatch):
    config = make_config("baseline=false")
    with monkeypatch.context() as patch:
        patch.setattr(rlhf_minmax.run.minmax_job, where, die)
        with pytest.raises(Killed):
            job_in(tmp_path, config, demo_cache).play()
    assert job_in(tmp_path, config, demo_cache).play(resume=True)["after"] == whole[1]["after"]
    assert (tmp_path / "report.html").exists() and (tmp_path / "results.json").exists()


def test_a_finished_run_is_not_resumed(whole, make_config, demo_cache):
    run, _, _ = whole
    with raises_error("finished_run"):
        job_in(run.path, make_config(), demo_cache).play(resume=True)


@pytest.mark.slow
def test_without_a_baseline_the_game_is_the_same(tmp_path, make_config, demo_cache, whole, no_figures):
    job = job_in(tmp_path, make_config("baseline=false"), demo_cache)
    results = job.play()
    assert results["plain"] is None and not (tmp_path / "plain").exists()
    assert results["after"] == whole[1]["after"]


def test_evaluation_alone(tmp_path, make_config, demo_cache, whole):
    run, results, _ = whole
    start = job_in(tmp_path, make_config(), demo_cache).evaluate_only()
    assert start["before"] == results["before"] and start["after"] is None
    checkpoint = run.latest_checkpoint()
    found = job_in(run.path, make_config(), demo_cache).evaluate_only(checkpoint=checkpoint)
    assert found["after"] == results["after"] and found["checkpoint"] == "checkpoint-3"
    assert json.loads((run.path / "evaluation.json").read_text())["after"] == found["after"]
    (run.path / "evaluation.json").unlink()


@pytest.mark.slow
def test_two_full_models_play_a_whole_run(tmp_path, make_config, demo_cache, no_figures, monkeypatch):
    given_back = []
    monkeypatch.setattr(DeviceManager, "clear_memory", lambda self: given_back.append(self))
    full = ("policy_model.use_lora=false", "monitor_model.use_lora=false", "training.max_steps=2")
    job_in(tmp_path, make_config(*full), demo_cache).play()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "monitor")
    assert model.config.vocab_size > 256
    assert len(given_back) == 2  # what building took, and the plain baseline
