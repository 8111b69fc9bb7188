"""Headers with keys are sent and never shown, whatever the server repeats of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_infer import async_loop
from rlhf_infer.http_client import HTTPClient, Refused
from rlhf_infer.vllm.client import ServerRefused, VLLMClient

SECRET = 'abc"d/e-123456'
BODY = json.dumps({"messages": [{"content": ""}]}).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [("Authorization", f"Basic {SECRET}"), ("X-Api-Key", SECRET), ("Cookie", f"session={SECRET}")],
)
def test_a_header_with_a_key_is_not_shown(name: str, value: str, fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, {"error": f"wrong {name}: {handler.headers[name]}"}, 401)

    with fake.serve(reply) as server:
        headers = {name: value, "X-Team": "wrong"}
        client = HTTPClient(f"{server.url}/score", what="scorer", timeout_s=20, headers=headers)
        with pytest.raises(Refused) as error:
            async_loop.submit(client.send("POST", client.url, BODY)).result()
        assert server.requests[0]["headers"][name] == value
    assert f"wrong {name}: <the API key>" in str(error.value)
    assert "123456" not in str(error.value)


@pytest.mark.parametrize("padding", [0, 490])
def test_a_vllm_server_is_quoted_without_the_key(padding: int, fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        said = {"error": {"message": f"{'.' * padding}key {handler.headers['Authorization']}"}}
        fake.send(handler, said, 401, Content_Type="application/json")

    with fake.serve(reply) as server:
        client = VLLMClient(server.url, api_key=SECRET)
        with pytest.raises(ServerRefused) as error:
            client.call("POST", "/x", json.loads(BODY), timeout_s=20)
    assert error.value.status == 401
    assert "key" in str(error.value) and "abc" not in str(error.value)
