"""Versioned weights: the trainer puts each version into the object store once, and workers fetch it there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

Arrays = Mapping[str, Any]
"""The bytes of each trained parameter as a flat NumPy array, by name."""


_KNOWN_WITHIN = 10.0
"""Seconds in which the controller's word of weights arrives; a worker may ask for them before."""


class Weights:
    """An actor that maps each version of the weights to its reference in the object store.

    What it knows the controller can tell again, so nothing is lost with it. Ray may carry out calls in
    another order than they were made in, so they are numbered from 1.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, Any]] = {}
        self._newest: dict[str, tuple[int, str]] = {}
        self._news = asyncio.Condition()

    async def publish(self, number: int, role: str, digest: str, reference: list[Any]) -> None:
        """Register weights, as a list with their reference, and make them a role's newest.

        Of a list Ray does not fetch what its references stand for.
        """
        async with self._news:
            before, _ = self._held.get(digest, (0, None))
            self._held[digest] = (max(number, before), reference)
            self._newest[role] = max((number, digest), self._newest.get(role, (0, "")))
            self._news.notify_all()

    async def pull(self, role: str, digest: str) -> tuple[str, list[Any]]:
        """Digest and reference of weights; without a digest, of the role's newest.

        Raises:
            KeyError: they were never published, or are forgotten.
        """

        def known() -> bool:
            return digest in self._held if digest else role in self._newest

        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait_for(known), _KNOWN_WITHIN)
            digest = digest or self._newest[role][1]
            return digest, self._held[digest][1]

    async def keep(self, number: int, digests: set[str]) -> None:
        """Forget all weights but these and later ones.

        The object store drops them when no worker reads them either.
        """
        self._held = {
            digest: held for digest, held in self._held.items() if digest in digests or held[0] > number
        }


class Published:
    """The trainer's side of `Weights`: every version is put into the object store once.

    Attributes:
        actor: the weights actor.
        current: digest of the version published last, by role.
    """

    def __init__(self) -> None:
        self._references: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self.current: dict[str, str] = {}
        self.actor: Any = None
        self.revive()

    def __contains__(self, digest: str) -> bool:
        return digest in self._references

    def publish(self, digest: str, arrays: Arrays, role: str = "") -> None:
        """Make weights a role's current ones; put them into the object store if they are not there."""
        import ray

        if digest not in self._references:
            self._references[digest] = ray.put(arrays)
        if digest != self.current.get(role):
            self.current[role] = digest
            self._tell(role, digest)

    def keep(self, digests: set[str]) -> None:
        """Forget all weights but these and the current ones."""
        kept = digests | set(self.current.values())
        self._references = {digest: held for digest, held in self._references.items() if digest in kept}
        self.actor.keep.remote(next(self._numbers), kept)

    def revive(self) -> None:
        """Restart the actor and register everything that is held."""
        import ray

        self.end()
        self.actor = ray.remote(Weights).options(num_cpus=0, max_restarts=0).remote()
        for digest in self._references:
            self._tell("", digest)
        for role, digest in self.current.items():
            self._tell(role, digest)

    def end(self) -> None:
        """End the actor."""
        import ray
        from ray import exceptions

        if self.actor is not None and ray.is_initialized():
            with contextlib.suppress(exceptions.RayError):  # it has ended by itself
                ray.kill(self.actor, no_restart=True)

    def _tell(self, role: str, digest: str) -> None:
        self.actor.publish.remote(next(self._numbers), role, digest, [self._references[digest]])
