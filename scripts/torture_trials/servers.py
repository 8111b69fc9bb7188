"""A server that is killed or stopped while it answers."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from files import read_lines
from malformed_requests import MAX_BODY_BYTES
from torture_trials.commands import Ended
from torture_trials.place import Place
from torture_trials.trial import Trial, judged

PATIENCE = 120.0
"""Seconds that an answer may take on a busy machine."""
_GREEDY: dict[str, Any] = {"model": "policy", "temperature": 0, "max_tokens": 12}
QUESTIONS = [
    _GREEDY | {"prompt": prompt}
    for prompt in ("where is mary ?", "ball moved to", "it is certainly", "so wrong", "gossip says in")
]
SAMPLED: dict[str, Any] = {"model": "policy", "prompt": "where is ball ?", "max_tokens": 20, "best_of": 3}
_ERRORS = (OSError, http.client.HTTPException)


class Server:
    """`rlhf-serve` with a tiny policy and reward model.

    Args:
        place: has the models.
        options: of the command.
        prelude: Python file that the process runs first.
        lane: of the process.
    """

    def __init__(
        self, place: Place, *options: Any, prelude: Path | None = None, lane: str = "serving"
    ) -> None:
        folder = place.served
        models = ["--model", folder / "policy", "--chat-template", folder / "template"]
        models += ["--reward-model", folder / "reward", "--n", 2, "--max-tokens", 24, "--port", 0]
        limits = {"max_n": 4, "max_scored": 16, "max_prompts": 4, "max_body_bytes": MAX_BODY_BYTES}
        models += [word for key, value in limits.items() for word in ("--set", f"{key}={value}")]
        self.started = place.commands.start(["rlhf-serve", *models, *options], lane=lane, prelude=prelude)
        self.port = self._wait_for_port()

    def _wait_for_port(self) -> int:
        while self.started.running():
            said = self.started.log.read_text() if self.started.log.exists() else ""
            if found := re.search(r"open http://127.0.0.1:(\d+)/ for the page", said):
                return int(found[1])
            time.sleep(0.02)
        return 0

    def ask(self, path: str, body: Any = None, *, port: int | None = None) -> tuple[int, Any]:
        """Status and content of an answer.

        Raises:
            OSError: the connection was refused or closed early.
            HTTPException: what came is not an answer.
        """
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=PATIENCE)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            raw = answer.read()
            is_json = answer.getheader("content-type", "").startswith("application/json")
            return answer.status, json.loads(raw) if is_json else raw.decode()
        finally:
            connection.close()

    def greedy(self) -> list[Any]:
        """Texts and scores of the answers at temperature 0."""
        found = []
        for question in QUESTIONS:
            status, answer = self.ask("/v1/completions", question)
            choices = answer.get("choices", []) if isinstance(answer, dict) else []
            found.append([status, [(choice["text"], choice["score"]) for choice in choices]])
        return found

    def stop(self, number: int = signal.SIGTERM) -> Ended:
        """Send a signal, and wait for the end."""
        self.started.kill(number)
        return self.started.ended()


def undisturbed(place: Place) -> list[Any]:
    """What a server answers to which nothing happens."""
    file = place.folder / "greedy.json"
    if not file.exists():
        server = Server(place)
        file.write_text(json.dumps(server.greedy()))
        server.stop()
    return json.loads(file.read_text())


def same_answers(server: Server, place: Place) -> list[str]:
    """Differences of a server's answers from those of one to which nothing happened."""
    expected = undisturbed(place)
    try:
        found = json.loads(json.dumps(server.greedy()))
    except _ERRORS as error:
        return [f"no answer: {error!r}"]
    return [
        f"answer {i} differs: {a}" for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b
    ]


class Clients:
    """Threads that ask and rate until the server is gone.

    Args:
        server: to ask.
        count: of the threads.

    Attributes:
        rated: ids of the answers whose rating was acknowledged.
        broken: seconds at which requests began that got no answer.
        strange: answers that are neither good nor a refusal.
    """

    def __init__(self, server: Server, count: int = 3) -> None:
        self.rated: list[str] = []
        self.broken: list[float] = []
        self.strange: list[str] = []
        self._server, self._over = server, threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        for seed in range(10**6):
            began = time.monotonic()
            try:
                status, answer = self._server.ask("/v1/completions", SAMPLED | {"seed": 100 * seed + number})
                if status == 200:
                    self._rate(answer["id"])
                elif status != 503:
                    self.strange.append(f"{status} {answer}")
            except _ERRORS:
                self.broken.append(began)
                return
            if self._over.is_set():
                return

    def _rate(self, answer: str) -> None:
        status, content = self._server.ask("/v1/feedback", {"id": answer, "index": 0, "rating": "up"})
        if status == 200:
            self.rated.append(answer)
        elif status not in (400, 503):  # an empty answer; it is about to end
            self.strange.append(f"{status} {content}")

    def ended(self) -> None:
        """Wait until all have ended."""
        self._over.set()
        for thread in self._threads:
            thread.join()


def missing_rows(file: Path, rated: Sequence[str]) -> list[str]:
    """Acknowledged ratings that are not in a file, and lines of it that are not whole."""
    if not file.exists():
        return [f"{file.name} is missing"] if rated else []
    try:
        there = {row["id"] for row in read_lines(file)}
    except ValueError as error:
        return [f"{file.name} has a damaged line: {error}"]
    return [f"the rating of {each} is missing" for each in rated if each not in there]


def killed_server(place: Place, rng: random.Random) -> Trial:
    """SIGKILL of a server that answers and takes ratings, once or twice; then it is started again."""
    file, rated, lost = place.new("feedback.jsonl"), [], []
    undisturbed(place)
    kills = rng.randint(1, 2)
    ends: list[tuple[Ended, tuple[int, ...]]] = []
    for _ in range(kills):
        server = Server(place, "--feedback", file)
        clients = Clients(server)
        time.sleep(rng.uniform(0.2, 4))
        ends.append((server.stop(signal.SIGKILL), (-signal.SIGKILL,)))
        clients.ended()
        rated += clients.rated
        lost += clients.strange
    server = Server(place, "--feedback", file)
    lost += same_answers(server, place) + missing_rows(file, rated)
    ends.append((server.stop(), (0,)))
    return judged(
        "SIGKILL of rlhf-serve", ends, detail=f"{kills} kills, {len(rated)} ratings acknowledged", lost=lost
    )


def stopped_server(place: Place, rng: random.Random) -> Trial:
    """SIGTERM or SIGINT to a server that answers: what it took before is answered."""
    number, file = rng.choice((signal.SIGTERM, signal.SIGINT)), place.new("feedback.jsonl")
    server = Server(place, "--feedback", file)
    clients = Clients(server)
    time.sleep(rng.uniform(1, 4))
    began = time.monotonic()
    end = server.stop(number)
    clients.ended()
    dropped = [f"a request of {began - at:.1f} s before" for at in clients.broken if began - at > 1]
    lost = [*clients.strange, *dropped, *missing_rows(file, clients.rated)]
    codes = (0,) if number == signal.SIGTERM else (0, 130, -signal.SIGINT)
    detail = f"{len(clients.rated)} ratings acknowledged, exit code {end.code}"
    return judged(f"{number.name} to rlhf-serve under load", [(end, codes)], detail=detail, lost=lost)
