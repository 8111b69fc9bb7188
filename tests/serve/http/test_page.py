import asyncio
import re
from importlib import resources

import httpx
from fastapi import FastAPI

from rlhf_serve import page
from rlhf_serve.http import middleware
from rlhf_serve.http.telemetry import Metrics


def html() -> str:
    return (resources.files(page) / "index.html").read_text(encoding="utf-8")


def test_the_page_brings_its_own_policy() -> None:
    app = FastAPI()
    middleware.install(app, metrics=Metrics())
    app.add_api_route("/", page.response, include_in_schema=False)

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/")

    response = asyncio.run(get())
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == html()
    (policy,) = response.headers.get_list("content-security-policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[kind])


def test_the_page_loads_nothing_from_anywhere() -> None:
    text = html()
    assert not re.findall(r"https?:|//[a-z]|@import|url\(", text.replace("/** ", ""))
    assert re.findall(r"\b(?:src|href)=\"([^\"]*)\"", text) == ["data:,"]
    assert set(re.findall(r"fetch\(\"([^\"]*)\"", text)) == {
        "v1/chat/completions",
        "v1/feedback",
        "page/info",
    }


def test_text_never_becomes_markup() -> None:
    text = html()
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|\son[a-z]+="
    )
    assert not re.findall(banned, text)
    assert not re.findall(r"\sstyle=", text)  # the policy would refuse it


def test_every_field_has_a_label() -> None:
    text = html()
    fields = set(re.findall(r"<(?:input|textarea|select) id=\"([^\"]+)\"", text))
    assert len(fields) == 6
    assert set(re.findall(r"<label for=\"([^\"]+)\"", text)) == fields
