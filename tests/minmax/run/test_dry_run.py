"""A dry run counts what a real run does, and estimates memory by the stated formula."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from rlhf_data import UserError, apply_overrides
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.run.checks import ModelInfo, Ruler, check_run, inspect_models
from rlhf_minmax.run.dry_run import ENGINE_TOKENS, plan_run, step_streams
from rlhf_minmax.run.memory import estimate_memory, state_bytes
from rlhf_minmax.truthfulness import ConstraintMeasure
from rlhf_models import DeviceManager, tiny_model

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = ("data.train_stories=20", "data.eval_stories=8", "training.batch_size=4", "demo.num_stories=20")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # To measure how long building takes is most of a plan; other tests do.
    monkeypatch.setattr("rlhf_minmax.run.checks.build_seconds", lambda *_, **__: 60.0)


def make(*overrides: str) -> MinMaxConfig:
    return MinMaxConfig.from_dict(apply_overrides({}, [*TINY, *overrides]))


def plan(*overrides: str) -> dict[str, str]:
    return dict(plan_run(make(*overrides))["rows"])


@pytest.fixture
def save_model(tmp_path: Path, byte_tokenizer: Any) -> Callable[..., Path]:
    def save(architecture: str, **fields: Any) -> Path:
        folder = tmp_path / architecture
        tiny_model(architecture, vocab_size=len(byte_tokenizer), **fields).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


def test_steps_answers_and_critiques() -> None:
    rows = plan("training.num_epochs=2", "training.monitor_warmup_steps=3")
    assert rows["stories"] == "20 for training, 8 held out"
    assert rows["steps"] == "10 of 4 stories (2 epochs) after 7 of plain RLHF"
    assert rows["answers per step"] == "16"  # 4 stories x 4
    # (4 sampled + 2 made-up answers) x 4 critiques; 16 answers x 2
    assert rows["critiques per step"] == "24 that train the monitor, 32 in the policy's reward"
    assert plan("baseline=false", "training.max_steps=7")["steps"] == "7 of 4 stories (1.4 epochs)"
    assert plan("training.batch_size=64")["answers per step"] == "80"  # no more than the 20 stories there are


def test_streams_share_prompts() -> None:
    """Packed tokens: each prompt once, and every completion's `max_new_tokens`."""
    config = make(
        "policy_model.max_new_tokens=7", "monitor_model.max_new_tokens=9", "game.tampered_fraction=0"
    )
    stories = load_stories(config)
    ruler = Ruler(config, stories, inspect_models(config, stories))
    streams = step_streams(config, stories, ruler)
    prompts = [ruler.policy_prompt(record) for record in stories.train[:4]]
    shared = sum(len(prompt) for prompt in prompts) + 4 * 4 * 7
    assert streams["policy"].sequences == 16
    assert streams["policy"].padded == 16 * (max(map(len, prompts)) + 7)
    assert (
        shared - 3 * max(map(len, prompts)) <= streams["policy"].packed <= shared
    )  # stories may share a start
    judged = [ruler.monitor_prompt(record, [0] * 7) for record in stories.train[:4]]
    assert streams["monitor"].padded == 16 * (max(map(len, judged)) + 9)
    assert streams["monitor"].packed <= sum(map(len, judged)) + 16 * 9
    assert streams["policy"].largest == streams["policy"].packed
    small = make("training.max_tokens_per_batch=100")
    assert all(stream.largest <= 100 for stream in step_streams(small, stories, ruler).values())


@pytest.mark.slow
def test_a_real_run_computes_no_more_tokens(make_game: Callable[..., Any], make_config: Any) -> None:
    from rlhf_minmax import MinMaxTrainer

    pipeline, stories = make_game()
    config = make_config()
    trainer = MinMaxTrainer(pipeline, config, stories.train)
    for _ in range(2):
        trainer.train_step()
    ruler = Ruler(config, stories, inspect_models(config, stories))
    streams = step_streams(config, stories, ruler)
    training = config.training
    monitor = streams["monitor"].packed * training.monitor_updates_per_policy
    policy = streams["policy"].packed * training.policy_updates
    assert 0 < trainer.num_tokens <= 1.3 * (2 * monitor + policy)  # other stories may be a little longer


