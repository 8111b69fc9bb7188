"""Jobs by command whose weights are sharded from the first byte, on several processes and then on others."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from proofs import in_ci
from rlhf_algos import export_checkpoint
from rlhf_data import RunFolder
from rlhf_models import train_byte_tokenizer

ROOT = Path(__file__).parents[2]
STEPS = 10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, whose embedding and output layer are apart, and pairs to train on."""
    folder = tmp_path_factory.mktemp("inputs")
    words = ["red", "green", "blue", "of", "a"]
    rows = [
        {"prompt": f"row {i} {words[i % 5]}", "chosen": " " + words[i % 3] * (1 + i % 4), "rejected": " no"}
        for i in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: Any = train_byte_tokenizer([row["prompt"] + row["chosen"] for row in rows])
    config = LlamaConfig(
        hidden_size=36,  # odd parts of rows on four processes
        intermediate_size=54,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(tokenizer) + 3,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def train(run_processes: Callable[..., str], inputs: Path) -> Callable[..., None]:
    """Runs `rlhf-train dpo` in a run folder, on a number of processes, so that a step has 8 pairs."""

    def call(run: Path, processes: int, *options: str, steps: int = STEPS) -> None:
        command = [inputs / "start.py", "dpo", "--output-dir", run, "--max-steps", steps, *options]
        if processes == 1 and "--resume" in options:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, *command]
        run_processes(command, processes=processes)

    (inputs / "start.py").write_text("from rlhf_train.cli import main\n\nmain()\n")
    return call


def settings(inputs: Path, processes: int, **own: Any) -> list[str]:
    values = {
        "per_device_train_batch_size": 8 // processes,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "stage_samples": 0,
        **own,
    }
    given = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["--model", str(inputs / "model"), "--train-data", str(inputs / "pairs.jsonl"), *given]


@pytest.fixture(scope="module")
def alone(train: Callable[..., None], inputs: Path) -> Path:
    """The run of a single process."""
    train(inputs / "alone", 1, *settings(inputs, 1))
    return inputs / "alone"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.mark.parametrize(
    "mode",
    in_ci(["fsdp", "fsdp_offload", "zero2_offload", "zero3", "zero3_offload"], "zero3_offload"),
)
def test_four_then_two_then_one_process_train_as_one_does(
    mode: str, train: Any, inputs: Path, alone: Path, tmp_path: Path
) -> None:
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    own: dict[str, Any] = {"deepspeed": str(ROOT / "configs" / f"{mode}.json")}
    if mode.startswith("fsdp"):
        own = {"fsdp": True, "fsdp_cpu_offload": mode.endswith("offload")}
    run = tmp_path / "run"
    start = settings(inputs, 4, **own)
    if mode in ("fsdp", "zero3"):
        train(run, 4, *start, steps=4)
        train(run, 2, "--resume", steps=8)
        train(run, 1, "--resume")
    else:
        train(run, 4, *start)
    expected = RunFolder(alone).read_metrics()
    for row, other in zip(RunFolder(run).read_metrics(), expected, strict=True):
        for name in ("loss", "logps/chosen", "logps/rejected", "rewards/margins", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (row["step"], name)
    final, whole = weights(run / "final"), weights(alone / "final")
    assert final.keys() == whole.keys()
    for name, each in whole.items():
        torch.testing.assert_close(final[name], each, rtol=1e-3, atol=1e-4)
    export_checkpoint(run / f"checkpoint-{STEPS}", tmp_path / "exported")
    exported = weights(tmp_path / "exported")
    assert all(torch.equal(exported[name], each) for name, each in final.items())


@pytest.fixture(scope="module")
def packed(inputs: Path) -> list[str]:
    """Options that train adapters on 4-bit weights, of a model as wide as their blocks."""
    pytest.importorskip("bitsandbytes")
    config = LlamaConfig.from_pretrained(inputs / "model", hidden_size=64, head_dim=32, intermediate_size=192)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(inputs / "blocks")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(inputs / "blocks")
    given = ["--model", inputs / "blocks", "--set", "use_peft=true", "--set", "load_in_4bit=true"]
    return [str(part) for part in given]


@pytest.fixture(scope="module")
def packed_alone(train: Callable[..., None], inputs: Path, packed: list[str]) -> Path:
    """The run of a single process."""
    train(inputs / "packed", 1, *settings(inputs, 1), *packed)
    return inputs / "packed"


@pytest.mark.parametrize("mode", in_ci(["fsdp", "fsdp_bf16", "fsdp_offload", "zero3", "zero3_bf16"], "fsdp"))
def test_adapters_on_4_bit_weights_train_as_on_one_process(
    mode: str, train: Any, inputs: Path, packed: list[str], packed_alone: Path, tmp_path: Path
) -> None:
    """On four processes, then on two."""
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    kind, _, extra = mode.partition("_")
    own: dict[str, Any] = (
        {"deepspeed": str(ROOT / "configs/zero3.json")} if kind == "zero3" else {"fsdp": True}
    )
    own |= {"bf16": {"bf16": True}, "offload": {"fsdp_cpu_offload": True}, "": {}}[extra]
    run = tmp_path / "run"
    train(run, 4, *settings(inputs, 4, **own), *packed, steps=4)
    train(run, 2, "--resume")
    bound = 2e-3 if extra == "bf16" else 1e-5
    expected = RunFolder(packed_alone).read_metrics()
    for row, other in zip(RunFolder(run).read_metrics(), expected, strict=True):
        for name in ("loss", "logps/chosen", "rewards/margins", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=bound, abs=bound), (row["step"], name)
    final, whole = weights(run / "final"), weights(packed_alone / "final")
    assert final.keys() == whole.keys() and all("lora" in name for name in final)
    for name, each in whole.items() if extra != "bf16" else ():
        torch.testing.assert_close(final[name], each, rtol=1e-2, atol=1e-4)


@pytest.fixture(scope="module")
def wide(inputs: Path) -> Path:
    """A narrow model with a vocabulary of 152,064 rows; demonstrations, every other one of 300 tokens."""
    folder = inputs / "wide"
    tokenizer: Any = AutoTokenizer.from_pretrained(inputs / "model")
    words = [" red", " green", " blue", " of"]
    rows = [{"prompt": "say", "completion": words[i // 2] * (2 if i % 2 else 300)} for i in range(8)]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=152_064,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["zero3", "fsdp"])
def test_a_wide_vocabulary_with_unevenly_many_scored_tokens(
    mode: str, wide: Path, train: Any, inputs: Path, run_processes: Any
) -> None:
    """One process scores its tokens in three chunks, the other in one; losses are as of one process."""
    if mode == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    own: dict[str, Any] = (
        {"fsdp": True} if mode == "fsdp" else {"deepspeed": str(ROOT / "configs/zero3.json")}
    )
    rows: dict[int, list[dict[str, Any]]] = {}
    for processes in (1, 2):
        given = {"per_device_train_batch_size": 4 // processes, "shuffle": False, "stage_samples": 0}
        given |= {"learning_rate": 1e-3, "max_steps": 2} | (own if processes > 1 else {})
        options = [part for key, value in given.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        source = ["--model", wide / "model", "--train-data", wide / "rows.jsonl"]
        run = wide / f"{mode}-{processes}"
        command = [inputs / "start.py", "sft", "--output-dir", run, *source, *options]
        run_processes(command, processes=processes)
        rows[processes] = RunFolder(run).read_metrics()
    assert len(rows[1]) == len(rows[2]) == 2
    for one, other in zip(rows[1], rows[2], strict=True):
        assert one["num_tokens"] > 600 * one["step"]  # a chunk has 220 rows of logits
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), (one["step"], name)


@pytest.mark.proof
def test_each_process_takes_its_part_of_the_memory(run_processes: Any) -> None:
    """At load, the reference included, and over two steps, beside one process with all of it."""
    options = ["--parameters", "60", "--hidden", "320", "--jobs", "dpo", "--modes", "fsdp"]
    printed = run_processes([ROOT / "benchmarks/sharded_memory.py", *options], processes=1)
    report = json.loads(printed[printed.index("{") :])
    for row in report["rows"]:
        if row["mode"] == "one":
            continue
        share = -(-report["parameters"] // row["processes"])
        assert row["held"] <= share + report["largest_part"], row
        assert row["loaded_ratio"] <= {2: 0.6, 4: 0.35}[row["processes"]], row
        assert row["stepped_ratio"] <= {2: 0.6, 4: 0.4}[row["processes"]], row
