"""`--backend trl`: a job through TRL's trainers gives our losses, and what TRL cannot do is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from files import done, read_lines
from proofs import by_default
from raises import raises_error
from rlhf_algos import METHODS
from rlhf_data import CompletionRecord, LabelledRecord, PreferenceRecord
from rlhf_data.records.sft import TextRecord

Train = Callable[..., Result]
SAME = (
    *("--subset-size=16", "--max-steps=3", "--set=story_eval_rows=4", "--set=shuffle=false"),
    *("--set=per_device_train_batch_size=4", "--set=learning_rate=1e-3", "--set=bf16=false"),
)


@pytest.fixture(scope="module")
def trl() -> None:
    """TRL, or a skip where it is not installed; importing it warns and takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="trl is not installed")
        pytest.importorskip("datasets", reason="datasets is not installed")


def metrics_of(run: str) -> list[dict[str, Any]]:
    return read_lines(Path(run, "metrics.jsonl"))


@pytest.mark.usefixtures("trl")
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sft", ["warmup_steps=2", "lr_scheduler_type=constant"]),
        pytest.param("reward", ["center_rewards_coefficient=0.1"], marks=pytest.mark.slow),
        pytest.param("dpo", [], marks=pytest.mark.slow),
        pytest.param(
            "dpo", ["loss_type=ipo", "use_peft=true", "gradient_accumulation_steps=2"], marks=pytest.mark.slow
        ),
        pytest.param(
            "dpo",
            ["loss_type=robust", "label_smoothing=0.1", "precompute_ref_log_probs=true"],
            marks=pytest.mark.slow,
        ),
        pytest.param("kto", ["desirable_weight=1.3"], marks=pytest.mark.slow),
        pytest.param("simpo", ["simpo_gamma=0.7"], marks=pytest.mark.slow),
        pytest.param("orpo", ["beta=0.3"], marks=pytest.mark.slow),
    ],
)
def test_both_backends_log_the_same(
    train: Train, tiny_model_folder: Path, method: str, settings: list[str]
) -> None:
    options = (method, "--model", tiny_model_folder, *SAME, *(f"--set={text}" for text in settings))
    done(train(*options, "--output-dir=ours"))
    printed = done(train(*options, "--backend=trl", "--output-dir=theirs"))
    ours, theirs = metrics_of("ours"), metrics_of("theirs")
    assert [row["step"] for row in theirs] == [1, 2, 3]
    assert "step 3/3  loss" in printed and "'loss'" not in printed
    for mine, its in zip(ours, theirs, strict=True):
        for key in ("loss", "learning_rate", "rewards/margins", "margin", "epoch"):
            assert (key in mine) == (key in its)
            assert mine.get(key, 0.0) == pytest.approx(its.get(key, 0.0), rel=1e-4, abs=1e-6), key
    results = {run: json.loads(Path(run, "results.json").read_text()) for run in ("ours", "theirs")}
    for part in ("before", "after"):
        losses = [results[run][part]["eval_loss"] for run in ("ours", "theirs")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert results["theirs"]["backend"] == "trl"
    assert results["theirs"]["data"] == results["ours"]["data"]
    assert {path.name for path in Path("theirs").iterdir()} >= {
        *("config.json", "metrics.jsonl", "results.json", "training_curves.png", "final")
    }


@pytest.mark.usefixtures("trl")
@pytest.mark.parametrize("method", by_default(["sft", "reward"], "reward"))
def test_its_model_loads_in_plain_transformers(train: Train, tiny_model_folder: Path, method: str) -> None:
    options = ("--model", tiny_model_folder, *SAME, "--backend=trl", "--set=eval_steps=2")
    done(train(method, *options, "--output-dir=run"))
    auto: Any = AutoModelForCausalLM if method == "sft" else AutoModelForSequenceClassification
    auto.from_pretrained("run/final")
    assert "eval_loss" in metrics_of("run")[1]
    assert not list(Path("run").glob("checkpoint*")) and not list(Path("run").rglob("*.bin"))


@pytest.mark.parametrize(
    ("method", "settings", "parts"),
    [
        ("prm", {}, ["no trainer for prm", "sft, reward, dpo, simpo"]),
        ("dpo", {"label_smoothing": 0.1}, ["label_smoothing", "robust"]),
        ("dpo", {"fsdp": True}, ["fsdp True"]),
        ("dpo", {"load_best_model_at_end": True}, ["load_best_model_at_end"]),
        ("dpo", {"early_stopping_patience": 1}, ["early_stopping_patience"]),
        ("sft", {"capability_steps": 5}, ["capability_steps 5"]),
        ("dpo", {"ewc_strength": 1.0}, ["ewc_strength 1.0"]),
        ("dpo", {"streaming": True, "train_data": "a.jsonl"}, ["streaming"]),
        ("sft", {"disable_dropout": True}, ["disable_dropout"]),
        ("reward", {"head": "mlp"}, ["head 'mlp'"]),
        ("reward", {"num_members": 2}, ["num_members 2"]),
        ("orpo", {"router_aux_loss_coef": 0.1}, ["router_aux_loss_coef"]),
        ("kto", {"kl_estimate": "ema"}, ["kl_estimate 'ema'"]),
    ],
)
def test_what_trl_cannot_honour_is_refused(method: str, settings: dict[str, Any], parts: list[str]) -> None:
    from rlhf_train.trl.backend import check_settings

    config = METHODS[method].resolve({**settings, "backend": "trl"})
    with raises_error("trl_refuses") as error:
        check_settings(method, config)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.usefixtures("trl")
def test_what_changes_no_result_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from rlhf_train.trl.backend import check_settings

    check_settings("dpo", METHODS["dpo"].resolve({"save_steps": 7, "max_tokens_per_batch": 100}))
    assert caplog.messages == ["without effect under --backend trl: max_tokens_per_batch, save_steps"]


def test_refusals_leave_nothing(train_refused: Callable[..., str]) -> None:
    assert "prm" in train_refused("prm", "--backend=trl")
    assert "prm" in train_refused("prm", "--backend=trl", "--dry-run")


def test_records_become_rows_with_trl_s_columns() -> None:
    from rlhf_train.trl.backend import dataset_rows

    assert dataset_rows([PreferenceRecord("p", "a", "b", None)]) == [
        {"prompt": "p", "chosen": "a", "rejected": "b"}
    ]
    assert dataset_rows([LabelledRecord("p", "a", False)]) == [
        {"prompt": "p", "completion": "a", "label": False}
    ]
    with raises_error("mixed_rows"):
        dataset_rows([CompletionRecord("p", "a"), TextRecord("t")])
