"""Cost and cache of the judge behind an API, against a real HTTP server on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import APIJudge, APISettings
from rlhf_infer.judges.cache import JudgeCache
from rlhf_infer.judges.settings import FENCED_TEMPLATE


def test_cost(fake: Any) -> None:
    # 3 requests of 100 prompt tokens at 2.5 and 1 completion token at 10 per million:
    # (300 x 2.5 + 3 x 10) / 1e6 = 0.00078.
    with fake.serve(fake.certain) as server:
        api = fake.judge(server, prompt_price=2.5, completion_price=10)
        fake.score(api, "c0", "c1", "c2")
        assert api.usage.cost == pytest.approx(0.00078)
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (300, 3)
        assert (api.usage.requests, api.usage.retries, api.usage.cached) == (3, 0, 0)
        free = fake.judge(server)
        fake.score(free, "c0")
    assert free.usage.cost is None
    with pytest.raises(ValueError, match="give both or neither"):
        APISettings(prompt_price=1)


def test_usage_that_the_server_does_not_report(fake: Any) -> None:
    value = fake.completion("7")
    for usage in ({"prompt_tokens": None}, None, {"prompt_tokens": 3}):
        with fake.serve(fake.says(value | {"usage": usage})) as server:
            api = fake.judge(server, answer="number")
            assert fake.score(api, "c") == [pytest.approx(0.07)]
        assert (api.usage.prompt_tokens, api.usage.completion_tokens) == (0, 0)


def test_cache_across_instances(fake: Any, tmp_path: Path) -> None:
    with fake.serve(fake.certain) as server:
        first = fake.judge(server, cache=tmp_path)
        scores = fake.score(first, "true!", "c1", "c2")
        second = fake.judge(server, cache=tmp_path)
        assert fake.score(second, "true!", "c1", "c2") == scores
        assert len(server.requests) == 3 and first.usage.cached == 0
        assert (second.usage.requests, second.usage.cached) == (0, 3)
        fake.score(fake.judge(server, cache=tmp_path, template="{critique}"), "true!")
        assert len(server.requests) == 4  # another text
        other = APIJudge(server.url, "m2", cache_folder=tmp_path)
        fake.score(other, "true!")
        assert len(server.requests) == 5  # another model
        with pytest.raises(UserError, match="expected a whole number"):  # another method
            fake.score(fake.judge(server, cache=tmp_path, template=FENCED_TEMPLATE, answer="number"), "true!")
    assert fake.KEY.encode() not in (tmp_path / "judge.sqlite3").read_bytes()


def test_replies_before_a_failure_stay_in_the_cache(fake: Any, tmp_path: Path) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, b"no", 400) if "bad" in text else fake.certain(handler, text)

    with fake.serve(reply) as server:
        api = fake.judge(server, cache=tmp_path, concurrency=1, template="{critique}")
        with pytest.raises(UserError, match="status 400"):
            fake.score(api, "c0", "bad", "c1", "c2", "c3")
        good = len(server.requests) - 1
        fake.score(api, "c0", "c1", "c2", "c3")
    assert api.usage.cached == good and len(server.requests) == 5


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from rlhf_infer.judges.cache import JudgeCache
        cache, start = JudgeCache(Path(sys.argv[1])), int(sys.argv[2])
        for i in range(start, start + 200):
            cache.write(str(i), i / 300)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    workers = [subprocess.Popen([*command, start]) for start in ("0", "100")]
    assert [worker.wait() for worker in workers] == [0, 0]
    found = JudgeCache(tmp_path).read({str(i): f"text {i}" for i in range(301)})
    assert found == {f"text {i}": i / 300 for i in range(300)}


def test_a_broken_cache_is_named(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite3").write_bytes(b"no database" * 100)
    with (
        fake.serve(fake.certain) as server,
        pytest.raises(UserError, match=r"cache .*judge\.sqlite3 cannot be used: .*; remove it"),
    ):
        fake.judge(server, cache=tmp_path)
