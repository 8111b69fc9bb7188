"""Models for the benchmarks of merging: a random bfloat16 Llama `base`, and its fine-tunes `ft0`, `ft1`, ….

Needs torch. The benchmarks start it as a process of its own, so that theirs stays small.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 512},
    "220M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32000},
    "218M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 17, "vocab_size": 512},
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17, "vocab_size": 32000},
    "2B": {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 23, "vocab_size": 32000},
}
"""Llama shapes by their number of parameters; no grouped queries, embedding and head not tied.

That of 218M has no matrix that is much larger than the others."""

BASE_SCALE, CHANGE_SCALE = 0.02, 0.002
"""Standard deviation of the base's elements and of a fine-tune's difference to it."""


def tensor_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, by name."""
    sizes = SHAPES[shape]
    hidden, wide, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {f"self_attn.{kind}_proj": (hidden, hidden) for kind in "qkvo"}
        own |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
        own |= {"mlp.down_proj": (hidden, wide)}
        own |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        found |= {f"model.layers.{layer}.{name}.weight": size for name, size in own.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def parameter_count(shape: str) -> int:
    """Number of elements of a model."""
    return sum(math.prod(size) for size in tensor_shapes(shape).values())


def make(folder: Path, shape: str, fine_tunes: int) -> None:
    """Write a base and its fine-tunes, one tensor at a time: memory for two tensors is enough."""
    import torch

    shapes = tensor_shapes(shape)
    names = ["base", *(f"ft{i}" for i in range(fine_tunes))]
    files = []
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(_config(shape), indent=2))
        files.append(open(folder / name / "model.safetensors", "wb"))  # noqa: SIM115 - closed below
        files[-1].write(_header(shapes))
    generator = torch.Generator().manual_seed(0)
    for name, size in shapes.items():
        base = BASE_SCALE * torch.randn(size, generator=generator) + (1.0 if "norm" in name else 0.0)
        for index, file in enumerate(files):
            change = CHANGE_SCALE * torch.randn(size, generator=generator) if index else 0.0
            file.write((base + change).bfloat16().view(torch.uint8).numpy())
    for file in files:
        file.close()


def _config(shape: str) -> dict[str, Any]:
    heads = SHAPES[shape]["hidden_size"] // 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SHAPES[shape],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, size in shapes.items():
        end = begin + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to; a folder is made for each model")
    parser.add_argument("--shape", choices=SHAPES, default="220M")
    parser.add_argument("--fine-tunes", type=int, default=3, help="how many (default %(default)s)")
    options = parser.parse_args(arguments)
    make(options.folder, options.shape, options.fine_tunes)


if __name__ == "__main__":
    main()