def test_rows_name_models_lengths_and_the_cache(save_model: Callable[..., Path]) -> None:
    rows = plan()
    assert rows["policy model"] == "llama, built from the training rows"
    assert rows["built models"].startswith("to be built first, in about ")
    assert "context 2,048" in rows["longest monitor text"] and "..." not in rows["longest monitor text"]
    folder = save_model("qwen2", max_position_embeddings=400)
    rows = plan(f"policy_model.model_name={folder}", "judge_model.kind=rule")
    assert rows["policy model"] == f"qwen2, {folder}" and "context 400" in rows["longest policy text"]
    assert rows["judge"].startswith("a rule") and "judge model" not in rows


def test_longest_text_is_exact_for_the_policy() -> None:
    config = make()
    stories = load_stories(config)
    checked = check_run(config, stories, DeviceManager())
    tokenizer = checked.models["policy"].tokenizer
    texts = [stories.prompts.policy(record) for record in (*stories.train, *stories.held_out)]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    assert checked.longest[0].tokens == longest + config.policy_model.max_new_tokens


def test_a_text_that_just_fits_and_one_that_does_not(save_model: Callable[..., Path]) -> None:
    config = make("judge_model.kind=rule", f"policy_model.model_name={save_model('gpt2', n_positions=512)}")
    stories = load_stories(config)
    tokens = check_run(config, stories, DeviceManager()).longest[0].tokens
    save_model("gpt2", n_positions=tokens)
    check_run(config, stories, DeviceManager())
    save_model("gpt2", n_positions=tokens - 1)
    with pytest.raises(UserError, match=rf"needs {tokens} tokens but the model's context holds {tokens - 1}"):
        check_run(config, stories, DeviceManager())


def test_warnings() -> None:
    assert plan_run(make("training.max_steps=20"))["warnings"] == []
    (warm,) = plan_run(make("training.monitor_warmup_steps=5"))["warnings"]
    assert "all 5 steps are the monitor's warm-up" in warm
    short = ("training.max_steps=20", "policy_model.max_new_tokens=3", "monitor_model.max_new_tokens=4")
    answers, critiques = plan_run(make(*short))["warnings"]
    assert answers.startswith("20 of 20 right answers") and "policy_model.max_new_tokens 3" in answers
    assert critiques.startswith("20 of 20 critiques") and "monitor_model.max_new_tokens 4" in critiques


@pytest.mark.parametrize(
    ("monitor", "updates", "warns"),
    [(3e-3, 20, False), (3e-3, 21, True), (3.1e-4, 2, False), (2.9e-4, 2, True)],
)
def test_time_scales(monitor: float, updates: int, warns: bool) -> None:
    """Ratio: monitor rate x updates / (policy rate x updates); 3e-3 x 20 / (3e-3 x 2) = 10 may be."""
    training = make(
        f"training.monitor_learning_rate={monitor}", f"training.monitor_updates_per_policy={updates}"
    ).training
    assert training.time_scale_ratio == pytest.approx(monitor * updates / 6e-3)
    assert (training.time_scale_warning() is not None) == warns


def test_the_example_config_is_warned_about() -> None:
    path = Path(__file__).parents[3] / "configs" / "minmax_config.json"
    warning = MinMaxConfig.from_dict(json.loads(path.read_text())).training.time_scale_warning()
    assert warning is not None and "the monitor may move 75 times as far per step as the policy" in warning


def test_made_up_answers_that_do_not_read_as_their_choice_are_warned_of() -> None:
    short, other = "training.max_steps=20", load_stories(make()).train[0].choices[0]
    assert plan_run(make(short, "game.answer_template='{choice}'"))["warnings"] == []
    (told,) = plan_run(make(short, f"game.answer_template='{{choice}} or the {other}'"))["warnings"]
    assert "do not read as the choice they name" in told and "give game.answer_template words" in told


