"""Our model in lm-eval against its own model `hf` on the same weights, and our tasks by its command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error

pytest.importorskip("lm_eval", reason="lm-eval is not installed: run with --extra harness")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = (
    "Once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "girl",
    "boy",
    "who",
    "liked",
    "the",
    "red",
    "ball",
)


@pytest.fixture(scope="module")
def ours(stories_model: str) -> Any:
    from rlhf_eval.harness.lm_eval_model import PackedLM

    return PackedLM(stories_model, dtype="float32")


@pytest.fixture(scope="module")
def theirs(stories_model: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=stories_model, device="cpu", dtype="float32", batch_size=4)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def texts(count: int, length: int) -> list[str]:
    source = random.Random(3)
    return [" ".join(source.choices(WORDS, k=length)) for _ in range(count)]


def test_log_probs_of_choices(ours: Any, theirs: Any) -> None:
    shared = texts(1, 40)[0]
    pairs = [(f"{shared} {question}", f" {choice}") for question in texts(6, 5) for choice in WORDS[-4:]]
    pairs += [("", "Once upon a time"), ("One day ", "there was"), (texts(1, 400)[0], " a dog"), ("a", "b")]
    pairs += pairs[:2]
    found, expected = (lm.loglikelihood(requests("loglikelihood", pairs)) for lm in (ours, theirs))
    for (logp, greedy), (other, also) in zip(found, expected, strict=True):
        assert logp == pytest.approx(other, abs=1e-4) and greedy == also


def test_whole_texts_beyond_the_context(ours: Any, theirs: Any) -> None:
    whole = [(text,) for text in (texts(1, 900)[0], texts(2, 30)[1], "a")]
    found, expected = (
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", whole)) for lm in (ours, theirs)
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_greedy_completions(ours: Any, theirs: Any) -> None:
    settings = {"until": ["\n\n", " dog"], "max_gen_toks": 24, "do_sample": False}
    asked = [(text, settings) for text in texts(5, 6)]
    found, expected = (lm.generate_until(requests("generate_until", asked)) for lm in (ours, theirs))
    assert found == expected and all(found)


def test_a_request_that_comes_twice_is_drawn_twice(ours: Any) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    asked = [("Once upon a time", settings)] * 6 + [("One day", settings)]
    found = ours.generate_until(requests("generate_until", asked))
    assert len(set(found[:6])) > 1
    assert found == ours.generate_until(requests("generate_until", asked))  # and the same with the same seed
    seeded = [(text, settings | {"seed": 1}) for text, settings in asked]
    assert found != ours.generate_until(requests("generate_until", seeded))


def test_what_it_does_not_do_is_refused(ours: Any, stories_model: str) -> None:
    from rlhf_eval.harness.lm_eval_model import PackedLM

    with raises_error("unknown_key"):
        ours.generate_until(requests("generate_until", [("a", {"num_beams": 3, "until": []})]))
    with raises_error("context_too_short"):
        ours.generate_until(requests("generate_until", [("a", {"max_gen_toks": 512, "until": []})]))
    for wrong in ({"batch_size": 8}, {"max_batch_size": 4}, {"peft": "x"}):
        with raises_error("unknown_key"):
            PackedLM(stories_model, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"max_length": "abc"}, {"max_tokens": 0}, {"max_gen_toks": -1}, {"add_bos_token": "maybe"}]
)
def test_a_setting_of_the_wrong_kind_is_refused(stories_model: str, wrong: dict[str, Any]) -> None:
    from rlhf_eval.harness.lm_eval_model import PackedLM

    with raises_error("invalid_value"):
        PackedLM(stories_model, **wrong)


def test_no_model_and_no_template_are_refused(ours: Any) -> None:
    from rlhf_eval.harness.lm_eval_model import PackedLM

    with raises_error("missing_value"):
        PackedLM()
    with raises_error("no_chat_template"):
        ours.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("begins", [True, False])
def test_a_start_token_that_the_tokenizer_does_not_add(
    tmp_path: Path, stories_model: str, begins: bool
) -> None:
    """As with `hf`, `add_bos_token` decides, whatever the tokenizer's own post-processor does."""
    from lm_eval.models.huggingface import HFLM

    from rlhf_eval.harness.lm_eval_model import PackedLM

    for file in Path(stories_model).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    options = {"pretrained": str(tmp_path), "dtype": "float32", "add_bos_token": begins}
    asked = [("Once upon", " a time"), ("", "One day"), ("There was", " a dog")]
    found, expected = (
        lm.loglikelihood(requests("loglikelihood", asked))
        for lm in (PackedLM(**options), HFLM(**options, device="cpu"))
    )
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in expected], abs=1e-4)


def test_our_tasks_by_the_command(tmp_path: Path, stories_model: str) -> None:
    command = [sys.executable, "-m", "rlhf_report", "lm-eval", "--model", "rlhf"]
    tasks = "rlhf_stories,rlhf_sums,rlhf_adversarial"
    rest = ["--model_args", f"pretrained={stories_model}", "--tasks", tasks, "--limit", "12", "--log_samples"]
    run = subprocess.run(
        [*command, *rest, "--output_path", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    assert 0 <= found["rlhf_stories"]["acc,none"] <= 1 and 0 <= found["rlhf_sums"]["acc,none"] <= 1
    assert "behaved,none" in found["rlhf_adversarial"]
    # Its samples go into `rlhf-report compare`, as those of any model of lm-eval do.
    samples = str(next(tmp_path.rglob("samples_rlhf_stories*.jsonl")))
    compared = subprocess.run(
        [*command[:3], "compare", f"a={samples}", f"b={samples}", "--output-dir", str(tmp_path / "page")],
        capture_output=True,
        text=True,
    )
    assert compared.returncode == 0, compared.stderr
    wrong = subprocess.run(
        [*command, "--model_args", "pretrained=/nope", "--tasks", "rlhf_sums"], capture_output=True
    )
    assert wrong.returncode == 2 and b"Traceback" not in wrong.stderr
