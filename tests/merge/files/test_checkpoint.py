"""Models on disk: which files are read, how, and what is refused."""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raises import raises_error
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.tensors import Readable

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def whole(tensor: Readable, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.empty(math.prod(tensor.shape), dtype=dtype or tensor.dtype)
    tensor.read(0, len(out), out)
    return out.view(tensor.shape)


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def write_shards(folder: Path, shards: list[dict[str, torch.Tensor]], kind: str = "safetensors") -> Path:
    stem, last = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.{last}"
        write(folder, tensors, name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / f"{stem}.{last}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(spec: Path | str) -> str:
    with pytest.raises(MergeError) as caught:
        open_checkpoint(str(spec))
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"])
def test_every_type_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    tensors = {str(dtype): numbers(dtype, 3, 5) for dtype in DTYPES} | {"scalar": torch.tensor(2.5)}
    tensors["none"] = torch.zeros(0, 4)
    with open_checkpoint(str(write(tmp_path / "m", tensors, name))) as model:
        assert set(model.tensors) == set(tensors)
        for key, value in tensors.items():
            tensor = model.tensors[key]
            assert (tensor.shape, tensor.dtype, tensor.row_length) == (tuple(value.shape), value.dtype, 1)
            assert torch.equal(whole(tensor), value)
            if value.is_floating_point():
                assert torch.equal(whole(tensor, torch.float64), value.double())


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_pieces_from_several_threads(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    value = torch.randn(301, 77).bfloat16()
    with open_checkpoint(str(write(tmp_path, {"w": value, "v": value + 1}, name))) as model:
        out = torch.empty(301 * 77)
        jobs = [(start, min(start + 101, len(out))) for start in range(0, len(out), 101)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda job: model.tensors["w"].read(job[0], job[1], out[slice(*job)]), jobs))
    assert torch.equal(out.view(301, 77), value.float())


def test_tensors_that_begin_between_two_numbers(tmp_path: Path) -> None:
    """The library sorts by size of type; others need not: three bytes, then float32 at byte 3."""
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with open_checkpoint(str(tmp_path)) as model:
        assert whole(model.tensors["a"]).tolist() == [1, 2, 3]
        assert whole(model.tensors["b"]).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_one_model(tmp_path: Path, kind: str) -> None:
    shards = [{"b": numbers(torch.float32, 4), "d": numbers(torch.float16, 2)}, {"a": torch.ones(3)}]
    with open_checkpoint(str(write_shards(tmp_path, shards, kind))) as model:
        assert list(model.tensors) == ["b", "d", "a"]
        assert torch.equal(whole(model.tensors["b"]), shards[0]["b"])
        files = [name for name, *_ in model.identity]
    assert len(files) == 3
    assert files[0].endswith(".index.json") and all(name.startswith("0/") for name in files)


def test_of_two_copies_the_one_the_index_names_is_read(tmp_path: Path) -> None:
    """The map has the last of both shards for b; then the first."""
    write_shards(
        tmp_path, [{"b": torch.ones(2), "a": torch.ones(1)}, {"b": torch.zeros(2), "c": torch.ones(1)}]
    )
    index = tmp_path / "model.safetensors.index.json"
    for name, expected in (("model-00002-of-00002", 0.0), ("model-00001-of-00002", 1.0)):
        weight_map = json.loads(index.read_text())["weight_map"] | {"b": f"{name}.safetensors"}
        index.write_text(json.dumps({"weight_map": weight_map}))
        with open_checkpoint(str(tmp_path)) as model:
            assert whole(model.tensors["b"]).tolist() == [expected] * 2


def test_identity_is_that_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    status = (tmp_path / "model.safetensors").stat()
    with open_checkpoint(str(tmp_path)) as model:
        times = status.st_mtime_ns, status.st_ctime_ns
        assert model.identity == [("0/model.safetensors", status.st_size, *times, status.st_ino)]


def test_safetensors_go_before_bin(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    write(tmp_path, {"a": torch.zeros(2)}, "pytorch_model.bin")
    with open_checkpoint(str(tmp_path)) as model:
        assert whole(model.tensors["a"]).tolist() == [1.0, 1.0]
        assert model.config == {}
        assert (model.folder, model.tokenizer_folder, model.adapter_folders) == (tmp_path, tmp_path, ())


def test_views_of_one_storage_in_a_bin(tmp_path: Path) -> None:
    """A transpose, a column, an expanded row and two names of one tensor, in pieces that end anywhere."""
    value = numbers(torch.float32, 6, 7)
    views = {"t": value.t(), "column": value[:, 2], "row": value[1].expand(5, 7), "one": value, "two": value}
    write(tmp_path, {**views, "inner": numbers(torch.int64, 2, 3, 4).transpose(1, 2)}, "pytorch_model.bin")
    with open_checkpoint(str(tmp_path)) as model:
        for name, tensor in model.tensors.items():
            expected = views.get(name, numbers(torch.int64, 2, 3, 4).transpose(1, 2)).reshape(-1)
            out = torch.empty_like(expected)
            for start in range(0, len(out), 5):
                tensor.read(start, min(start + 5, len(out)), out[start : start + 5])
            assert torch.equal(out, expected), name


def test_a_bin_of_an_old_torch_or_wrapped_in_a_state_dict(tmp_path: Path) -> None:
    value = numbers(torch.float16, 3, 3)
    path = tmp_path / "pytorch_model.bin"
    for content, is_zip in (({"a": value}, False), ({"state_dict": {"a": value}, "epoch": 3}, True)):
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        with open_checkpoint(str(tmp_path)) as model:
            assert torch.equal(whole(model.tensors["a"]), value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, name: str) -> None:
    """A file mapped to memory would end the process with SIGBUS."""
    path = write(tmp_path, {"a": torch.ones(2**16)}, name) / name
    out = torch.empty(2**15)
    with open_checkpoint(str(tmp_path)) as model:
        model.tensors["a"].read(0, 2**15, out)
        os.truncate(path, 2**17)
        for dtype in (torch.float32, torch.float64):
            with raises_error("truncated_file"):
                model.tensors["a"].read(2**15, 2**16, out.to(dtype))
    assert str(path) not in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else True


def test_a_file_larger_than_the_memory_can_be_opened(tmp_path: Path) -> None:
    """Of 2 TiB, of which the disk holds the header alone."""
    count = 1 << 40
    header = {"a": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * count)
    with open_checkpoint(str(tmp_path)) as model:
        out = torch.ones(3)
        model.tensors["a"].read(count - 3, count, out)
    assert out.tolist() == [0, 0, 0]


HEADERS: list[tuple[Any, str]] = [
    ([1, 2], "is not a whole safetensors file"),
    ({"a": {"dtype": "F32"}}, "missing field `shape`"),
    ({"a": {"dtype": "C64", "shape": [], "data_offsets": [0, 8]}}, "is not a whole safetensors file"),
    ({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, "tensor 'a' is of type F4"),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "is not a whole safetensors file"),
    ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "invalid value: integer `-1`"),
    ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "invalid offset for tensor `a`"),
    ({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, "file not fully covered"),
    ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, "file not fully covered"),
    ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "floating point"),
    ({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, "string"),
    ({"a": {"dtype": "U8", "shape": [math.inf], "data_offsets": [0, 4]}}, "is not a whole safetensors file"),
    ({"__metadata__": "x"}, 'string "x", expected a map'),
    ('{"a":%s}', "header names a tensor twice"),
    ("[" * 100_000, "is not a whole safetensors file"),
]


@pytest.mark.parametrize(("header", "said"), HEADERS, ids=range(len(HEADERS)))
def test_damaged_safetensors(tmp_path: Path, header: Any, said: str) -> None:
    """Each with four bytes of tensors."""
    twice = (
        '{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    )
    text = header.replace("%s", twice).encode() if isinstance(header, str) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    message = refusal(tmp_path)
    assert message.startswith(str(path)) and said in message


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (b"", b"version https://git-lfs", (3).to_bytes(8, "little") + b"{a}"):
        path.write_bytes(content)
        assert refusal(tmp_path).startswith(f"{path} is not a whole safetensors file")


class Other:
    """Something that is no tensor."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": Other()}, "its pickle asks for more than tensors"),
        ([torch.ones(1)], "holds a list, expected"),
        ({"a": torch.ones(1), "step": 3}, "entry 'step' is a int, expected"),
        ({"a": torch.ones(2).to_sparse()}, "tensor 'a' is of type sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "tensor 'a' is of type complex64"),
    ],
)
def test_bins_that_hold_something_else(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    message = refusal(tmp_path)
    assert message.startswith(str(path)) and said in message


def test_a_damaged_bin(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": torch.ones(1000)}, "pytorch_model.bin") / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:900])
    assert refusal(tmp_path).startswith(f"{path} cannot be read as a file of torch.save")
    path.write_bytes(b"nothing")
    assert refusal(tmp_path).startswith(f"{path} is damaged or its pickle asks for more than tensors")


def test_damaged_indices(tmp_path: Path) -> None:
    write(tmp_path / "m", {}, "config.json").joinpath("config.json").write_text("{}")
    shards = [{"a": torch.ones(2), "c": torch.ones(2)}, {"b": torch.ones(3)}]
    index = write_shards(tmp_path / "m", shards) / "model.safetensors.index.json"
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, said in (
        ({}, f"{index} has no `weight_map`"),
        (good | {"b": "../other.safetensors"}, "tensor 'b' is said to be in '../other.safetensors'"),
        (good | {"b": "model-3.safetensors"}, "model-3.safetensors is missing"),
        (good | {"b": ""}, "tensor 'b' is said to be in ''"),
        (good | {"b": "x" * 300 + ".safetensors"}, "cannot be read (File name too long)"),
        (good | {"b": "config.json"}, "is not a file of weights"),
        (good | {"d": second}, f"{second} lacks tensor 'd', which {index.name} has there"),
        ({"b": second, "a": first}, f"{first} holds tensor 'c', and {index.name} does not"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert said in refusal(tmp_path / "m")
    index.write_text("{")
    assert f"{index} is damaged" in refusal(tmp_path / "m")


def test_folders_in_which_the_weights_are_not_found(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert (
        "holds no weights: none of model.safetensors.index.json, model.safetensors, pytorch_model.bin"
        in message
    )
    (tmp_path / "model.Q4.gguf").touch()
    assert "model.Q4.gguf is of a kind that is not read" in refusal(tmp_path)
    write(tmp_path, {"a": torch.ones(1)}, "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors without model.safetensors.index.json" in refusal(tmp_path)
    write(tmp_path, {"a": torch.ones(1)}, "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors without model.safetensors.index.json" in refusal(tmp_path)
    write_shards(tmp_path, [{"a": torch.ones(1)}])
    write(tmp_path, {"a": torch.ones(1)})
    assert "holds both model.safetensors.index.json and model.safetensors" in refusal(tmp_path)


def test_quantised_models(tmp_path: Path) -> None:
    write(tmp_path, {"h.0.fc.qweight": numbers(torch.int32, 2)})
    assert "is quantised (it holds 'h.0.fc.qweight')" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert "is quantised (quantization_config of config.json, method gptq)" in refusal(tmp_path)


def test_closing_lets_go_of_the_tensors(tmp_path: Path) -> None:
    with open_checkpoint(str(write(tmp_path, {"a": torch.ones(2)}))) as model:
        assert list(model.tensors) == ["a"]
    assert list(model.tensors) == []
