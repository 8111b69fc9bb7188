"""Writing models in Hugging Face format, a layer at a time where they are sharded."""

from __future__ import annotations

import contextlib
import contextvars
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_data import UserError, atomic_write_json
from rlhf_models.loading.replacing import replacing_weights
from rlhf_models.loading.shards import is_sharded, whole_value
from rlhf_models.loading.sources import INDEX_FILE

OUTLINE = "outline.json"
"""Stands for the weights of a model in a folder that has everything else."""
_OUTLINED = contextvars.ContextVar[nn.Module | None]("outlined", default=None)
FILE_BYTES = 2 << 30
"""Size at which a new file is begun."""
_LAYER = re.compile(r"^.*?\.\d+\.")


def save_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Write config and weights of a model into a folder, as its `save_pretrained` does.

    A sharded one has to be within `rlhf_models.loading.shards.gathering`; it is never held whole. Other
    weights that lie in the folder are replaced.
    """
    with replacing_weights(folder) as place:
        _save_weights(model, place)


def _save_weights(model: PreTrainedModel, folder: Path) -> None:
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        model.save_pretrained(folder)
        return
    kinds = [kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)]
    model.config.architectures = [kinds[0].__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if (outlined := _OUTLINED.get()) is not None:
        prefix = next(f"{name}." for name, module in outlined.named_modules() if module is model)
        atomic_write_json(folder / OUTLINE, {"prefix": prefix})
        return
    kept = model.state_dict(keep_vars=True)  # without buffers that are computed
    named = ((n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept)
    _write_weights(as_stored(model, ((name, whole_value(tensor)) for name, tensor in named)), folder)


@contextlib.contextmanager
def outlines(module: nn.Module) -> Iterator[None]:
    """Within this context `save_weights` leaves out a sharded model's weights, for `complete` to add them.

    Args:
        module: what holds the models; `complete` needs their weights by their names in it.
    """
    token = _OUTLINED.set(module)
    try:
        yield
    finally:
        _OUTLINED.reset(token)


def complete(folder: str | Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Write the weights of the models that `outlines` left out below a folder, a layer at a time.

    The weights have their names in the module that held the models, one model after another.

    Raises:
        UserError: the folder has an outline that the weights do not fill.
    """
    outlined: dict[str, Path] = {}
    for path in sorted(Path(folder).rglob(OUTLINE)):
        outlined[json.loads(path.read_text(encoding="utf-8"))["prefix"]] = path.parent

    def model_of(each: tuple[str, Tensor]) -> str:
        return max((prefix for prefix in outlined if each[0].startswith(prefix)), key=len, default="")

    done: set[str] = set()
    for prefix, members in groupby(named, key=model_of):
        if place := outlined.get(prefix):
            done.add(prefix)
            model = _on_meta(place)
            tied = model.all_tied_weights_keys  # the files hold what they are tied to
            own = ((name.removeprefix(prefix), tensor) for name, tensor in members)
            _write_weights(as_stored(model, ((name, t) for name, t in own if name not in tied)), place)
            (place / OUTLINE).unlink()
    if missing := outlined.keys() - done:
        raise UserError(
            f"{folder} lacks the weights of {', '.join(sorted(missing))}; name another checkpoint",
            code="missing_weights",
        )


def _on_meta(folder: Path) -> PreTrainedModel:
    """The model that a folder's config describes, without weights."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert config.architectures, "an outline lies beside the config of a whole model"
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def as_stored(model: PreTrainedModel, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names and in the form that checkpoint files have, a layer at a time.

    Args:
        model: whose weights they are; only its type and config matter.
        named: all of them, by their names in the model.
    """

    def layer(each: tuple[str, Tensor]) -> str:
        found = _LAYER.match(each[0])
        return found.group() if found else each[0]

    for _, members in groupby(named, key=layer):
        yield from revert_weight_conversion(model, dict(members)).items()


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors beside a config, which gets the type that they have: DeepSpeed's fp32 of a bf16 model."""
    types: list[torch.dtype] = []

    def seen() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            types.append(tensor.dtype)
            yield name, tensor

    write_files(seen(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["dtype"] != (dtype := str(types[0]).removeprefix("torch.")):
        atomic_write_json(folder / "config.json", config | {"dtype": dtype})


def write_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors as `model.safetensors`, or as several files with an index where there are many.

    Other weights that lie in the folder are replaced.
    """
    with replacing_weights(folder) as place:
        _write_files(tensors, place)


def _write_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        files.append(list(held))
        save_file(held, folder / f"model-{len(files):05d}.safetensors", metadata={"format": "pt"})
        held.clear()

    for name, tensor in tensors:
        if size and size + tensor.nbytes > FILE_BYTES:
            close()
            size = 0
        held[name] = _own(tensor.cpu())
        size, total = size + tensor.nbytes, total + tensor.nbytes
    close()
    if len(files) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / final)
        places |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _own(tensor: Tensor) -> Tensor:
    """The tensor, with memory of its own where it is a part of another one."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()
