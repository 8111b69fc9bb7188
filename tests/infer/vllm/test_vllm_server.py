"""Starting a vLLM server, with a small server in vLLM's place; what vLLM is asked for; a missing vLLM."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_infer import SamplingParams
from rlhf_infer.vllm import worker as vllm_worker
from rlhf_infer.vllm.process import VLLMServer
from rlhf_infer.vllm.settings import VLLMSettings, check_requests, end_token_ids
from rlhf_infer.vllm.stall_watch import StallWatch
from rlhf_infer.vllm.worker import ExactSampler
from rlhf_models import build_tiny_llama

FAKE = Path(__file__).parents[1].joinpath("fake_vllm_server.py")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, python: str) -> None:
    (tmp_path / "fails").write_text("7")
    server = VLLMServer(tmp_path, python=python, log_path=tmp_path / "log")
    with raises_error("server_ended"):
        server.start()
    assert server.pid is None
    (tmp_path / "fails").write_text(str(vllm_worker.NO_VLLM))
    with raises_error("missing_package"):
        server.start()
    (tmp_path / "fails").write_text(str(vllm_worker.SMALL_HEADS))
    with raises_error("head_too_small"):
        server.start()
    (tmp_path / "fails").unlink()
    server.start()
    assert server.pid is not None
    server.stop()


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho still loading\nexec sleep 1000\n")
    python.chmod(0o755)
    server = VLLMServer(tmp_path, python=str(python), start_timeout_s=0.2)
    with raises_error("server_not_ready"):
        server.start()
    assert server.pid is None
    server.stop()


def test_a_server_is_asked_for_what_the_settings_say(tmp_path: Path, python: str) -> None:
    settings = VLLMSettings(
        dtype="float32",
        kv_cache_gib=0.5,
        max_model_len=64,
        max_lora_rank=9,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        options={"max_num_seqs": 3},
    )
    command = VLLMServer(tmp_path, settings, python=python, port=1234)._command()
    pairs = list(itertools.pairwise(command))
    expected = {"model": tmp_path, "port": 1234, "dtype": "float32", "max-model-len": 64, "max-num-seqs": 3}
    expected |= {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}'}
    expected |= {"kv-cache-memory-bytes": 1 << 29, "max-lora-rank": 16, "generation-config": "vllm"}
    assert all((f"--{name}", str(value)) in pairs for name, value in expected.items())
    assert {"--enable-lora", "--no-enforce-eager"} <= set(command)


def test_the_worker_runs_without_our_packages(tmp_path: Path) -> None:
    """The Python that it is copied to has vLLM, and none of ours."""
    model = tmp_path / "model"
    build_tiny_llama(40, hidden_size=64, num_attention_heads=2).save_pretrained(model)
    copied = tmp_path / "copy_of_worker.py"
    copied.write_bytes(Path(vllm_worker.__file__).read_bytes())
    code = (
        "import sys, types\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.modules |= dict.fromkeys(('rlhf_data', 'rlhf_infer', 'rlhf_models'))\n"
        "vllm, platforms = types.ModuleType('vllm'), types.ModuleType('vllm.platforms')\n"
        "platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)\n"
        "sys.modules |= {'vllm': vllm, 'vllm.platforms': platforms}\n"
        "import copy_of_worker\n"
        f"print(copy_of_worker.platform_arguments({str(model)!r}, 64)['max_num_batched_tokens'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "4096\n"), ended.stderr


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    # The grandchild holds the pipe's other end: reading it ends when the grandchild has ended.
    child = (
        "import os, subprocess, sys\n"
        f"sys.path.insert(0, {str(Path(vllm_worker.__file__).parent)!r})\n"
        "code = 'import sys; sys.path.insert(0, sys.argv[1]); import worker; '\n"
        "code += 'print(1, flush=True); worker._end_with_parent(int(sys.argv[2]))'\n"
        "arguments = ['-c', code, sys.path[0], str(os.getpid())]\n"
        "subprocess.Popen([sys.executable, *arguments], start_new_session=True).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"1"
        process.kill()
        assert process.stdout.read() == b"\n"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_told(tmp_path: Path, byte_tokenizer: Any) -> None:
    from rlhf_infer.vllm.engine import VLLMEngine

    for start in (lambda: VLLMEngine(tmp_path, byte_tokenizer), lambda: VLLMServer(tmp_path)):
        with raises_error("missing_package"):
            start()


def test_importing_the_engines_does_not_import_vllm() -> None:
    importlib.import_module("rlhf_infer.vllm.engine")
    importlib.import_module("rlhf_infer.vllm.server_engine")
    assert "vllm" not in sys.modules


def test_requests_that_vllm_would_not_meet_are_refused() -> None:
    check_requests([[3] * 56], SamplingParams(8), 64)
    with raises_error("context_too_short"):
        check_requests([[3], [3] * 57], SamplingParams(8), 64)
    with raises_error("empty_prompt"):
        check_requests([[3], []], SamplingParams(8), 64)
    with raises_error("invalid_value", key="logits_processors"):
        check_requests([[3]], SamplingParams(8, logits_processors=(lambda ids, logits: logits,)), 64)
    for temperature in (0.001, 2.5):
        with raises_error("invalid_value", key="temperature"):
            check_requests([[3]], SamplingParams(8, temperature), 64)


def test_end_tokens_are_those_of_the_transformers_engine(
    tiny_model_folder: Path, byte_tokenizer: Any
) -> None:
    assert end_token_ids(str(tiny_model_folder), byte_tokenizer) == [2]
    (tiny_model_folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert end_token_ids(str(tiny_model_folder), byte_tokenizer) == [2, 5, 7]
    assert end_token_ids(None, byte_tokenizer) == [2]
    with raises_error("no_end_token"):
        end_token_ids(None, SimpleNamespace(eos_token_id=None))


class Sampler:
    """Takes the tokens in `chosen`, changes logits in place and reports other log-probs, as vLLM does."""

    def __init__(self, chosen: torch.Tensor, **states: Any) -> None:
        self.chosen = chosen
        self.__dict__.update(states)

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        del sampling_metadata
        logits.zero_()
        tensors = SimpleNamespace(logprobs=torch.zeros(len(logits), 1))
        return SimpleNamespace(sampled_token_ids=self.chosen[:, None].int(), logprobs_tensors=tensors)


def test_logps_are_of_the_whole_vocabulary_at_each_requests_temperature() -> None:
    # log p = z / T - log sum exp(z / T), z = (0, log 3): p of the second is 3/4 at T = 1 and 9/10 at T = 0.5;
    # greedy requests count as T = 1.
    logits = torch.tensor([[1.0, 3.0]]).log().repeat(3, 1)
    temperatures, chosen = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1, 1, 0])
    expected = torch.tensor([3 / 4, 9 / 10, 1 / 4]).log()[:, None]
    first = ExactSampler(Sampler(chosen))
    output = first(logits=logits.clone(), sampling_metadata=SimpleNamespace(temperature=temperatures))
    torch.testing.assert_close(output.logprobs_tensors.logprobs, expected)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=temperatures.flip(0)))
    second = ExactSampler(Sampler(chosen, sampling_states=states))
    output = second(logits.clone(), SimpleNamespace(expanded_idx_mapping=torch.tensor([2, 1, 0])))
    torch.testing.assert_close(output.logprobs_tensors.logprobs, expected)
    greedy = first(logits=logits.clone(), sampling_metadata=SimpleNamespace(temperature=None))
    torch.testing.assert_close(greedy.logprobs_tensors.logprobs, torch.tensor([[0.75], [0.75], [0.25]]).log())
    assert first.chosen is chosen


def test_work_that_stands_still_ends_in_an_error() -> None:
    with raises_error("vllm_stalled"), StallWatch(lambda: 1, 0.05):
        while True:
            time.sleep(0.01)


def test_work_that_goes_on_is_left_alone() -> None:
    done = threading.Event()
    with StallWatch(time.monotonic, 0.01):
        assert not done.wait(0.2)
