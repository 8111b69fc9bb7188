"""What the benchmarks of merging do under the Python of a side, in processes of their own; prints JSON.

`compare A B REFERENCE`: how far two merged models are apart; needs torch and safetensors, which mergekit's
side has. `copy CONFIG FOLDER MODEL…`, under ours: a merge in a process that has imported everything, and a
plain copy of the same bytes, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from merge_process import read_through


def compare(first: Path, second: Path, reference: Path) -> dict[str, Any]:
    """How far two bfloat16 models are apart.

    Returns:
        `differing`: share of the elements that differ; `over_one_ulp`: by more than the spacing of bfloat16
        at the larger one; `max_ulps`: the largest difference in such spacings; `relative`: length of the
        difference over the length of the second's difference to the reference; `max_relative`: the largest
        difference over its tensor's largest magnitude; `changed`: share of the elements that are not the
        reference's, and `mean_change`: how far elements are from it on average, each of the first and of
        the second.
    """
    import torch

    count = differing = over = 0
    squares = squared_change = max_ulps = max_relative = 0.0
    changed, change_sum = [0, 0], [0.0, 0.0]
    for a, b, origin in _tensors(first, second, reference):
        difference = (a - b).abs()
        spacing = torch.ldexp(torch.ones_like(a), torch.frexp(torch.maximum(a.abs(), b.abs())).exponent - 8)
        ulps = torch.where(difference > 0, difference / spacing, 0)
        count += a.numel()
        differing += int((difference > 0).sum())
        over += int((ulps > 1).sum())
        max_ulps = max(max_ulps, float(ulps.max()))
        max_relative = max(max_relative, float(difference.max() / b.abs().max()))
        squares += float(difference.double().square().sum())
        squared_change += float((b - origin).double().square().sum())
        for side, merged in enumerate((a, b)):
            changed[side] += int((merged != origin).sum())
            change_sum[side] += float((merged - origin).abs().double().sum())
    return {
        "differing": differing / count,
        "over_one_ulp": over / count,
        "max_ulps": max_ulps,
        "relative": (squares / squared_change) ** 0.5,
        "max_relative": max_relative,
        "changed": [number / count for number in changed],
        "mean_change": [total / count for total in change_sum],
    }


def _tensors(*folders: Path) -> Iterator[list[Any]]:
    """The tensors of several models by name, float32.

    Raises:
        ValueError: their names or types are not the same.
    """
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        models = []
        for folder in folders:
            files = [
                stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))
            ]
            models.append({name: file for file in files for name in file.keys()})  # noqa: SIM118
        if any(model.keys() != models[0].keys() for model in models):
            raise ValueError(f"the tensors of {folders} do not have the same names")
        for name in models[0]:
            found = [model[name].get_tensor(name) for model in models]
            if len({(tensor.dtype, tensor.shape) for tensor in found}) > 1:
                raise ValueError(f"tensor {name} of {folders} does not have one type and shape")
            yield [tensor.float() for tensor in found]


def merge_and_copy(config: Path, folder: Path, models: list[Path], rounds: int) -> dict[str, Any]:
    """Time a merge and a copy of as many bytes, with and without waiting for the disk, in turn.

    The copy is that of the first model's files by sendfile, and a loop that reads the other models': as many
    bytes read and written as a merge that reads every model once. A merge that comes first is not timed.

    Returns:
        Seconds of `merge` and `copy`, which force the output to the disk, as our merges always do, and of
        `merge_unsynced` and `copy_unsynced`, which do not; `bytes_read`, `bytes_written`.
    """
    from rlhf_merge import ModelMerger

    def merge() -> None:
        ModelMerger(config).merge(folder / "merged")

    def copy(sync: Callable[[int], None]) -> None:
        (folder / "merged").mkdir()
        for path in _weights(models[0]):
            _copy(path, folder / "merged" / path.name, sync)
        for model in models[1:]:
            for path in _weights(model):
                read_through(path)

    def unsynced_merge() -> None:
        kept, os.fsync = os.fsync, lambda handle: None
        try:
            merge()
        finally:
            os.fsync = kept

    jobs = {
        "merge": merge,
        "copy": lambda: copy(os.fsync),
        "merge_unsynced": unsynced_merge,
        "copy_unsynced": lambda: copy(lambda handle: None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for path in (path for model in models for path in _weights(model)):
        read_through(path)  # into the page cache
    merge()
    written = sum(path.stat().st_size for path in _weights(folder / "merged"))
    shutil.rmtree(folder / "merged")
    for _ in range(rounds):
        for name, job in jobs.items():
            os.sync()  # what an earlier job wrote must not be written during this one
            started = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(folder / "merged")
    read = sum(path.stat().st_size for model in models for path in _weights(model))
    return {"seconds": seconds, "bytes_read": read, "bytes_written": written}


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _copy(source: Path, target: Path, sync: Callable[[int], None]) -> None:
    with source.open("rb") as inside, target.open("wb") as outside:
        size, done = source.stat().st_size, 0
        while done < size:
            done += os.sendfile(outside.fileno(), inside.fileno(), done, size - done)
        sync(outside.fileno())


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare")
    for name in ("first", "second", "reference"):
        comparing.add_argument(name, type=Path)
    copying = commands.add_parser("copy")
    copying.add_argument("config", type=Path)
    copying.add_argument("folder", type=Path)
    copying.add_argument("models", type=Path, nargs="+")
    copying.add_argument("--rounds", type=int, default=3)
    options = vars(parser.parse_args(arguments))
    work: dict[str, Callable[..., Any]] = {"compare": compare, "copy": merge_and_copy}
    print(json.dumps(work[options.pop("command")](**options)))


if __name__ == "__main__":
    main()
