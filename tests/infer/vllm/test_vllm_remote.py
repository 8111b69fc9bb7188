"""The engine that talks to a vLLM server, against a small server that speaks its protocol."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_infer import MCTSGenerator, SamplingParams, SearchSettings
from rlhf_infer.vllm.process import VLLMServer
from rlhf_infer.vllm.server_engine import VLLMServerEngine
from rlhf_infer.vllm.settings import VLLMSettings, sample_seed
from rlhf_infer.vllm.weight_export import write_weight_folder
from rlhf_models.adapters.lora import LoraSettings, apply_lora

FAKE = Path(__file__).parents[1].joinpath("fake_vllm_server.py")
WAITS, ENDS = 99, 98
PARAMS = SamplingParams(5, 1.0, 3)


class Place:
    """A model folder, a Python that runs the small server, and the folder of files that steer it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self.steer = folder / "steer"
        self.steer.mkdir()
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        self.python.chmod(0o755)

    def server(self, **options: Any) -> VLLMServer:
        settings = VLLMSettings(**options.pop("settings", {}))
        return VLLMServer(self.model, settings, python=str(self.python), **options)

    def calls(self, path: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.steer / "calls").read_text().splitlines()]
        return [body for called, body in lines if called == path]

    def once_asked(self, prompt_token: int, action: Callable[[], object]) -> threading.Thread:
        """Do something as soon as a completion of a prompt with that token has been asked for."""

        def wait() -> None:
            calls = self.steer / "calls"
            while not calls.exists() or f", {prompt_token}]" not in calls.read_text():
                time.sleep(0.01)
            action()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def place(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path, tiny_model_folder)
    monkeypatch.setenv("FAKE_VLLM", str(found.steer))
    return found


@pytest.fixture
def engine(place: Place, byte_tokenizer: Any) -> Iterator[VLLMServerEngine]:
    engine = VLLMServerEngine(place.server(), byte_tokenizer, timeout_s=60)
    yield engine
    engine.close()


def ids(rollouts: Any) -> list[list[list[int]]]:
    return [[rollout.completion_ids for rollout in group] for group in rollouts]