def test_made_up_answers_are_measured_as_they_are_worded() -> None:
    def sizes(template: str) -> tuple[int, int]:
        config = make(f"game.answer_template='{template}'", "policy_model.max_new_tokens=1")
        stories = load_stories(config)
        ruler = Ruler(config, stories, inspect_models(config, stories))
        packed = step_streams(config, stories, ruler)["monitor"].packed
        return ruler.answer_length(stories.train[0], "monitor"), packed

    short, long = sizes(" it is {choice} ."), sizes(" it is it is {choice} .")
    # "it is" is two tokens more, in two made-up answers of four stories, each shared by its critiques.
    assert (long[0] - short[0], long[1] - short[1]) == (2, 4)


def test_warnings_are_told_at_the_start_of_a_run(tmp_path: Path) -> None:
    from rlhf_data import RunFolder
    from rlhf_minmax import Events, MinMaxJob

    class Stop(Exception):
        pass

    class Listener(Events):
        def warning(self, text: str) -> None:
            raise Stop(text)

    job = MinMaxJob(make("training.monitor_learning_rate=1"), RunFolder(tmp_path), Listener())
    with pytest.raises(Stop, match="833 times"):
        job.play()


def info(config: Any) -> ModelInfo:
    return ModelInfo(None, config, None)


def count(text: str) -> int:
    """The number in a row such as "at most 1,234 in all updates"."""
    return int(text.removeprefix("at most ").split()[0].replace(",", ""))


def test_tokens_of_all_updates() -> None:
    """m and p tokens of an update, k = 3 updates of the monitor, 2 of the policy, 5 steps, 2 for warm-up.

    In all 5 x 3 m + 3 x 2 p, the policy's again for the baseline.
    """
    sizes = ("training.monitor_warmup_steps=2", "training.monitor_updates_per_policy=3")

    def rows(*overrides: str) -> dict[str, Any]:
        found = plan(*sizes, "baseline=false", *overrides)
        return found | {role: count(found[f"{role} tokens per update"]) for role in ("policy", "monitor")}

    found = rows()
    p, m = found["policy"], found["monitor"]
    assert (count(found["tokens per step"]), count(found["tokens in all"])) == (3 * m + 2 * p, 15 * m + 6 * p)
    assert count(rows("baseline=true")["tokens in all"]) == 15 * m + 12 * p
    # An adaptive schedule makes up to 10 updates; steps that look ahead are made twice, except in plain RLHF.
    assert count(rows("schedule.rule=adaptive")["tokens in all"]) == 50 * m + 6 * p
    ahead = rows("schedule.extragradient=true")
    assert count(ahead["tokens per step"]) == 6 * m + 4 * p
    assert count(ahead["tokens in all"]) == 30 * m + 12 * p
    both = rows("schedule.extragradient=true", "baseline=true")
    assert count(both["tokens in all"]) == 30 * m + 18 * p
    # A frozen monitor is trained in probes only, once in each of 4 rounds; the policy twice.
    assert "tokens of best-response probes" not in found
    frozen = rows("training.monitor_updates_per_policy=0", "diagnostics.best_response_updates=4")
    assert count(frozen["tokens of best-response probes"]) == 4 * (m + 2 * p)
    assert count(frozen["tokens in all"]) == 6 * p + 4 * (m + 2 * p)
    adaptive = rows("schedule.rule=adaptive", "diagnostics.best_response_updates=4")
    assert count(adaptive["tokens of best-response probes"]) == 4 * (3 * m + 2 * p)


def test_exploitability_is_told() -> None:
    """5 of 8 held-out stories with 4 answers and 3 critiques of each; at start, end and step 3 of 5."""
    sizes = ("diagnostics.exploitability_stories=5", "game.num_critiques=3", "training.eval_steps=3")
    rows = plan(*sizes, "baseline=false")
    assert rows["exploitability"] == "20 answers and 60 critiques in each of 3 evaluations"
    assert plan(*sizes)["exploitability"].endswith("4 evaluations")
    assert plan(*sizes, "policy_model.average_decay=0.5")["exploitability"].endswith("5 evaluations")
    assert plan("diagnostics.exploitability_stories=64")["exploitability"].startswith("32 answers and 128 ")
    assert "exploitability" not in plan("diagnostics.exploitability_stories=0")


