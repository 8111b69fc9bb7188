"""The page in a real browser: headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from proofs import by_default
from rlhf_serve import errors, page
from rlhf_serve.http import middleware
from rlhf_serve.http.api_keys import KeyRing
from rlhf_serve.http.telemetry import Metrics

if TYPE_CHECKING:
    from browser import Browser

EVIL = "<img src=x onerror='window.pwned = 1'><script>window.pwned = 1</script>"
KEY = "page-0123456789abcdef"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """The module `browser` of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        yield importlib.import_module("browser")


@pytest.fixture(scope="module")
def chromium(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running Chromium."""
    command = driver.find_chromium()
    if command is None:
        pytest.skip("no Chromium is installed")
    with driver.chromium(command, tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def browser(driver: Any, chromium: str) -> Iterator[Browser]:
    with driver.tab(chromium) as opened:
        yield opened


def candidate(index: int, score: float | None, text: str, rank: int) -> dict[str, Any]:
    scores = {"helpful": score, "short": -0.5}
    return {
        "index": index,
        "text": text,
        "score": score,
        "scores": scores,
        "finish_reason": "length",
        "tokens": 4 + index,
        "rank": rank,
        "selected": rank == 0,
    }


def answer(prompt: str, drawn: int) -> dict[str, Any]:
    """A fixed answer: the third candidate wins, the second has no score."""
    texts = ["plain", "", f"you said {prompt}", "w" * 400, EVIL, *["one more"] * 60][:drawn]
    scores = [0.25, None, 1.5, -2.0, 0.1, *[-3.0] * 60][:drawn]
    order = sorted(range(drawn), key=lambda i: (scores[i] is None, -(scores[i] or 0)))
    candidates = [candidate(i, scores[i], texts[i], order.index(i)) for i in range(drawn)]
    best = candidates[order[0]]
    message = {"role": "assistant", "content": best["text"]}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "length", "score": best["score"]}],
        "candidates": candidates,
        "usage": {"prompt_tokens": 7, "completion_tokens": 30, "total_tokens": 37, "candidates": drawn},
        "timing": {"queue_s": 0.01, "generate_s": 1.234, "score_s": 0.5, "total_s": 12.34},
        "id": "chatcmpl-1",
    }


class Canned:
    """A server with the real page, errors and middleware, and answers that are fixed."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ratings: list[dict[str, Any]] | None = None
        """Ratings of answers; None for a server that takes none."""
        self.keys = KeyRing()
        self.left = threading.Event()
        """Whether somebody left before the answer."""
        self.url = ""

    def app(self) -> FastAPI:
        app = FastAPI()
        middleware.install(app, metrics=Metrics())
        app.add_api_route("/", page.response)
        app.add_api_route("/page/info", self.info)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/feedback", self.feedback, methods=["POST"])
        return app

    def info(self) -> dict[str, Any]:
        examples = ["Where is the ball?", "2 + 2 ="]
        names = {"model": "demo-policy", "reward_model": "demo-reward"}
        limits = {"default_n": 5, "max_n": 16, "max_tokens": 32}
        return names | limits | {"examples": examples, "feedback": self.ratings is not None}

    def feedback(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.ratings is not None
        if self.ratings:
            raise errors.already_rated(body["id"], body["index"])
        self.ratings.append(body)
        return body

    async def chat(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        self.keys.authenticate(request.headers)
        self.bodies.append(body)
        prompt = body["messages"][0]["content"]
        if prompt == "refuse":
            raise errors.queue_full(7)
        if prompt == "hold":
            while (await request.receive())["type"] != "http.disconnect":
                await asyncio.sleep(0)
            self.left.set()
        return answer(prompt, body["best_of"])


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def canned() -> Iterator[Canned]:
    server = Canned()
    with serving(server.app()) as url:
        server.url = url
        yield server


def test_everything_is_done_with_a_keyboard(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    stops = []
    for _ in range(9):
        browser.press("Tab")
        stops.append(browser.focus)
    order = ["prompt", "Where is the ball?", "2 + 2 =", "n", "temperature", "max-tokens", "selection", "send"]
    assert (
        stops[:8] == order and stops[8] not in order
    )  # Cancel is passed over while there is nothing to cancel
    browser.run("document.querySelector('#selection').focus()")
    browser.press("ArrowDown")
    browser.run("document.querySelectorAll('#examples button')[1].focus()")
    browser.press("Enter")
    assert browser.focus == "prompt"
    browser.press("Enter", control=True)
    browser.until("!document.querySelector('#results').hidden")
    assert canned.bodies == [
        {
            "model": "demo-policy",
            "messages": [{"role": "user", "content": "2 + 2 ="}],
            "best_of": 5,
            "return_candidates": True,
            "temperature": 1,
            "max_tokens": 32,
            "selection": "majority",
        }
    ]
    browser.run("document.querySelector('#send').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('#form').getAttribute('aria-busy') === 'false'")
    assert len(canned.bodies) == 2


def test_the_winner_can_be_rated_once(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    browser.ask("hello")
    assert browser.texts(".rating") == []  # the server takes no ratings
    canned.ratings = []
    browser.open(canned.url)
    browser.ask("hello")
    browser.run("document.querySelectorAll('.rating button')[1].click()")
    browser.until("document.querySelector('.rating span').textContent.startsWith('Thank')")
    assert canned.ratings == [{"id": "chatcmpl-1", "index": 0, "rating": "down"}]
    pressed = "[...document.querySelectorAll('.rating button')].map((b) => [b.disabled, b.ariaPressed])"
    assert browser.run(pressed) == [[True, "false"], [True, "true"]]
    browser.ask("again")
    browser.run("document.querySelector('.rating button').click()")
    browser.until("document.querySelector('.rating span').textContent.includes('rated already')")


def test_candidates_are_shown_with_the_winner_first(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    assert browser.text("#models") == "demo-policy, ranked by demo-reward"
    browser.ask("hello")
    assert browser.texts(".card h3") == ["★ Winner", "Place 2", "Place 3", "Place 4", "Place 5"]
    assert browser.texts(".card .text") == ["you said hello", "plain", EVIL, "w" * 400, "(empty)"]
    assert browser.texts(".card .score") == [
        "score1.500",
        "score0.250",
        "score0.100",
        "score-2.000",
        "no score",
    ]
    assert browser.text(".card .parts") == "helpful1.500short-0.500"
    assert browser.text(".card .facts") == "candidate 3 · 6 tokens · ended by length"
    widths = "[...document.querySelectorAll('.fill')].map((fill) => fill.style.width)"
    # Of the way from the lowest score, -2, to the highest, 1.5: 2.25 / 3.5 and 2.1 / 3.5; never nothing.
    assert [round(float(width[:-1]), 2) for width in browser.run(widths)] == [100, 64.29, 60, 2]
    summary = dict(zip(browser.texts(".summary dt"), browser.texts(".summary dd"), strict=True))
    assert summary == {
        "Candidates drawn": "5",
        "Tokens in all": "37",
        "Prompt tokens": "7",
        "Time in all": "12.3 s",
        "Waited": "10 ms",
        "Drawing": "1.23 s",
        "Scoring": "500 ms",
    }
    assert browser.text("#status") == "5 candidates in 12.3 s; the winner scores 1.500."
    assert browser.problems == []
    assert {url.startswith(canned.url) or url.startswith("data:") for url in browser.requested} == {True}


def test_markup_in_a_completion_is_inert(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    browser.ask(EVIL)
    assert EVIL in browser.texts(".card .text") and f"you said {EVIL}" in browser.texts(".card .text")
    assert browser.run("document.querySelectorAll('#results img, #results script').length") == 0
    assert browser.run("window.pwned") is None
    # Were it to become markup after all, the page's policy would still stop it.
    assert browser.run(
        "(() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } })()"
    )


def test_a_request_can_be_cancelled(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    browser.run("document.querySelector('#prompt').focus()")
    browser.type("hold")
    browser.press("Enter", control=True)
    browser.until("!document.querySelector('#cancel').disabled")
    browser.press("Enter", control=True)  # nothing is sent twice
    while not canned.bodies:
        time.sleep(0.01)
    browser.run("document.querySelector('#cancel').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('#status').textContent === 'Cancelled.'")
    assert browser.focus == "send" and canned.left.wait()
    browser.ask("again")
    assert [body["messages"][0]["content"] for body in canned.bodies] == ["hold", "again"]


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, canned: Canned) -> None:
    canned.keys = KeyRing([("page", KEY)])
    browser.open(canned.url)
    assert browser.run("document.querySelector('#key-row').hidden")
    browser.ask("hello")
    assert browser.focus == "key"
    assert browser.text("#status") == "This server asks for an API key; enter it and send again."
    browser.type("wrong")
    browser.press("Enter")
    browser.until("document.querySelector('#status').textContent.includes('does not know')")
    browser.run("document.querySelector('#key').select()")
    browser.type(KEY)
    browser.press("Enter")
    browser.until("!document.querySelector('#results').hidden")
    browser.open(f"{canned.url}?again")
    browser.ask("hello")
    assert len(canned.bodies) == 2
    assert browser.run("JSON.stringify([sessionStorage, localStorage, document.cookie])") == json.dumps(
        [{"rlhf-serve-key": KEY}, {}, ""], separators=(",", ":")
    )


def test_an_error_is_one_sentence(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    browser.ask("refuse")
    assert browser.text("#status") == "The server's queue is full; try again in 7 s."
    assert browser.run("document.querySelector('#status.error[role=status]') !== null")
    assert browser.run("document.querySelector('#results').hidden")


def test_a_server_that_is_gone_is_reported(browser: Browser, canned: Canned) -> None:
    with serving(canned.app()) as url:
        browser.open(url)
    browser.ask("hello")
    assert browser.text("#status") == "The server cannot be reached; is it running?"


def test_bounds_are_checked_before_anything_is_sent(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url)
    browser.run("document.querySelector('#n').value = '17'")
    browser.run("document.querySelector('#prompt').focus()")
    browser.type("hello")
    browser.press("Enter", control=True)
    assert browser.run("document.querySelector('#n').validationMessage") != ""
    assert canned.bodies == []


def test_the_page_fits_a_phone(browser: Browser, canned: Canned) -> None:
    browser.open(canned.url, width=360, height=740)
    assert browser.run("document.documentElement.scrollWidth") == 360
    browser.ask("hello " + "x" * 200)
    assert browser.run("document.documentElement.scrollWidth") == 360
    places = browser.run(
        "[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect().toJSON())"
    )
    assert len({place["left"] for place in places}) == 1  # below each other
    assert all(upper["bottom"] <= lower["top"] for upper, lower in itertools.pairwise(places))
    assert all(place["right"] <= 360 for place in places)
    assert 0 <= browser.run("document.querySelector('#status').getBoundingClientRect().top") < 740


def test_the_page_and_the_real_server_agree(
    browser: Browser, start: Callable[..., Any], folders: Path
) -> None:
    server = start("--reward-model", str(folders / "reward"), "--n", "3", "--set", "max_tokens=8")
    browser.open(server.url + "/")
    assert browser.text("#models") == "policy, ranked by reward"
    browser.ask("where is mary ?")
    assert browser.texts(".card h3") == ["★ Winner", "Place 2", "Place 3"]
    scores = [float(score) for score in browser.texts(".card .score strong")]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    summary = dict(zip(browser.texts(".summary dt"), browser.texts(".summary dd"), strict=True))
    assert summary["Candidates drawn"] == "3" and int(summary["Tokens in all"]) > 3
    browser.run("document.querySelector('#temperature').value = '0'")
    browser.ask("where is mary ?")
    assert "at temperature 0 all candidates are the same" in browser.text("#status").lower()
    assert all("400 (Bad Request)" in problem for problem in browser.problems)


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", by_default(["light", "dark"], "dark"))
def test_all_text_stands_out_from_its_ground(browser: Browser, canned: Canned, scheme: str) -> None:
    browser.open(canned.url, scheme=scheme)
    browser.ask("hello")
    colours = browser.run(
        """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
          && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
          const own = (at) => getComputedStyle(at).backgroundColor;
          let ground = e;
          while (own(ground) === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
          return [e.textContent, getComputedStyle(e).color, own(ground)];
        })"""
    )
    assert len(colours) > 50
    dark_ground = luminance(browser.run("getComputedStyle(document.body).backgroundColor")) < 0.2
    assert dark_ground == (scheme == "dark")
    for text, colour, ground in colours:
        low, high = sorted((luminance(colour), luminance(ground)))
        assert text == "Cancel" or (high + 0.05) / (low + 0.05) >= 4.5, (text, colour, ground)
