"""Files of weights: every type and format, pieces, and what is damaged or something else."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raises import raises_error
from rlhf_merge import ModelMerger
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.files.folder import read_json
from rlhf_merge.files.weights import DTYPES, FLOAT8, OpenFile, read_weights
from rlhf_merge.methods.blocks import Readable

NAMES = ["model.safetensors", "pytorch_model.bin"]
both = pytest.mark.parametrize("name", NAMES)


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def whole(tensor: Readable, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(math.prod(tensor.shape), dtype=dtype or tensor.dtype)
    tensor.read(0, len(out), out)
    return out.view(tensor.shape)


def write(path: Path, tensors: dict[str, Tensor]) -> dict[str, Readable]:
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return read_weights(path)[1]


def write_header(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@both
def test_every_type_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    tensors = {str(dtype): numbers(dtype, 3, 5) for dtype in DTYPES.values() if dtype not in FLOAT8}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    found = write(tmp_path / name, tensors)
    assert set(found) == set(tensors)
    for key, value in tensors.items():
        tensor = found[key]
        assert (tensor.shape, tensor.dtype, tensor.row_length) == (tuple(value.shape), value.dtype, 1)
        assert torch.equal(whole(tensor), value)
        if value.is_floating_point():
            assert torch.equal(whole(tensor, torch.float64), value.double())


@both
def test_pieces_from_several_threads(tmp_path: Path, name: str) -> None:
    value = torch.randn(301, 77, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor = write(tmp_path / name, {"w": value, "v": value + 1})["w"]
    out = torch.empty(301 * 77)
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, len(out), 101)
        list(pool.map(lambda i: tensor.read(i, min(i + 101, len(out)), out[i : i + 101]), starts))
    assert torch.equal(out.view(301, 77), value.float())


def test_tensors_that_begin_between_two_numbers(tmp_path: Path) -> None:
    """The library sorts by size of type; others need not: three bytes, then float32 at byte 3."""
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    data = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    write_header(tmp_path / NAMES[0], json.dumps(header).encode(), data)
    _, found = read_weights(tmp_path / NAMES[0])
    assert (whole(found["a"]).tolist(), whole(found["b"]).tolist()) == ([1, 2, 3], [1.5, -2.0])


def test_views_of_one_storage_in_a_bin(tmp_path: Path) -> None:
    """A transpose, a column, an expanded row and two names of one tensor, in pieces that end anywhere."""
    value = numbers(torch.float32, 6, 7)
    views = {"t": value.t(), "column": value[:, 2], "row": value[1].expand(5, 7), "one": value, "two": value}
    views |= {"inner": numbers(torch.int64, 2, 3, 4).transpose(1, 2)}
    for name, tensor in write(tmp_path / NAMES[1], views).items():
        expected = views[name].reshape(-1)
        out = torch.empty_like(expected)
        for start in range(0, len(out), 5):
            tensor.read(start, min(start + 5, len(out)), out[start : start + 5])
        assert torch.equal(out, expected), name


def test_a_bin_of_an_old_torch_or_wrapped_in_a_state_dict(tmp_path: Path) -> None:
    value, path = numbers(torch.float16, 3, 3), tmp_path / NAMES[1]
    for content, is_zip in (({"a": value}, False), ({"state_dict": {"a": value}, "epoch": 3}, True)):
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        assert torch.equal(whole(read_weights(path)[1]["a"]), value)


@both
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, name: str) -> None:
    """A file mapped to memory would end the process with SIGBUS."""
    path, out = tmp_path / name, torch.empty(2**15)
    tensor = write(path, {"a": torch.ones(2**16)})["a"]
    tensor.read(0, 2**15, out)
    os.truncate(path, 2**17)
    for dtype in (torch.float32, torch.float64):
        with raises_error("truncated_file", path=str(path)):
            tensor.read(2**15, 2**16, out.to(dtype))
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(path) not in maps.read_text()


def test_a_file_larger_than_the_memory_can_be_opened(tmp_path: Path) -> None:
    """Of 2 TiB, of which the disk holds the header alone."""
    count, path = 1 << 40, tmp_path / NAMES[0]
    header = {"a": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}
    write_header(path, json.dumps(header).encode(), b"")
    os.truncate(path, path.stat().st_size + 2 * count)
    out = torch.ones(3)
    read_weights(path)[1]["a"].read(count - 3, count, out)
    assert out.tolist() == [0, 0, 0]


def entry(dtype: str = "F32", shape: Any = (1,), begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


ONE = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "header",
    [
        [1, 2],
        {"a": {"dtype": "F32"}},
        entry("C64", [], 0, 8),
        entry(shape=[2]),
        entry(shape=[-1], begin=4, end=0),
        entry("U8", [2], 2, 4),
        entry("U8", [9], 0, 9),
        entry("U8", [2], 0, 2),
        entry(shape=[1.0]),
        entry(shape=["1"]),
        entry("U8", [math.inf]),
        {"__metadata__": "x"},
        f'{{"a":{ONE},"a":{ONE}}}',  # a name twice
        "[" * 100_000,
        "{a}",
    ],
    ids=lambda header: str(header)[:40],
)
def test_damaged_safetensors(tmp_path: Path, header: Any) -> None:
    """Each with four bytes of tensors."""
    path, text = tmp_path / NAMES[0], header if isinstance(header, str) else json.dumps(header)
    write_header(path, text.encode(), bytes(4))
    with raises_error("damaged_file", path=str(path)):
        read_weights(path)


def test_types_that_are_not_read(tmp_path: Path) -> None:
    write_header(tmp_path / NAMES[0], json.dumps(entry("F4", [8])).encode(), bytes(4))
    with raises_error("quantized_model", tensor="a"):
        read_weights(tmp_path / NAMES[0])


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([torch.ones(1)], "invalid_value"),
        ({"a": torch.ones(1), "step": 3}, "invalid_value"),
        ({"a": torch.ones(2).to_sparse()}, "quantized_model"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "quantized_model"),
    ],
)
def test_bins_that_hold_something_else(tmp_path: Path, content: Any, code: str) -> None:
    torch.save(content, tmp_path / NAMES[1])
    with raises_error(code):
        read_weights(tmp_path / NAMES[1])


class Malicious:
    """Something that makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_is_not_run(tmp_path: Path, is_zip: bool) -> None:
    content = {"a": torch.ones(1), "b": Malicious(tmp_path / "trace")}
    torch.save(content, tmp_path / NAMES[1], _use_new_zipfile_serialization=is_zip)
    with raises_error("damaged_file"):
        read_weights(tmp_path / NAMES[1])
    assert not (tmp_path / "trace").exists()


