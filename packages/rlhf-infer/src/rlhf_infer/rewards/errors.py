"""Errors of reward functions, as a sentence that names the function and the sample at fault."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

from rlhf_data import UserError
from rlhf_infer import async_loop
from rlhf_infer.async_loop import raised
from rlhf_infer.http_client import ScorerUnavailable
from rlhf_infer.rewards.conventions import Caller, Samples
from rlhf_infer.rewards.texts import sample_name


@contextlib.contextmanager
def named_errors(name: str, call: Caller, samples: Samples) -> Iterator[None]:
    """Turn what a function raises into a sentence that names it and, where one is at fault, the sample.

    `call` calls it again, to find the sample.
    """
    try:
        yield
    except UserError as error:
        where = f"reward function {name}"
        if where in str(error):
            raise
        kind = ScorerUnavailable if isinstance(error, ScorerUnavailable) else UserError
        raise kind(f"{where}: {error}", code=error.code, **error.fields) from error
    except Exception as error:
        index = _culprit(call, samples)
        where = f"{len(samples.completions)} samples together"
        if index is not None:
            where = sample_name(index, samples.completions[index])
        raise UserError(
            f"reward function {name}, {where}: {raised(error)}", code="reward_failed", index=index
        ) from error


def _culprit(call: Caller, samples: Samples) -> int | None:
    """Index of a sample that by itself makes a function raise, by halving; None if only several do."""

    def fails(indices: range) -> bool:
        try:
            result = call(samples.part(indices))
            if inspect.isawaitable(result):
                async_loop.submit(result).result()
        except Exception:  # whether it raises is the question; the first error is the one that is reported
            return True
        return False

    indices = range(len(samples.completions))
    if len(indices) == 1:
        return 0
    while len(indices) > 1:
        middle = len(indices) // 2
        failing = next((half for half in (indices[:middle], indices[middle:]) if fails(half)), None)
        if failing is None:
            return None
        indices = failing
    return indices[0] if indices else None
