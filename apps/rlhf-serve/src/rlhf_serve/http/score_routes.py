"""The routes that only score."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from rlhf_data import Text, UserError, as_completion
from rlhf_infer import Samples
from rlhf_infer.rewards.texts import text_of
from rlhf_serve.errors import invalid_request
from rlhf_serve.http.limits import COMPUTING, Admission
from rlhf_serve.http.streaming import attended, within
from rlhf_serve.http.telemetry import record_of
from rlhf_serve.openai.other_schemas import RerankRequest
from rlhf_serve.openai.schema import RewardRequest, ScoreRequest
from rlhf_serve.service.best_of_n import BestOfNService
from rlhf_serve.service.messages import checked_messages
from rlhf_serve.service.scoring_queue import Scores
from rlhf_serve.service.served_model import Served
from rlhf_serve.service.tokenization import ChatTokenizer
from rlhf_serve.settings import ServeSettings

_SCORE, _OPENRLHF, _RERANK = ("/v1/score", "/score"), "/get_reward", ("/rerank", "/v1/rerank", "/v2/rerank")


def add_scoring(app: FastAPI, served: Served, settings: ServeSettings, admission: Admission) -> None:
    """Add the routes for scores, reranking and rewards."""
    service = served.service

    @app.post(_SCORE[1], tags=[COMPUTING], include_in_schema=False)
    @app.post(_SCORE[0], tags=[COMPUTING])
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores of completions after their prompts."""
        served.check_model(body.model)
        batch = partial(_score_batch, body, service)
        found = await _scores(service, settings, admission, request, batch, fill_in=False)
        data = [
            {"index": i, "object": "score", "score": total, "scores": _row(found, i)}
            for i, total in enumerate(found.total)
        ]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        used = {"usage": _usage(found.tokens)}
        return JSONResponse(head | {"model": ",".join(served.rewards), "data": data} | used)

    @app.post(_RERANK[2], tags=[COMPUTING], include_in_schema=False)
    @app.post(_RERANK[1], tags=[COMPUTING], include_in_schema=False)
    @app.post(_RERANK[0], tags=[COMPUTING])
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents ranked by the rewards that they have as answers to a query, as Cohere and Jina answer."""
        served.check_model(body.model)
        texts = _documents(body)
        batch = partial(_score_batch, _as_scores(body, texts), service)
        found = await _scores(service, settings, admission, request, batch, fill_in=False)
        scores = [-math.inf if total is None else total for total in found.total]
        ranked = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
        results = [
            {"index": i, "relevance_score": found.total[i]}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            for i in ranked[: body.top_n]
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": ",".join(served.rewards), "results": results}
        return JSONResponse(head | {"usage": _usage(found.tokens), "meta": meta})

    @app.post(_OPENRLHF, tags=[COMPUTING])
    async def get_reward(body: RewardRequest, request: Request) -> Response:
        """Rewards as OpenRLHF's trainers ask for them, and `rlhf-train --reward URL`."""
        batch = partial(_reward_batch, body, service)
        # Who trains needs a number for each completion, as training in this process does.
        found = await _scores(service, settings, admission, request, batch, fill_in=True)
        return JSONResponse({"rewards": found.total, "scores": found.total, "extra_logs": found.by_name})


async def _scores(
    service: BestOfNService,
    settings: ServeSettings,
    admission: Admission,
    request: Request,
    make_batch: Callable[[], Samples],
    *,
    fill_in: bool,
) -> Scores:
    """Scores of what `make_batch` reads from the request, which it does in a thread.

    Raises:
        APIError: there is no reward, too much to score, or nothing is scored.
    """
    scoring = service.scoring
    if scoring is None:
        raise invalid_request("this server has no reward; start it with --reward-model")
    record = record_of(request)

    async def work() -> Scores:
        async with within(settings.request_timeout_s, record.began), admission.enter() as waited:
            record.queue_s = waited
            batch, tokens = await service.chat_tokenizer.workers.run(lambda: _counted(make_batch(), service))
            if not 1 <= len(batch.completions) <= settings.max_scored:
                raise invalid_request(
                    f"there are {len(batch.completions)} texts to score; expected 1 to {settings.max_scored}"
                )
            scoring.check_columns(batch.columns)
            found = await scoring.score(batch.prompts, batch.completions, batch.columns, fill_in=fill_in)
            if all(total is None for total in found.total):
                message = f"no reward function is applicable, all returned None ({', '.join(found.by_name)})"
                raise scoring.nothing_scored(message) from UserError(message)
            return replace(found, tokens=tokens)

    found = await attended(request.receive, work())
    record.rewards = [total for total in found.total if total is not None]
    return found


def _documents(body: RerankRequest) -> list[str]:
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in body.documents]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid_request(f"documents[{i}] must be a text, or an object with text", f"documents[{i}]")
    return texts


