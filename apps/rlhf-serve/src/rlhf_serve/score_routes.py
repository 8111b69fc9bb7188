"""The routes that only score."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from rlhf_data import UserError
from rlhf_data.transcripts import Text
from rlhf_serve.clients import ClientLeft, attended, within
from rlhf_serve.errors import invalid_request
from rlhf_serve.limits import Admission
from rlhf_serve.observe import record_of
from rlhf_serve.schema import RewardRequest, ScoreRequest
from rlhf_serve.scoring import Scores
from rlhf_serve.served import Served
from rlhf_serve.settings import ServeSettings


def add_scoring(app: FastAPI, served: Served, settings: ServeSettings, door: Admission, guard: Any) -> None:
    """Add `/v1/score` and `/get_reward`."""

    @app.post("/v1/score", dependencies=[guard])
    async def score(body: ScoreRequest, request: Request) -> Response:
        """How good completions are after their prompts."""
        if body.model is not None:
            served.check_model(body.model)
        pairs = _score_pairs(body)
        try:
            found = await _scores(served, settings, door, request, pairs, "text_2")
        except ClientLeft:
            return Response(status_code=499)
        data = [
            {"index": i, "object": "score", "score": total, "scores": _row(found, i)}
            for i, total in enumerate(found.total)
        ]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return JSONResponse(head | {"model": ",".join(served.rewards), "data": data})

    @app.post("/get_reward", dependencies=[guard])
    async def get_reward(body: RewardRequest, request: Request) -> Response:
        """Rewards as OpenRLHF's trainers ask for them."""
        pairs = _reward_pairs(body)
        try:
            found = await _scores(served, settings, door, request, pairs, "query")
        except ClientLeft:
            return Response(status_code=499)
        return JSONResponse({"rewards": found.total, "scores": found.total, "extra_logs": found.by_name})


async def _scores(
    served: Served,
    settings: ServeSettings,
    door: Admission,
    request: Request,
    pairs: list[tuple[str, str]],
    field: str,
) -> Scores:
    """Scores of pairs of a prompt and a completion; `field` is what the request calls the completions."""
    scoring = served.service.scoring
    if scoring is None:
        raise invalid_request("this server has no reward; start it with --reward-model")
    if not 1 <= len(pairs) <= settings.max_scored:
        raise invalid_request(f"{field} holds {len(pairs)} texts; expected 1 to {settings.max_scored}", field)
    tokenizer = served.service.texts.tokenizer
    prompts: list[Text] = [prompt for prompt, _ in pairs]
    completions: list[Text] = [completion for _, completion in pairs]

    async def work() -> Scores:
        async with within(settings.request_timeout_s), door.enter() as waited:
            record_of(request).queue_s = waited
            ids = [list(tokenizer(text)["input_ids"]) for text in completions]
            return await scoring.score(prompts, completions, ids)

    try:
        found = await attended(request.receive, work())
    except UserError as error:
        raise invalid_request(str(error), field) from error
    record_of(request).rewards = found.total
    return found


def _score_pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    prompts, completions = _listed(body.text_1), _listed(body.text_2)
    if len(prompts) == 1:
        prompts = prompts * len(completions)
    if len(prompts) != len(completions):
        raise invalid_request(
            f"text_1 holds {len(prompts)} texts and text_2 {len(completions)}; expected as many, or one in "
            "text_1",
            "text_1",
        )
    return list(zip(prompts, completions, strict=True))


def _reward_pairs(body: RewardRequest) -> list[tuple[str, str]]:
    queries = _listed(body.query)
    prompts = [""] * len(queries) if body.prompts is None else _listed(body.prompts)
    if len(prompts) != len(queries):
        raise invalid_request(
            f"query holds {len(queries)} texts and prompts {len(prompts)}; expected as many", "prompts"
        )
    for i, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not query.startswith(prompt):
            raise invalid_request(f"query[{i}] does not begin with prompts[{i}]", "query")
    return [(prompt, query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _row(scores: Scores, place: int) -> dict[str, float | None]:
    return {name: values[place] for name, values in scores.by_name.items()}
