import hmac
import logging
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from raises import raises_error
from rlhf_serve.errors import APIError
from rlhf_serve.http.api_keys import ANONYMOUS, KeyRing

ALICE, BOB, EVE = "alice-0123456789", "bob-0123456789abc", "eve-0123456789abc"


def bearer(key: str) -> Headers:
    return Headers({"Authorization": f"Bearer {key}"})


def refused(ring: KeyRing, headers: Headers) -> bool:
    with pytest.raises(APIError) as caught:
        ring.authenticate(headers)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    return True


def test_a_key_opens_under_its_name() -> None:
    ring = KeyRing([("alice", ALICE), (None, BOB)])
    assert ring and ring.names == ("alice", "key-2")
    assert ring.authenticate(bearer(ALICE)) == "alice"
    assert ring.authenticate(Headers({"authorization": f"bearer  {BOB} "})) == "key-2"
    assert ring.authenticate(Headers({"X-API-Key": BOB})) == "key-2"
    both = Headers({"Authorization": "Basic abc", "x-api-key": ALICE})
    assert ring.authenticate(both) == "alice"


def test_anything_else_is_refused() -> None:
    ring = KeyRing([("alice", ALICE)])
    for key in (EVE, ALICE[:-1], ALICE + "x", "", ALICE.upper(), "\xe9" * 16):
        assert refused(ring, bearer(key))
    assert refused(ring, Headers({}))
    assert refused(ring, Headers({"Authorization": ALICE}))
    assert refused(ring, Headers({"Authorization": f"Basic {ALICE}"}))
    assert refused(ring, Headers({"Authorization": f"Bearer {EVE}", "x-api-key": ALICE}))


def test_without_keys_the_door_is_open() -> None:
    ring = KeyRing.load(environment={})
    assert not ring
    assert ring.authenticate(Headers({})) == ANONYMOUS


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = KeyRing([(None, ALICE), (None, BOB), (None, EVE)])
    ring.authenticate(bearer(ALICE))
    assert compared == [(32, 32)] * 3


def test_the_keys_themselves_are_not_kept() -> None:
    ring = KeyRing([("alice", ALICE)])
    assert ALICE not in repr(vars(ring))


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(f"\ufeff# ours\n\nalice {ALICE}\r\n  {BOB}\n".encode())
    path.chmod(0o600)
    ring = KeyRing.load(
        file=path,
        environment={"RLHF_SERVE_API_KEYS": f"eve {EVE}, mallory-123456789"},
    )
    assert ring.names == ("alice", "key-2", "eve", "key-4")
    assert ring.authenticate(bearer("mallory-123456789")) == "key-4"


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(ALICE)
    path.chmod(0o600)
    KeyRing.load(file=path, environment={})
    assert not caplog.records
    path.chmod(0o640)
    KeyRing.load(file=path, environment={})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.getMessage()
    assert ALICE not in caplog.text


@pytest.mark.parametrize(
    ("keys", "code", "name"),
    [
        ([("a", "fifteen-letters")], "weak_api_key", None),
        ([("a", "")], "weak_api_key", None),
        ([("a", "sixteen letters!")], "weak_api_key", None),
        ([("a", ALICE), ("b", ALICE)], "repeated_api_key", None),
        ([("a", ALICE), ("a", BOB)], "repeated_name", "a"),
        ([("anonymous", ALICE)], "invalid_name", None),
        ([("a b", ALICE)], "invalid_name", None),
        ([("key-2", ALICE), (None, BOB)], "repeated_name", "key-2"),
    ],
)
def test_bad_keys_are_refused(keys: list[tuple[str | None, str]], code: str, name: str | None) -> None:
    with raises_error(code, name=name) as caught:
        KeyRing(keys)
    assert ALICE not in str(caught.value)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with raises_error("invalid_api_key", where="the environment variable RLHF_SERVE_API_KEYS"):
        KeyRing.load(environment={"RLHF_SERVE_API_KEYS": ""})
    with raises_error("invalid_api_key", where="the environment variable RLHF_SERVE_API_KEYS"):
        KeyRing.load(environment={"RLHF_SERVE_API_KEYS": f"{ALICE},"})
    with raises_error("invalid_api_key", where="the environment variable RLHF_SERVE_API_KEYS"):
        KeyRing.load(environment={"RLHF_SERVE_API_KEYS": f"alice b {ALICE}"})
    with raises_error("unreadable_file"):
        KeyRing.load(file=tmp_path / "none", environment={})
    path = tmp_path / "keys"
    path.touch(0o600)
    with raises_error("no_api_key"):
        KeyRing.load(file=path, environment={})
    path.write_text(f"{ALICE}\nalice and bob\n")
    with raises_error("invalid_api_key", where=f"API keys {path}, line 2"):
        KeyRing.load(file=path, environment={})
    path.write_bytes(b"\xff\xfe\x00")
    with raises_error("unreadable_file"):
        KeyRing.load(file=path, environment={})