def test_keys_and_values_of_exploitability(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 stories x 4 answers x 9 critiques are more at a time than anything in a step of 4 stories."""
    import rlhf_minmax.run.dry_run

    given: list[int] = []

    def estimate(*_: Any, cache_tokens: int, **__: Any) -> list[Any]:
        given.append(cache_tokens)
        return []

    monkeypatch.setattr(rlhf_minmax.run.dry_run, "estimate_memory", estimate)
    rows = plan("game.num_critiques=9", "data.probe_stories=4")
    longest = count(rows["longest monitor text"])
    assert given == [8 * 4 * 9 * longest]


def memory(config: MinMaxConfig, model: Any, **tokens: int) -> Any:
    models = {"policy": info(model.config), "monitor": info(model.config)}
    (found,) = estimate_memory(
        config, models, DeviceManager(), **{"pass_tokens": 0, "cache_tokens": 0} | tokens
    )
    return found


def test_memory_of_adapters() -> None:
    """One frozen backbone in fp32; 16 bytes for every parameter of three adapters."""
    from rlhf_models import LoraSettings, add_adapters

    model = tiny_model("llama")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    adapted = add_adapters(model, ["policy", "plain", "monitor"], LoraSettings(lora_r=16))
    adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    found = memory(make(), tiny_model("llama"))
    assert (found.weights, found.training, found.activations) == (weights, 16 * adapters, 0)
    assert memory(make("baseline=false"), tiny_model("llama")).training == 16 * adapters * 2 / 3


def test_memory_of_full_training() -> None:
    """Policy and plain with one reference, monitor with one: 5 copies; 3 players with 3 states each."""
    model = tiny_model("qwen2")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    full = make("policy_model.use_lora=false", "monitor_model.use_lora=false")
    found = memory(full, model)
    assert (found.weights, found.training) == (5 * weights, 9 * weights)


@pytest.mark.parametrize(
    ("stage", "processes", "expected"),
    [
        (None, 8, 12),  # gradient 4, moments 8
        (1, 8, 4 + 12 / 8),  # the gradient whole; moments and DeepSpeed's copy sharded
        (2, 8, 16 / 8),
        (2, 1, 16),
        (3, 8, 20 / 8),  # a sharded weight besides, for the player itself stays whole
    ],
)
def test_bytes_of_the_training_state(stage: int | None, processes: int, expected: float) -> None:
    assert state_bytes(stage, processes) == expected


def test_memory_of_a_sharded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters in 4 processes with ZeRO-2: 16 / 4 bytes a parameter, and 4 for the weight."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    zero = f"training.deepspeed={CONFIGS / 'zero2.json'}"
    found = memory(make(zero), tiny_model("llama"))
    assert found.training == 3 * (4 + 16 / 4) * trained(tiny_model("llama"))


def trained(model: Any, rank: int = 16) -> int:
    """Parameters of one adapter."""
    from rlhf_models import LoraSettings, add_adapters

    adapted = add_adapters(model, ["policy"], LoraSettings(lora_r=rank))
    return sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ((), 3),  # the guard's monitors: last good, measured, newest
        (("guards.rollback=false",), 0),
        (("guards.rollback=false", "policy_model.average_decay=0.9"), 1),
        (("guards.rollback=false", "schedule.extragradient=true"), 2),
        (("policy_model.step_rule=optimistic", "monitor_model.average_decay=0.9"), 3 + 2 + 1),
        (("guards.rollback=false", "pool.every=5", "pool.size=7"), 2 * 7),
    ],
)
def test_memory_of_copies(overrides: tuple[str, ...], copies: int) -> None:
    """4 bytes for each parameter of an adapter and each copy; whole models likewise."""
    found = memory(make(*overrides), tiny_model("llama"))
    assert found.copies == 4 * trained(tiny_model("llama")) * copies
    assert found.total == found.weights + found.training + found.activations + found.copies
    full = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
    model = tiny_model("qwen2")
    parameters = sum(p.numel() for p in model.parameters())
    assert memory(make(*overrides, *full), model).copies == 4 * parameters * copies


def test_memory_of_best_response_probes() -> None:
    """Gradient and moments of one more adapter, 12 bytes a parameter, and a copy of it."""
    plain, probed = (
        memory(make(f"diagnostics.best_response_updates={updates}"), tiny_model("llama"))
        for updates in (0, 2)
    )
    assert probed.training == plain.training + 12 * trained(tiny_model("llama"))
    assert probed.copies == plain.copies + 4 * trained(tiny_model("llama"))
    # A monitor that trains all its weights is the larger player.
    full = "monitor_model.use_lora=false"
    plain, probed = (
        memory(make(full, f"diagnostics.best_response_updates={updates}"), tiny_model("llama"))
        for updates in (0, 2)
    )
    parameters = sum(p.numel() for p in tiny_model("llama").parameters())
    assert parameters > trained(tiny_model("llama"))
    assert probed.training == plain.training + 12 * parameters


def test_memory_of_a_critic() -> None:
    """w and b on hidden states of 32: 33 parameters of 16 bytes, for each player that has one."""
    plain, model = memory(make(), tiny_model("llama")).training, tiny_model("llama")
    assert memory(make("policy_model.baseline=critic"), model).training == plain + 16 * 33
    both = ("policy_model.baseline=critic", "monitor_model.baseline=critic")
    assert memory(make(*both), tiny_model("llama")).training == plain + 2 * 16 * 33


def test_past_players_are_kept_on_the_cpu() -> None:
    """Players on a GPU: guard and pools are on the CPU, an average is where its player is."""

    class OnGPU(DeviceManager):
        def device(self, role: str) -> torch.device:
            return torch.device("cuda:0")

    model = tiny_model("llama")
    models = {"policy": info(model.config), "monitor": info(model.config)}
    size, sizes = 4 * trained(tiny_model("llama")), {"pass_tokens": 0, "cache_tokens": 0}
    config = make("policy_model.average_decay=0.9", "pool.every=5", "pool.size=2")
    gpu, cpu = estimate_memory(config, models, OnGPU({}), **sizes)
    assert (gpu.device.type, gpu.copies, cpu.device.type) == ("cuda", size, "cpu")
    assert cpu.copies == cpu.total == (3 + 2 * 2) * size
    (alone,) = estimate_memory(make("guards.rollback=false"), models, OnGPU({}), **sizes)
    assert alone.device.type == "cuda" and alone.copies == 0
    assert (
        ", copies " in plan()["memory on cpu"]
        and "copies" not in plan("guards.rollback=false")["memory on cpu"]
    )


def test_memory_of_quantised_weights() -> None:
    """Linear layers but the head take one byte a weight, everything else stays."""
    model = tiny_model("llama")
    linear = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    weights = memory(make(), model).weights
    eight = ("policy_model.load_in_8bit=true", "monitor_model.load_in_8bit=true")
    assert memory(make(*eight), model).weights == weights - 3 * linear
    four = ("policy_model.load_in_4bit=true",)
    assert memory(make(*four), model).weights == pytest.approx(weights - (4 - 0.516) * linear)


def test_memory_of_activations() -> None:
    """Hidden 32, intermediate 64, 2 layers, 300 tokens of vocabulary, 2 key-value heads of 8, fp32.

    A pass of 10 tokens: 10 x 2 x (8 x 32 + 2 x 64) x 4 = 30720 bytes, and 3 x 10 x 300 x 4 = 36000 of logits.
    1000 tokens of keys and values: 1000 x 2 x 2 x 2 x 8 x 4 = 256000. With checkpointing a pass keeps
    10 x (2 x 32 + 8 x 32 + 2 x 64) x 4 = 17920.
    """
    model = tiny_model("llama")
    assert memory(make(), model, pass_tokens=10).activations == 30720 + 36000
    assert memory(make(), model, pass_tokens=10, cache_tokens=1000).activations == 256000
    saving = make("policy_model.gradient_checkpointing=true")
    assert memory(saving, model, pass_tokens=10).activations == 17920 + 36000


def test_names_that_must_agree() -> None:
    from rlhf_infer import TransformersEngine
    from rlhf_minmax.config.constraints import ConstraintConfig

    default = inspect.signature(TransformersEngine.__init__).parameters["max_batch_tokens"].default
    assert default == ENGINE_TOKENS
    assert get_args(ConstraintConfig.model_fields["measure"].annotation) == get_args(ConstraintMeasure)