@both
def test_files_that_are_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, {"a": torch.ones(1000)})
    for content in (path.read_bytes()[:900], b"version https://git-lfs", b""):
        path.write_bytes(content)
        with raises_error("damaged_file", path=str(path)):
            read_weights(path)


@pytest.mark.parametrize("read", [OpenFile, read_json])
def test_a_fifo_or_a_socket_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name in ("fifo", "socket"):
        with raises_error("not_a_regular_file"):
            read(tmp_path / name)


def scaled(workshop: Any, name: str, seed: int, **changes: Any) -> tuple[str, Tensor]:
    """A model with a matrix (10, 8) in blocks of (4, 3), and what it means: each number times its block's."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(10, 8, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, generator=generator) + 0.5
    meant = stored.float()
    for row in range(10):
        for column in range(8):
            meant[row, column] *= scale[row // 4, column // 3]
    tensors = {"layers.0.w": stored, "layers.0.w_scale_inv": scale, "norm": torch.ones(2).bfloat16()}
    tensors |= {name: value for name, value in changes.items() if name in tensors}
    quantisation = {"quant_method": "fp8", "weight_block_size": [4, 3]} | changes.get("config", {})
    config = {"model_type": "deepseek_v3", "quantization_config": quantisation}
    kept = {name: value for name, value in tensors.items() if value is not None}
    return workshop.save(name, kept, whole_config=config), meant


def test_block_scaled_weights_are_multiplied_by_their_scales(workshop: Any) -> None:
    spec, meant = scaled(workshop, "a", 0)
    with open_checkpoint(spec) as model:
        assert set(model.tensors) == {"layers.0.w", "norm"}
        tensor = model.tensors["layers.0.w"]
        assert (tensor.shape, tensor.dtype, tensor.row_length) == ((10, 8), torch.bfloat16, 8)
        for rows in (1, 3, 10):  # pieces that end inside of blocks
            out = torch.empty(80)
            for first in range(0, 10, rows):
                last = min(first + rows, 10)
                tensor.read(8 * first, 8 * last, out[8 * first : 8 * last])
            assert torch.equal(out.view(10, 8), meant)
        assert torch.equal(whole(tensor), meant.bfloat16())


def test_models_of_8_bits_are_merged_to_bfloat16(workshop: Any) -> None:
    (a, first), (b, second) = scaled(workshop, "a", 0), scaled(workshop, "b", 1)
    ModelMerger({"method": "linear", "models": [a, b]}).merge(workshop.root / "out")
    assert torch.equal(workshop.load(workshop.root / "out")["layers.0.w"], ((first + second) / 2).bfloat16())
    config = read_json(workshop.root / "out" / "config.json")
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", FLOAT8)
def test_unscaled_numbers_are_read_as_they_are(workshop: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, -1.75, 240.0, 2**-9])
    specs = [workshop.save(name, {"w": (values * factor).to(dtype)}) for name, factor in (("a", 1), ("b", 0))]
    ModelMerger({"method": "linear", "models": specs}).merge(workshop.root / "out")
    merged = load_file(workshop.root / "out" / "model.safetensors")["w"]
    assert torch.equal(merged, (values.to(dtype).float() / 2).bfloat16())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layers.0.w_scale_inv": torch.ones(2, 3)}, "quantized_model"),
        ({"layers.0.w": torch.ones(10, 8)}, "quantized_model"),
        ({"layers.0.w_scale_inv": None}, "quantized_model"),
        ({"config": {"weight_block_size": "x"}}, "damaged_file"),
        ({"config": {"quant_method": "fbgemm_fp8"}}, "quantized_model"),
    ],
)
def test_other_scales_are_refused(workshop: Any, changes: dict[str, Any], code: str) -> None:
    with raises_error(code):
        open_checkpoint(scaled(workshop, "a", 0, **changes)[0])
