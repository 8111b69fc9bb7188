"""The report holds what the run recorded, escaped, in one file that loads nothing."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from raises import raises_error
from rlhf_data import RunFolder
from rlhf_minmax import write_minmax_report

EVIL = "<script>alert('x')</script> & \"quoted\" <img src=//evil.example/a.png>"
BLOCK = {
    "policy/accuracy": 0.611,
    "policy/hack_rate": None,
    "policy/reward_score": -0.522,
    "policy/parse_rate": 0.999,
    "monitor/verdict_balanced_accuracy": 0.713,
    "monitor/evidence_valid_rate": 0.94,
    "monitor/parse_rate": 0.99,
    "constraint/violation": 0.47,
    "dual/lambda": 1.0,
    "minmax/value": 0.03,
}
RESULTS = {
    "before": BLOCK,
    "plain": {**BLOCK, "policy/accuracy": 0.271},
    "after": {**BLOCK, "policy/accuracy": 0.984},
    "break_even": {
        "delta_reward": 1.44,
        "delta_judge_start": 1.32,
        "delta_judge_truthful": 2.05,
        "break_even_start": 1.091,
        "break_even_truthful": None,
        "pays_start": 0.543,
        "pays_truthful": 0.9961,
        "w_judge": 1.229,
        "w_reward": 1.0,
        "advice": "Advice: " + EVIL,
    },
    "device_plan": [{"role": "policy", "device": "cpu", "dtype": "float32", "reason": EVIL}],
    "wall_time": {"demo": 60.0, "plain": None, "game": 30.0, "evaluation": 10.0, "total": 100.0},
    "versions": {"torch": "2.13.0", "odd": EVIL},
    "prompts": [{"role": "monitor", "text": "\n  kept   spaces\r\n<eos>" + EVIL}],
}
SAMPLES = [
    {
        "stage": stage,
        "story": EVIL + " mary went to shed .",
        "question": "where is mary ?",
        "choices": ["garden", "shed"],
        "gold": "shed",
        "answer": answer,
        "critique": "lone surrogate \ud800 " + EVIL,
        "verdict": verdict,
        "confidence": None,
        "reward_score": 0.9,
        "judge_score": 0.1,
        "correct": answer == "shed",
    }
    for stage, answer, verdict in (
        ("start", "garden", "right"),
        ("plain", "garden", None),
        ("minmax", "shed", "right"),
    )
]


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed."""

    VOID = frozenset({"meta", "img", "wbr", "br"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run <b>")
    folder.write_config({"training": {"batch_size": 32}, "note": EVIL})
    for step in (1, 2):
        folder.append_metrics({"phase": "minmax", "step": step, "policy/accuracy": 0.5, "dual/lambda": None})
    # Escaped JSON, as other writers make it, can hold a lone surrogate.
    (folder.path / "samples.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in SAMPLES), encoding="utf-8"
    )
    folder.write_results(RESULTS)
    return folder


def render(run: RunFolder) -> tuple[str, Page]:
    write_minmax_report(run, run.path / "report.html")
    source = (run.path / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert page.open == []
    return source, page


def test_everything_recorded_is_shown(run):
    _, page = render(run)
    for expected in (
        "0.611",
        "0.271",
        "0.984",
        "−0.522",
        "1.229",
        "Share of stories where the truth scores higher, critiques of the start0.543",
        "Share of stories where the truth scores higher, truthful critiques0.996",
        "2.13.0",
        "float32",
        '"batch_size": 32',
        "Models60.060%",
    ):
        assert expected in page.text
    assert "Demo" not in page.text  # models may all be the user's
    for key in BLOCK:
        assert key in page.text
    assert page.tags.count("figure") == 4
    assert "The run recorded no findings." in page.text
    assert "The metrics of this run name no constraints." in page.text
    for missing in (
        "policy accuracy against the monitor's, the reward of a held-out reward model",
        "KL to the reference, Entropy, Clip fraction, Gradient norm, Updates done, Truncated share, "
        "Update ratio, Time scale",
        "the monitor's calibration, cross-play, exploitability",
    ):
        assert f"Not measured on this run: {missing}." in page.text
    assert "minmax/exploitability" not in page.text
    assert "\n  kept   spaces\r\n<eos>" + EVIL in page.text


def test_run_text_is_escaped(run):
    source, page = render(run)
    assert "script" not in page.tags
    assert page.tags.count("img") == 4
    assert "<script" not in source
    assert page.text.count(EVIL) == 1 + 1 + 1 + 1 + 1 + len(
        SAMPLES
    )  # advice, reason, version, prompt, story, critiques
    assert "lone surrogate \\ud800" in page.text


def test_findings_constraints_and_measures_on_request_are_shown(run):
    findings = [{"step": 12, "text": "lower it: " + EVIL}, {"step": 40, "text": "raise it"}]
    after = {**BLOCK, "minmax/exploitability": 0.375, "minmax/hacking_gap": -0.125}
    run.write_results({**RESULTS, "after": after, "findings": findings})
    run.write_config({"constraint": {"threshold": 0.05}})
    for name, value in (("truthfulness", 1.375), ("earlier", 2.625), ("odd<b>", None)):
        row = {f"dual/{name}/lambda": value, f"constraint/{name}/violation_ema": 0.4375}
        run.append_metrics({"phase": "minmax", "step": 3, **row})
    _, page = render(run)
    assert f"Step 12 lower it: {EVIL}Step 40 raise it" in page.text
    for row in ("truthfulness0.0501.3750.438", "earlier–2.6250.438", "odd<b>––0.438"):
        assert row in page.text
    for row in ("minmax/exploitability––0.375", "minmax/hacking_gap––−0.125"):
        assert row in page.text
    assert "minmax/heldout_reward" not in page.text
    assert page.tags.count("figure") == 4 + 3 + 1  # one per constraint, and the bar of the end


def test_doctor_without_findings(run):
    run.write_results({**RESULTS, "findings": []})
    _, page = render(run)
    assert "Nothing: no signal was dead" in page.text


def test_nothing_is_loaded_from_outside(run):
    source, page = render(run)
    sources = [
        value for name, value in page.attributes if name in {"src", "href", "srcset", "data", "action"}
    ]
    assert sources and all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    assert not {"link", "script", "iframe", "object"} & set(page.tags)
    assert not re.search(r"@import|url\(", source)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes
    assert ("content", "width=device-width, initial-scale=1") in page.attributes


def test_exchanges_mark_gold_answer_and_verdict(run):
    source, page = render(run)
    assert source.count('<article class="card">') == 1  # one question, three stages
    assert '<li class="gold">✓ shed' in source
    assert source.count('class="turn bad"') == 2 and source.count('class="turn good"') == 1
    assert (
        "right (untruthful)" in page.text and "right (truthful)" in page.text and "not readable" in page.text
    )


def test_gold_may_be_an_index(run):
    run.write_samples([{**SAMPLES[0], "critique": "", "gold": 0}])
    source, _ = render(run)
    assert '<li class="gold">✓ garden' in source


@pytest.mark.slow
def test_what_judges_behind_an_api_were_asked_for(run):
    _, page = render(run)
    assert "Judges behind an API" not in page.text
    counts = {"requests": 12345, "retries": 2, "cached": 0, "prompt_tokens": 1234500, "completion_tokens": 7}
    usage = {
        "judge": {**counts, "unread": 31, "cost": 1.25},
        "held_out_judge": {**counts, "unread": 0, "cost": None},
    }
    run.write_results({**RESULTS, "api_usage": usage})
    _, page = render(run)
    for row in ("Judge12,34520311,234,50071.2500", "Held-out judge12,3452001,234,5007–"):
        assert row in page.text


@pytest.mark.slow
def test_the_checks_of_a_validator_are_counted(run):
    _, page = render(run)
    assert "Checks by the validator" not in page.text
    for step, calls in ((3, 1000), (4, 400), (5, 90)):
        run.append_metrics({"phase": "minmax", "step": step, "validator/calls": calls})
    _, page = render(run)
    assert "Checks in all1,490" in page.text and "per answer" not in page.text
    run.write_config({"training": {"batch_size": 32}, "game": {"num_generations": 4}})
    run.write_results({**RESULTS, "labels": {"stories": 40, "labelled": 40}})
    _, page = render(run)  # batches of 32, 8 and 32 stories
    assert "Checks in all1,490Answers of the policy288Checks for both players, per answer5.17" in page.text


def test_run_without_baseline_samples_or_break_even(run):
    (run.path / "samples.jsonl").unlink()
    (run.path / "metrics.jsonl").unlink()
    run.write_results({"before": BLOCK, "plain": None, "after": BLOCK})
    _, page = render(run)
    assert "not run" in page.text
    assert "The run wrote no sample exchanges." in page.text
    assert "Not measured on this run." in page.text


def test_unfinished_run_is_refused(run):
    (run.path / "results.json").unlink()
    with raises_error("unfinished_run"):
        write_minmax_report(run, run.path / "report.html")


def test_import_is_light():
    code = (
        "import sys, rlhf_eval; heavy = {'torch', 'transformers', 'pydantic', 'matplotlib'};"
        # These need pydantic.
        "checked = ['attack', 'attacks', 'capability', 'evaluation', 'gates', 'validation'];"
        "assert not (heavy | {'numpy'}) & set(sys.modules); "
        "assert sorted(rlhf_eval.__all__) == rlhf_eval.__all__;"
        "[getattr(rlhf_eval, name) for name in rlhf_eval.__all__ if name not in checked];"
        "assert not heavy & set(sys.modules); "
        "[getattr(rlhf_eval, name) for name in checked]; assert not (heavy - {'pydantic'}) & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
