"""What a request may tell the chat template, and a template that takes for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_serve.errors import APIError
from rlhf_serve.service.chat_templates import check_switches, switches_of

ENDLESS = "{% for i in range(30000) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "where is mary ?"}],
    "max_tokens": 2,
}


def tokenizer_with(template: Any) -> Any:
    def apply_chat_template(
        conversation: Any, tools: Any = None, documents: Any = None, **kwargs: Any
    ) -> str:
        return ""

    return SimpleNamespace(
        chat_template=template,
        special_tokens_map={"eos_token": "</s>"},
        apply_chat_template=apply_chat_template,
    )


def test_switches_are_what_the_template_reads_and_is_not_given() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% break %}"
        "{% endfor %}{% if enable_thinking and tools %}{{ raise_exception(style) }}{% endif %}"
        "{% set own = 1 %}{{ own }}{{ strftime_now('%d') }}{{ range(3) }}{{ documents }}"
    )
    assert switches_of(tokenizer_with(template)) == {"enable_thinking", "style"}
    assert switches_of(tokenizer_with({"default": "{{ a }}", "tool_use": "{{ b }}"})) == {"a", "b"}
    assert switches_of(tokenizer_with(None)) == switches_of(tokenizer_with("{% if %}")) == frozenset()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"other": 1}, "chat_template_kwargs.other"),
        ({"thinking": []}, "chat_template_kwargs.thinking"),
        ({"thinking": {"a": 1}}, "chat_template_kwargs.thinking"),
        ({"thinking": "x" * 1025}, "chat_template_kwargs.thinking"),
        ({f"t{i}": 1 for i in range(33)}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_switch_is_refused(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as refused:
        check_switches(arguments, frozenset({"thinking"}))
    assert (refused.value.status_code, refused.value.param) == (400, param)
    check_switches({"thinking": "x" * 1024}, frozenset({"thinking"}))


@pytest.fixture(scope="module")
def switched(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose template has a switch."""
    file = tmp_path_factory.mktemp("template") / "template"
    file.write_text(
        "{% if loud %}LOUD {% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
    )
    return start("--chat-template", str(file))


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tokenize", "tools", "documents", "conversation", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message", "padding"),
        *("messages", "eos_token", "tokenizer_kwargs", "max_length", "truncation"),
    ],
)
def test_nothing_but_switches_reaches_the_template(switched: Any, name: str) -> None:
    value = ENDLESS if name == "chat_template" else True
    status, body, _ = switched.fetch("/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: value}})
    assert status == 400 and body["error"]["param"] == f"chat_template_kwargs.{name}"


def test_a_switch_reaches_the_template(switched: Any) -> None:
    used = [
        switched.fetch("/v1/chat/completions", CHAT | {"chat_template_kwargs": kwargs})[1]["usage"]
        for kwargs in ({}, {"loud": False}, {"loud": True})
    ]
    plain, quiet, loud = (each["prompt_tokens"] for each in used)
    assert plain == quiet < loud


@pytest.mark.slow
def test_a_template_that_never_ends_holds_up_nobody_and_not_the_process(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "template"
    file.write_text(ENDLESS)
    limits = ["--set", "request_timeout_s=1", "--set", "drain_timeout_s=1"]
    server = start("--chat-template", str(file), *limits, process=True)
    for stream in (False, True):
        status, body, _ = server.fetch("/v1/chat/completions", CHAT | {"stream": stream})
        assert status == 504 and body["error"]["code"] == "timeout"
    assert server.fetch("/health")[0] == 200  # while both still render
    text = {"model": "policy", "prompt": "where", "max_tokens": 2}
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 120  # far more than it takes; a server that hangs would stay for ever
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.process.poll() == 0, text