def _as_scores(body: RerankRequest, texts: list[str]) -> ScoreRequest:
    """The request for scores that a reranking stands for."""
    return ScoreRequest(
        text_1=body.query if isinstance(body.query, str) else [body.query],
        text_2=texts,
        chat_template_kwargs=body.chat_template_kwargs,
        reward_columns=body.reward_columns,
    )


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def _counted(batch: Samples, service: BestOfNService) -> tuple[Samples, int]:
    """A batch, and the tokens of its texts in the policy's vocabulary."""
    texts = map(text_of, (*batch.prompts, *batch.completions))
    return batch, sum(len(service.chat_tokenizer.token_ids(text)) for text in texts)


def _score_batch(body: ScoreRequest, service: BestOfNService) -> Samples:
    service.chat_tokenizer.check_template(body.chat_template_kwargs)
    given: Any = body.text_1
    if isinstance(given, str) or (given and isinstance(given[0], dict)):
        given = [given]
    completions = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    prompts = [
        each
        if isinstance(each, str)
        else service.as_scored(checked_messages(each), body.chat_template_kwargs)
        for each in given
    ]
    if len(prompts) == 1:
        prompts = prompts * len(completions)
    if len(prompts) != len(completions):
        raise invalid_request(
            f"text_1 holds {len(prompts)} texts and text_2 {len(completions)}; expected as many, or one in "
            "text_1",
            "text_1",
        )
    after = [as_completion(p, c) for p, c in zip(prompts, completions, strict=True)]
    return _batch(prompts, after, body.reward_columns or {}, "reward_columns")


def _reward_batch(body: RewardRequest, service: BestOfNService) -> Samples:
    columns = dict(body.columns or {})
    if body.labels is not None:
        columns = {"labels": body.labels, "label": body.labels, "answer": body.labels} | columns
    if body.completions is not None:
        prompts, completions = _listed(body.prompts), list(body.completions)
    elif body.query is not None:
        queries = [body.query] if isinstance(body.query, str) else body.query
        texts = [""] * len(queries) if body.prompts is None else _listed(body.prompts)
        if len(texts) != len(queries) or not all(isinstance(text, str) for text in texts):
            raise invalid_request(
                f"query holds {len(queries)} texts and prompts {len(texts)}; expected as many texts",
                "prompts",
            )
        pairs = [split_query(q, p, service.chat_tokenizer) for q, p in zip(queries, texts, strict=True)]
        return _batch([p for p, _ in pairs], [c for _, c in pairs], columns, "columns")
    else:
        raise invalid_request("expected query, or prompts and completions", "query")
    if len(prompts) != len(completions):
        raise invalid_request(
            f"there are {len(prompts)} prompts and {len(completions)} completions; expected as many",
            "prompts",
        )
    read = [_as_read(p, c, service) for p, c in zip(prompts, completions, strict=True)]
    return _batch([p for p, _ in read], [c for _, c in read], columns, "columns")


def _as_read(prompt: Any, completion: Any, service: BestOfNService) -> tuple[Text, Text]:
    """Prompt and completion as rewards read them: both as messages, or both as texts."""
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise invalid_request(
                "a prompt is a text and its completion messages; write both alike", "completions"
            )
        return prompt, completion
    if not isinstance(completion, str):
        completion = checked_messages(completion)
        if service.messages:
            return checked_messages(prompt), completion
        completion = "\n".join(message["content"] for message in completion)
    found = service.as_scored(checked_messages(prompt))
    return found, as_completion(found, completion)


def _batch(
    prompts: list[Text], completions: list[Text], columns: dict[str, list[Any]], field_name: str
) -> Samples:
    for name, values in columns.items():
        if len(values) != len(completions):
            raise invalid_request(
                f"the column {name[:64]!r} has {len(values)} values; expected {len(completions)}, one for "
                "each completion",
                field_name,
            )
    return Samples(prompts, completions, None, columns)


def _listed(prompts: Any) -> list[Any]:
    return [] if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)


def _row(scores: Scores, place: int) -> dict[str, float | None]:
    return {name: values[place] for name, values in scores.by_name.items()}


def split_query(query: str, prompt: str, chat_tokenizer: ChatTokenizer) -> tuple[str, str]:
    """Prompt and completion of a decoded sequence.

    OpenRLHF decodes sequences with their special tokens: padding and a begin token before the prompt, which
    the prompt itself may lack, an end token and padding after the completion. Neither is part of a text.

    Returns:
        Both; where the query does not begin with the prompt, an empty prompt and the whole query.
    """
    special = "|".join(
        map(re.escape, sorted(chat_tokenizer.tokenizer.all_special_tokens, key=len, reverse=True))
    )
    if special:
        query = re.sub(rf"(?:{special})+\Z", "", query)
    if query.startswith(prompt):
        return prompt, query[len(prompt) :]
    bare_query, bare_prompt = query, prompt
    if special:
        lead = re.compile(rf"\A(?:\s*(?:{special}))+\s*")
        bare_query, bare_prompt = lead.sub("", query), lead.sub("", prompt.lstrip())
    if bare_query.startswith(bare_prompt):
        return prompt, bare_query[len(bare_prompt) :]
    return "", bare_query
