"""Random masks that depend on the seed, the tensor's name and the model's place alone."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

LEVELS = 1 << 16
"""Probabilities are multiples of 1/65536: what is kept is divided by the exact probability to keep it."""


class MaskBits:
    """A stream of random 16-bit numbers, the same on every device and however it is cut.

    Args:
        seed: of the merge.
        name: of the tensor.
        model: index of the model.
    """

    def __init__(self, seed: int, name: str, model: int):
        digest = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint32)
        self._bits = np.random.SFC64(np.random.SeedSequence([seed, model, *(int(word) for word in digest)]))
        self._left = np.empty(0, dtype=np.int16)

    def take(self, out: Tensor) -> Tensor:
        """Fill `out` with the next numbers, as floating-point whole numbers in [0, 65536).

        Args:
            out: (n,), of the type of the arithmetic.
        """
        missing = out.numel() - len(self._left)
        if missing > 0:
            fresh = self._bits.random_raw(-(-missing // 4)).view(np.int16)
            self._left = np.concatenate([self._left, fresh]) if len(self._left) else fresh
        now, self._left = self._left[: out.numel()], self._left[out.numel() :]
        out.copy_(torch.from_numpy(now))
        return out.add_(LEVELS // 2)


def quantised(probability: float) -> int:
    """The number of levels, of 65536, nearest to a probability in (0, 1]; at least one."""
    return max(1, round(probability * LEVELS))
