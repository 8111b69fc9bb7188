"""A dry run counts what a real run does, and estimates memory by the stated formula."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from raises import raises_error
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.run.checks import Ruler, check_run, inspect_models
from rlhf_minmax.run.distributed import plan_devices
from rlhf_minmax.run.dry_run import plan_run, step_tokens
from rlhf_minmax.run.events import device_rows
from rlhf_minmax.truthfulness import ConstraintMeasure
from rlhf_models import DeviceManager, tiny_model
from small_game import make, plan

pytestmark = pytest.mark.usefixtures("quick_plans")


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
    assert rows["data"] == "the world of stories: 20 rows for training, 8 held out"
    assert rows["steps"] == "10 of 4 stories (2 epochs) after 7 of plain RLHF"
    assert rows["answers per step"] == "16"  # 4 stories x 4
    # (4 sampled + 2 made-up answers) x 4 critiques; 16 answers x 2
    assert rows["critiques per step"] == "24 that train the monitor, 32 in the policy's reward"
    assert plan("baseline=false", "training.max_steps=7")["steps"] == "7 of 4 stories (1.4 epochs)"
    assert plan("training.batch_size=64")["answers per step"] == "80"  # no more than the 20 stories there are


@pytest.mark.parametrize(
    ("overrides", "listed"),
    [
        ((), True),
        (("judge_model.kind=rule",), False),
        (("judge_model.kind=validator",), False),
        (("judge_model.kind=api", "judge_model.model_name=m", "judge_model.base_url=http://x/v1"), False),
        (("judge_model.kind=rule", "held_out.judge.kind=head"), True),
        (("judge_model.kind=rule", "held_out.judge.kind=validator"), False),
    ],
)
def test_a_judge_without_a_model_has_no_device(overrides: tuple[str, ...], listed: bool) -> None:
    roles = [row["role"] for row in device_rows(plan_devices(make(*overrides)))]
    assert roles == ["policy", "monitor", "reward", *(["judge"] if listed else [])]


def test_streams_share_prompts() -> None:
    """Packed tokens: each prompt once, and every completion's `max_new_tokens`."""
    config = make(
        "policy_model.max_new_tokens=7", "monitor_model.max_new_tokens=9", "game.tampered_fraction=0"
    )
    stories = load_stories(config)
    ruler = Ruler(config, stories, inspect_models(config, stories))
    streams = step_tokens(config, stories, ruler)
    prompts = [ruler.policy_prompt(record) for record in stories.train[:4]]
    shared = sum(len(prompt) for prompt in prompts) + 4 * 4 * 7
    assert streams["policy"].padded == 16 * (max(map(len, prompts)) + 7)
    assert (
        shared - 3 * max(map(len, prompts)) <= streams["policy"].packed <= shared
    )  # stories may share a start
    judged = [ruler.monitor_prompt(record, [0] * 7) for record in stories.train[:4]]
    assert streams["monitor"].padded == 16 * (max(map(len, judged)) + 9)
    assert streams["monitor"].packed <= sum(map(len, judged)) + 16 * 9
    assert streams["policy"].largest == streams["policy"].packed
    small = make("training.max_tokens_per_batch=100")
    assert all(stream.largest <= 100 for stream in step_tokens(small, stories, ruler).values())


@pytest.mark.slow
def test_a_real_run_computes_no_more_tokens(make_game: Callable[..., Any], make_config: Any) -> None:
    from rlhf_minmax import MinMaxTrainer

    pipeline, stories = make_game()
    config = make_config()
    trainer = MinMaxTrainer(pipeline, config, stories.train)
    for _ in range(2):
        trainer.train_step()
    ruler = Ruler(config, stories, inspect_models(config, stories))
    streams = step_tokens(config, stories, ruler)
    training = config.training
    monitor = streams["monitor"].packed * training.monitor_updates_per_policy
    policy = streams["policy"].packed * training.policy_updates
    assert 0 < trainer.num_tokens <= 1.3 * (2 * monitor + policy)  # other stories may be a little longer


def test_rows_name_models_lengths_and_the_cache(save_model: Callable[..., Path]) -> None:
    rows = plan()
    assert rows["policy model"] == "llama, built from the training rows"
    assert rows["built models"].startswith("to be built first, in about ")
    assert "limit 2,048" in rows["longest monitor sequence"] and "..." not in rows["longest monitor sequence"]
    folder = save_model("qwen2", max_position_embeddings=400)
    rows = plan(f"policy_model.model_name={folder}", "judge_model.kind=rule")
    assert rows["policy model"] == f"qwen2, {folder}" and "limit 400" in rows["longest policy sequence"]
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
    with raises_error("context_too_short", length=tokens, limit=tokens - 1):
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
        packed = step_tokens(config, stories, ruler)["monitor"].packed
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
    # A frozen monitor is trained in probes only, once in each of 4 rounds; the policy twice.
    assert "tokens of best-response probes" not in found
    frozen = rows("training.monitor_updates_per_policy=0", "diagnostics.best_response_updates=4")
    assert count(frozen["tokens of best-response probes"]) == 4 * (m + 2 * p)
    assert count(frozen["tokens in all"]) == 6 * p + 4 * (m + 2 * p)
    trained = rows("diagnostics.best_response_updates=4")
    assert count(trained["tokens of best-response probes"]) == 4 * (3 * m + 2 * p)
    # 5 steps keep the players of steps 2 and 4, which are probed, too.
    past = rows("diagnostics.best_response_updates=4", "diagnostics.cross_play_steps=2")
    assert count(past["tokens of best-response probes"]) == 3 * 4 * (3 * m + 2 * p)


def test_exploitability_is_told() -> None:
    """5 of 8 held-out stories with 4 answers and 3 critiques of each; at start, end and step 3 of 5."""
    sizes = ("diagnostics.exploitability_stories=5", "game.num_critiques=3", "training.eval_steps=3")
    rows = plan(*sizes, "baseline=false")
    assert rows["exploitability"] == "20 answers and 60 critiques in each of 3 evaluations"
    assert plan(*sizes)["exploitability"].endswith("4 evaluations")
    assert plan("diagnostics.exploitability_stories=64")["exploitability"].startswith("32 answers and 128 ")
    assert "exploitability" not in plan("diagnostics.exploitability_stories=0")


def test_keys_and_values_of_exploitability(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 stories x 4 answers x 9 critiques are more at a time than anything in a step of 4 stories."""
    import rlhf_minmax.run.dry_run

    given: list[int] = []

    def estimate(*_: Any, cache_tokens: int, **__: Any) -> dict[Any, Any]:
        given.append(cache_tokens)
        return defaultdict(lambda: {"load": {"weights": 1.0}})  # of any device

    monkeypatch.setattr(rlhf_minmax.run.dry_run, "estimate_memory", estimate)
    rows = plan("game.num_critiques=9", "data.probe_stories=4")
    longest = count(rows["longest monitor sequence"])
    assert set(given) == {8 * 4 * 9 * longest}


def test_names_that_must_agree() -> None:
    from rlhf_infer import TransformersEngine
    from rlhf_minmax.config.constraints import ConstraintConfig

    default = inspect.signature(TransformersEngine.__init__).parameters["max_batch_tokens"].default
    assert default == MinMaxConfig().training.max_kv_tokens
    assert get_args(ConstraintConfig.model_fields["measure"].annotation) == get_args(ConstraintMeasure)