def lengths(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def nudge(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def test_each_sample_is_a_request_with_a_seed_of_its_own(place: Place, engine: VLLMServerEngine) -> None:
    params = SamplingParams(4, 0.7, 3, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop=("ab",))
    rollouts = engine.generate([[5, 6], [7], [5, 6]], 3, params)
    asked = place.calls("/v1/completions")
    assert len(asked) == 6
    seeds = {(tuple(body["prompt"]), body["seed"]) for body in asked}
    assert seeds == {(prompt, sample_seed(3, prompt, k)) for prompt in ((5, 6), (7,)) for k in range(3)}
    fields = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 0.7}
    fields |= {"stop": ["ab"], "include_stop_str_in_output": True, "skip_special_tokens": False}
    fields |= {"max_tokens": 4, "min_tokens": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    fields |= {"stop_token_ids": engine.eos_token_ids}
    assert all(body[name] == value for body in asked for name, value in fields.items())
    assert ids(rollouts)[0] == ids(rollouts)[2] != ids(rollouts)[1]
    assert len({tuple(tokens) for tokens in ids(rollouts)[0]}) == 3
    assert [len(group) for group in rollouts] == [3, 3, 3]
    first = rollouts[0][0]
    assert first.prompt_ids == (5, 6) and first.finish_reason == "length" and len(first.logps) == 4
    assert ids(engine.generate([[7]], 5, params))[0][:3] == ids(rollouts)[1]


def test_greedy_completions_are_computed_once(place: Place, engine: VLLMServerEngine) -> None:
    rollouts = engine.generate([[5], [6], [5]], 4, SamplingParams(2, 0.0))
    asked = place.calls("/v1/completions")
    assert [body["prompt"] for body in asked if "seed" in body] == []
    assert sorted(body["prompt"] for body in asked) == [[5], [6]]
    assert [len(group) for group in rollouts] == [4, 4, 4]
    assert ids(rollouts)[0] == [ids(rollouts)[0][0]] * 4
    assert engine.generate([], 4, PARAMS) == []


def test_seeds_depend_on_seed_prompt_and_sample_alone() -> None:
    seeds = {sample_seed(s, p, k) for s in (0, 1) for p in ((1, 2), (12,), (1,)) for k in (0, 1)}
    assert len(seeds) == 12 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seed(3, torch.tensor([4, 5]).tolist(), 2) == sample_seed(3, (4, 5), 2)


def test_weights_reach_the_server(place: Place, engine: VLLMServerEngine, tiny_llama: Any) -> None:
    before = ids(engine.generate([[5]], 2, PARAMS))
    engine.update_weights(tiny_llama)
    assert ids(engine.generate([[5]], 2, PARAMS)) == before
    nudge(tiny_llama)
    (place.steer / "busy").touch()
    engine.update_weights(tiny_llama)
    after = ids(engine.generate([[5]], 2, PARAMS))
    assert after != before
    paths = [call["kwargs"]["weights_path"] for call in place.calls("/collective_rpc") if "kwargs" in call]
    assert len(set(paths)) == 2 and not Path(paths[0]).exists() and Path(paths[1]).is_dir()
    assert len(place.calls("/reset_prefix_cache")) == 3  # one more, for the server was busy
    folder = place.model.parent / "same"
    write_weight_folder(tiny_llama, folder)
    assert (folder / "model.safetensors").read_bytes() == (Path(paths[1]) / "model.safetensors").read_bytes()
    engine.close()
    assert not Path(paths[1]).exists()


def test_a_killed_server_is_started_again_and_gives_the_same(
    place: Place, engine: VLLMServerEngine, tiny_llama: Any
) -> None:
    nudge(tiny_llama)
    engine.update_weights(tiny_llama)
    prompts = [[5], [6, WAITS], [7, WAITS]]
    server = engine._server
    assert server is not None and server.pid is not None
    first = server.pid

    def kill() -> None:
        os.killpg(first, signal.SIGKILL)
        (place.steer / "gate").touch()

    thread = place.once_asked(WAITS, kill)
    interrupted = engine.generate(prompts, 3, PARAMS)
    thread.join()
    assert engine.restarts == 1 and server.pid != first
    assert ids(engine.generate(prompts, 3, PARAMS)) == ids(interrupted)
    assert engine.restarts == 1


@pytest.mark.slow
def test_a_stopped_server_is_started_again_after_the_time_limit(
    place: Place, engine: VLLMServerEngine
) -> None:
    expected = engine.generate([[5], [6]], 2, PARAMS)
    assert engine._server is not None and engine._server.pid is not None
    os.killpg(engine._server.pid, signal.SIGSTOP)
    engine.timeout_s = 3.0
    assert ids(engine.generate([[5], [6]], 2, PARAMS)) == ids(expected)
    assert engine.restarts >= 1


def test_a_server_lost_while_it_gets_weights_gets_them_again(
    place: Place, engine: VLLMServerEngine, tiny_llama: Any
) -> None:
    nudge(tiny_llama)
    engine.update_weights(tiny_llama)
    expected = ids(engine.generate([[5]], 2, PARAMS))
    assert engine._server is not None and engine._server.pid is not None
    os.killpg(engine._server.pid, signal.SIGKILL)
    engine.update_weights(tiny_llama)
    assert engine.restarts == 1
    assert ids(engine.generate([[5]], 2, PARAMS)) == expected


def test_a_server_that_ends_each_time_is_given_up_with_its_log(engine: VLLMServerEngine) -> None:
    with raises_error("server_lost"):
        engine.generate([[5, ENDS]], 1, PARAMS)
    assert engine.restarts == 3


def test_a_search_draws_its_steps_from_a_server(engine: VLLMServerEngine, place: Place) -> None:
    settings = SearchSettings(width=4, budget_tokens=24, max_step_tokens=4, widen=False)

    def generator(max_new_tokens: int) -> MCTSGenerator:
        params = SamplingParams(max_new_tokens, 1.0, 3)
        return MCTSGenerator(engine, lengths, engine.tokenizer, params=params, settings=settings)

    with raises_error("context_too_short"):  # before anything is drawn, though every step would fit
        generator(64).generate(["so"])
    assert not place.calls("/v1/completions")
    [found], [again] = generator(12).generate(["so"]), generator(12).generate(["so"])
    assert found.tree.spent == 24 and list(found.tree.lines()) == list(again.tree.lines())
    asked = {tuple(body["prompt"]) for body in place.calls("/v1/completions")}
    extended = [node.id for node in found.tree.nodes if node.draws]
    assert asked == {(*found.tree.prompt_ids, *found.tree.completion_ids(node)) for node in extended}
    assert len(extended) > 1


@pytest.mark.slow
def test_a_server_of_somebody_else_is_not_started_again(place: Place, byte_tokenizer: Any) -> None:
    with place.server() as server:
        engine = VLLMServerEngine(server.url, byte_tokenizer, timeout_s=1.0)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGSTOP)
        with raises_error("server_lost"):
            engine.generate([[5]], 1, PARAMS)
        os.killpg(server.pid, signal.SIGKILL)
        with raises_error("server_lost"):
            engine.generate([[5]], 1, PARAMS)
        engine.close()


def test_a_server_started_again_by_somebody_else_is_found_out(
    place: Place, byte_tokenizer: Any, tiny_llama: Any
) -> None:
    with place.server() as server:
        engine = VLLMServerEngine(server.url, byte_tokenizer)
        engine.update_weights(tiny_llama)
        server.restart()
        with raises_error("different_weights"):
            engine.generate([[5]], 1, PARAMS)
        engine.close()


def test_adapters_have_names_that_are_never_used_again(
    place: Place, byte_tokenizer: Any, tiny_llama: Any
) -> None:
    model = apply_lora(tiny_llama, LoraSettings(lora_r=4))
    engine = VLLMServerEngine(place.server(settings={"max_lora_rank": 4}), byte_tokenizer)
    bare = ids(engine.generate([[5]], 2, PARAMS))
    seen = [bare]
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.1)
        engine.update_weights(model)
        seen.append(ids(engine.generate([[5]], 2, PARAMS)))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    loaded = [call["lora_name"] for call in place.calls("/v1/load_lora_adapter")]
    assert [name[-5:] for name in loaded] == ["v0001", "v0002", "v0003"]
    assert [call["lora_name"] for call in place.calls("/v1/unload_lora_adapter")] == loaded[:2]
    assert place.calls("/v1/completions")[-1]["model"] == loaded[2] == engine.weights_name

    assert engine._server is not None and engine._server.pid is not None
    os.killpg(engine._server.pid, signal.SIGKILL)
    assert ids(engine.generate([[5]], 2, PARAMS)) == seen[-1]
    follower = VLLMServerEngine(engine.url, byte_tokenizer, lora=True)
    follower.follow(engine.weights_name)
    assert ids(follower.generate([[5]], 2, PARAMS)) == seen[-1]
    follower.close()
    with model.disable_adapter():
        engine.update_weights(model)
    assert ids(engine.generate([[5]], 2, PARAMS)) == bare
    engine.close()


