"""Merging with mergekit and with rlhf_merge, from the same files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VERSION = "0.1.5"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Merged:
    """What both made of a config: tensors by name, and the number of layers in config.json."""

    ours: Tensors
    theirs: Tensors
    our_layers: int
    their_layers: int


@dataclass(frozen=True)
class Family:
    """A base and its fine-tunes, on disk by dtype and in memory (float32)."""

    folders: dict[str, Path]
    tensors: dict[str, Tensors]

    def rounded(self, name: str) -> Tensors:
        return {key: value.bfloat16() for key, value in self.tensors[name].items()}


@pytest.fixture(scope="session")
def mergekit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, Path], None]]:
    """mergekit itself: merges as a config file says, into a folder. One process serves all tests."""
    python = os.environ.get("MERGEKIT_PYTHON")
    if not python:
        pytest.skip(f"MERGEKIT_PYTHON does not name the Python of a venv with mergekit {VERSION}")
    log = tmp_path_factory.mktemp("mergekit") / "log.txt"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [python, str(Path(__file__).with_name("mergekit_worker.py"))]
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, **pipes) as process:
        assert process.stdin and process.stdout
        requests, answers = process.stdin, process.stdout

        def answer() -> Any:
            line = answers.readline()
            if not line:
                pytest.fail(f"mergekit's process ended: {log.read_text()[-2000:]}")
            return json.loads(line)

        def merge(config: Path, out: Path) -> None:
            requests.write(json.dumps([str(config), str(out)]) + "\n")
            requests.flush()
            error = answer()
            if error is not None:
                pytest.fail(f"mergekit: {error}")

        found = answer()
        if found != VERSION:
            pytest.fail(f"MERGEKIT_PYTHON has mergekit {found}, and the tests are about {VERSION}")
        yield merge
        requests.close()


@pytest.fixture
def merge_both(mergekit: Callable[[Path, Path], None], tmp_path: Path) -> Callable[..., Merged]:
    """Merge a config of mergekit's schema, plain values, on both sides; `@name` is a model in the folder."""
    from rlhf_merge import ModelMerger

    def merge(config: dict[str, Any], folder: Path) -> Merged:
        work = tmp_path / str(len(list(tmp_path.iterdir())))
        work.mkdir()
        file, ours, theirs = work / "config.yml", work / "ours", work / "theirs"
        file.write_text(json.dumps(config).replace('"@', f'"{folder}/'))  # JSON is YAML too
        ModelMerger(file).merge(ours)
        mergekit(file, theirs)
        return Merged(read_tensors(ours), read_tensors(theirs), _layers(ours), _layers(theirs))

    return merge


@pytest.fixture(scope="session")
def write_llama() -> Callable[[Path, Tensors], None]:
    """Write tensors of a Llama as a model folder; nothing in it but tensors and config is needed."""
    from safetensors.torch import save_file

    def write(folder: Path, tensors: Tensors) -> None:
        layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
        vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": len(tensors["model.layers.0.mlp.up_proj.weight"]),
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        }
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


@pytest.fixture(scope="session")
def draw_llama() -> Callable[..., Tensors]:
    """Random float32 tensors with the names of a Llama: norms around `level`, all with deviation `scale`."""

    def draw(seed: int, scale: float, *, layers: int, hidden: int, vocab: int, level: float = 0.0) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        wide = 2 * hidden
        shapes = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(layers):
            own = {f"self_attn.{kind}_proj": (hidden, hidden) for kind in "qkvo"}
            own |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
            own |= {"mlp.down_proj": (hidden, wide)}
            own |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
        return {
            name: (level if len(shape) == 1 else 0.0) + scale * torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }

    return draw


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory, draw_llama: Any, write_llama: Any) -> Family:
    """Twelve layers; a, b and c are off the base by half its size, at 60° to each other; `near` by 1/50."""
    shape = {"layers": 12, "hidden": 64, "vocab": 512}
    base = draw_llama(0, 0.02, **shape, level=1.0)
    common, slight = draw_llama(1, 0.007, **shape), draw_llama(2, 0.0004, **shape)
    models = {"base": base, "near": {key: value + slight[key] for key, value in base.items()}}
    for seed, name in enumerate("abc", 3):
        own = draw_llama(seed, 0.007, **shape)
        models[name] = {key: value + common[key] + own[key] for key, value in base.items()}
    folder = tmp_path_factory.mktemp("models")
    folders = {"float32": folder / "float32", "bfloat16": folder / "bfloat16"}
    family = Family(folders, models)
    for name, tensors in models.items():
        write_llama(folders["float32"] / name, tensors)
        write_llama(folders["bfloat16"] / name, family.rounded(name))
    return family


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a model folder."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _layers(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]
