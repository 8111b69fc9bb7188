"""Tiny models on disk, made without transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, INNER, ROWS = 8, 12, 16


class Workshop:
    """Makes tiny Llama-shaped models in a folder, and reads what merges of them hold.

    Args:
        root: where the models go.
    """

    def __init__(self, root: Path):
        self.root = root

    def config(self, **changes: Any) -> dict[str, Any]:
        """A config.json that transformers loads."""
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "vocab_size": ROWS,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        return values | changes

    def tensors(
        self, seed: int = 0, *, layers: int = 3, dtype: torch.dtype = torch.float32, tied: bool = False
    ) -> dict[str, Tensor]:
        """All tensors of a model, normally distributed."""
        shapes = {"model.embed_tokens.weight": (ROWS, HIDDEN)}
        for layer in range(layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _LAYER.items()}
        shapes |= {"model.norm.weight": (HIDDEN,)} | ({} if tied else {"lm_head.weight": (ROWS, HIDDEN)})
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    def tuned(self, base: Mapping[str, Tensor], seed: int, scale: float = 0.1) -> dict[str, Tensor]:
        """A fine-tune: the base and normally distributed changes."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor + scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in base.items()
        }

    def save(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        shards: int = 1,
        whole_config: dict[str, Any] | None = None,
        **config: Any,
    ) -> str:
        """Save a model in a folder of the root; its path, as a user gives it."""
        folder = self.root / name
        folder.mkdir(parents=True)
        written = self.config(**config) if whole_config is None else whole_config
        (folder / "config.json").write_text(json.dumps(written))
        names = list(tensors)
        size = math.ceil(len(names) / shards)
        parts = [{key: tensors[key] for key in names[i : i + size]} for i in range(0, len(names), size)]
        files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        if len(parts) == 1:
            files = ["model.safetensors"]
        else:
            weight_map = {key: file for file, part in zip(files, parts, strict=True) for key in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file, part in zip(files, parts, strict=True):
            save_file(part, folder / file, {"format": "pt"})
        return str(folder)

    def adapter(self, name: str, tensors: Mapping[str, Tensor], **settings: Any) -> str:
        """Save a LoRA in a folder of the root, by the names that follow `base_model.model.`; its path."""
        folder = self.root / name
        folder.mkdir(parents=True)
        save_file(
            {f"base_model.model.{key}": tensor for key, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2} | settings
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return str(folder)

    def trio(self, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[str, str, str]:
        """A base and two fine-tunes of it on disk: base, a, b."""
        base = self.tensors(dtype=dtype)
        first, second = self.tuned(base, 1), self.tuned(base, 2)
        paths = self.save("base", base, **config), self.save("a", first, **config)
        return *paths, self.save("b", second, **config)

    def load(self, folder: str | Path) -> dict[str, Tensor]:
        """The tensors of all safetensors files of a folder."""
        files = sorted(Path(folder).glob("*.safetensors"))
        assert files, f"{folder} holds no model"
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def files(self, folder: str | Path) -> dict[str, bytes]:
        """The contents of all files of a folder."""
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


_LAYER = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


@pytest.fixture(scope="session")
def new_workshop() -> type[Workshop]:
    """Makes workshops in other folders."""
    return Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """Makes tiny models in the test's folder."""
    return Workshop(tmp_path)
