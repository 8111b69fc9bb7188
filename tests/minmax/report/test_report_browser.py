"""The report in a real browser: it fits a phone, follows light and dark, and asks for nothing."""

import importlib
import json
from pathlib import Path

import pytest

from rlhf_data import RunFolder
from rlhf_minmax import write_minmax_report

LONG = "averyveryverylongwordwithoutanyplacetobreak" * 4
LUMINANCE = """(async () => {
  const image = document.querySelector("figure img");
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  document.body.append(canvas);
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  canvas.remove();
  let [sum, count] = [0, 0];
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 250) { sum += pixels[i] + pixels[i + 1] + pixels[i + 2]; count += 3; }
  return sum / count;
})()"""
"""Mean brightness, 0 to 255, of what the first figure draws."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "serve"))
        driver = importlib.import_module("browser")
    command = driver.find_chromium()
    if command is None:
        pytest.skip("no Chromium is installed")
    with driver.chromium(command, tmp_path_factory.mktemp("chromium")) as address, driver.tab(address) as tab:
        yield tab


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """The address of a report with every section, and long words in all of them."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / LONG)
    run.write_config({"constraint": {"threshold": 0.05}, "note": LONG})
    for step in (1, 2):
        measures = {f"{player}/kl": 0.1 * step for player in ("policy", "monitor")}
        measures |= {"policy/accuracy": 0.5, "monitor/verdict_balanced_accuracy": 0.25 * step}
        measures |= {f"dual/{LONG}/lambda": 1.0, f"constraint/{LONG}/violation_ema": 0.5}
        run.append_metrics({"phase": "minmax", "step": step, "minmax/heldout_reward": 0.1, **measures})
    calibration = [{"predicted": 0.25, "observed": 0.5, "count": 4}]
    block = {"policy/accuracy": 0.5, "minmax/exploitability": 0.5, "monitor/calibration": calibration}
    tables = {
        "cross_play": {"policy_steps": [0], "monitor_steps": [0], "values": [[0.5]], "accuracy": [0.5]},
        "findings": [{"step": 1, "text": LONG}],
        "break_even": {"advice": LONG},
        "prompts": [{"role": LONG, "text": LONG}],
        "device_plan": [{"role": "policy", "device": "cpu", "dtype": "float32", "reason": LONG}],
        "versions": {LONG: LONG},
    }
    run.write_results({"before": block, "plain": None, "after": block, **tables})
    texts = dict.fromkeys(("story", "question", "answer", "critique", "gold"), LONG) | {"choices": [LONG] * 2}
    run.write_samples(
        [{"stage": stage, "correct": True, "verdict": None, **texts} for stage in ("start", LONG)]
    )
    write_minmax_report(run, run.path / "report.html")
    return (run.path / "report.html").as_uri()


def show(browser, address: str, *, width: int, scheme: str) -> None:
    preference = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", features=[preference])
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
    )
    browser.call("Page.navigate", url=address)
    browser.until(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows_and_nothing_is_asked_for(browser, report, width, scheme):
    browser.requested.clear()
    show(browser, report, width=width, scheme=scheme)
    wide = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && "
    wide += (
        "e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML)"
    )
    assert browser.run(wide) == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("[...document.images].every(image => image.naturalWidth > 0)")
    assert [url for url in browser.requested if not url.startswith("data:")] == [report]
    assert browser.problems == []


def test_page_and_figures_follow_the_readers_preference(browser, report):
    seen = {}
    for scheme in ("light", "dark"):
        show(browser, report, width=1200, scheme=scheme)
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        seen[scheme] = paper, browser.run(LUMINANCE)
    assert seen["light"][0] == "rgb(255, 255, 255)" and seen["dark"][0] == "rgb(18, 22, 29)"
    assert seen["dark"][1] > seen["light"][1]