def test_a_lost_adapter_is_told(place: Place, byte_tokenizer: Any) -> None:
    with place.server(settings={"max_lora_rank": 4}) as server:
        engine = VLLMServerEngine(server.url, byte_tokenizer, lora=True)
        engine.follow("policy-gone")
        with raises_error("completion_refused"):
            engine.generate([[5]], 1, PARAMS)
        engine.close()


@pytest.mark.parametrize("status", [400, 500])
def test_refused_completions_say_why(place: Place, engine: VLLMServerEngine, status: int) -> None:
    (place.steer / "refuse").write_text(str(status))
    with raises_error("completion_refused"):
        engine.generate([[5]], 2, PARAMS)
    assert engine.restarts == 0


def test_weights_that_the_server_cannot_see_are_told(
    place: Place, byte_tokenizer: Any, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.server() as server:
        engine = VLLMServerEngine(server.url, byte_tokenizer)
        monkeypatch.setattr(engine, "_sync_folder", place.steer)
        engine.update_weights(tiny_llama)
        found = engine._pushed
        assert found is not None
        engine._held = None
        (found / "model.safetensors").unlink()
        with raises_error("weights_refused"):
            engine._push()
        engine.close()


def test_no_server_is_told(byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with raises_error("server_unreachable"):
        VLLMServerEngine("http://127.0.0.1:9", byte_tokenizer, timeout_s=0.1)
    [waiting] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "http://127.0.0.1:9" in waiting.getMessage()
    with raises_error("invalid_url"):
        VLLMServerEngine("localhost:8000", byte_tokenizer)


def test_an_address_that_is_not_vllms_is_refused_at_once(byte_tokenizer: Any, place: Place) -> None:
    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), NotFound) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        with raises_error("not_a_vllm_server"):
            VLLMServerEngine(f"http://127.0.0.1:{web.server_port}", byte_tokenizer, timeout_s=30)
        web.shutdown()
    with place.server() as server, raises_error("not_a_vllm_server"):
        VLLMServerEngine(f"{server.url}/v1", byte_tokenizer, timeout_s=30)


def test_a_foreign_server_on_cpus_gets_no_full_weights(
    engine: VLLMServerEngine, byte_tokenizer: Any, tiny_llama: Any
) -> None:
    other = VLLMServerEngine(engine.url, byte_tokenizer)
    other.update_weights(tiny_llama)  # it runs what `VLLMServer` puts into servers
    other._exact = False
    with raises_error("server_on_cpu"):
        other.update_weights(tiny_llama)
    other.close()


def test_exactness_is_known(place: Place, engine: VLLMServerEngine, byte_tokenizer: Any) -> None:
    cut = SamplingParams(4, 0.7, top_p=0.9)
    assert engine.exact_logps(cut)
    other = VLLMServerEngine(engine.url, byte_tokenizer)
    assert other.exact_logps(cut)  # it runs what `VLLMServer` puts into servers
    assert {"method": "return_exact_logps"} in place.calls("/collective_rpc")
    other._exact = False
    assert not other.exact_logps(SamplingParams(4, 0.7))
    assert other.exact_logps(SamplingParams(4, 1.0, top_p=0.9)) and other.exact_logps(SamplingParams(4, 0.0))
    other._modes = ("processed_logprobs",)
    assert other.exact_logps(SamplingParams(4, 0.7)) and not other.exact_logps(cut)
    assert not other.exact_logps(SamplingParams(4, 1.0, repetition_penalty=1.1))
    other.close()
