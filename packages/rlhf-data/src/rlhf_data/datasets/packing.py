"""Packed prefix trees: sequences that share a prefix are stored, and later computed, once.

A batch is one flat token stream cut into segments. Every segment has a parent segment (or none); a token
attends causally to its own segment and fully to all ancestor segments, and positions continue from the
parent. Scoring such a stream gives what scoring each sequence by itself gives, with fewer tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from rlhf_data.records.encode import TokenSequence
from rlhf_data.records.kind import common_prefix


@dataclass(frozen=True)
class PackedBatch:
    """A flat token stream of N tokens, its tree of S segments, and the M scored tokens of Q sequences.

    All fields are int64 tensors. `segment_parent` is -1 for a root; a parent comes before its children.
    Entry m of the scored tokens says: the token `score_targets[m]`, which belongs to sequence
    `score_sequence[m]` (0..Q-1), is predicted from stream position `score_positions[m]`. The entries of one
    sequence are adjacent and in order. `last_positions[q]` is the stream position of sequence q's last
    token, `sequence_ids[q]` its index in the list that was packed.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segment_start: torch.Tensor
    segment_length: torch.Tensor
    segment_parent: torch.Tensor
    score_positions: torch.Tensor
    score_targets: torch.Tensor
    score_sequence: torch.Tensor
    last_positions: torch.Tensor
    sequence_ids: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream (N), each computed once."""
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences packed into the stream (Q)."""
        return len(self.last_positions)

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (Q,) over the scored tokens of each sequence of values (M,)."""
        return values.new_zeros(self.num_sequences).index_add(0, self.score_sequence, values)

    def sequence_lengths(self) -> torch.Tensor:
        """Scored tokens (Q,) of each sequence."""
        return self.score_sequence.bincount(minlength=self.num_sequences)

    def path(self, sequence: int) -> torch.Tensor:
        """(length,) stream positions of all tokens of one sequence (0..Q-1), in order."""
        last = int(self.last_positions[sequence])
        segment = int(torch.searchsorted(self.segment_start, last, right=True)) - 1
        ranges = [torch.arange(int(self.segment_start[segment]), last + 1)]
        while (segment := int(self.segment_parent[segment])) >= 0:
            start = int(self.segment_start[segment])
            ranges.append(torch.arange(start, start + int(self.segment_length[segment])))
        return torch.cat(ranges[::-1])

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on `device`, moved in one copy."""
        target = torch.device(device)
        if self.input_ids.device == target:
            return self
        tensors = [getattr(self, field.name) for field in fields(self)]
        joined = torch.cat(tensors)
        to_gpu = target.type == "cuda" and joined.device.type == "cpu"
        moved = (joined.pin_memory() if to_gpu else joined).to(target, non_blocking=to_gpu)
        batch = PackedBatch(*moved.split([len(tensor) for tensor in tensors]))
        object.__setattr__(batch, "_host", self.host)
        return batch

    @property
    def host(self) -> PackedBatch:
        """The same batch on the CPU: the one that `to` copied, if any, so that no device is waited for."""
        return getattr(self, "_host", None) or self.to("cpu")


def micro_batches(
    examples: Sequence[Any], sequences: Sequence[Sequence[TokenSequence]], budget: int | None
) -> Iterator[tuple[PackedBatch, list[Any]]]:
    """Cut examples by a token budget and pack each part; examples that begin alike are packed together.

    The budget counts prefixes that the sequences of an example share once; what examples share with each
    other makes a batch smaller still.

    Args:
        examples: the examples.
        sequences: the token sequences of each, at least one; they are never cut apart.
        budget: tokens in one batch; a longer example is taken alone; None packs all into one.

    Yields:
        A batch and the examples in it; the batch's sequences are those of the examples, in their order.
    """
    for part in _parts(sequences, budget):
        (batch,) = pack([sequence for i in part for sequence in sequences[i]])
        yield batch, [examples[i] for i in part]


def _parts(examples: Sequence[Sequence[TokenSequence]], budget: int | None) -> list[list[int]]:
    """Indices of the examples of each micro-batch."""
    lengths = [sum(len(sequence.input_ids) for sequence in sequences) for sequences in examples]
    if not examples:
        return []
    if budget is None or sum(lengths) <= budget:
        return [list(range(len(examples)))]
    parts: list[list[int]] = []
    used = 0
    for i in sorted(range(len(examples)), key=lambda i: list(examples[i][0].input_ids)):
        first = list(examples[i][0].input_ids)
        cost = lengths[i] - sum(common_prefix(first, list(other.input_ids)) for other in examples[i][1:])
        if not parts or used + cost > budget:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += cost
    return parts


def pack(sequences: Sequence[TokenSequence], max_tokens: int | None = None) -> list[PackedBatch]:
    """Pack sequences into prefix trees, cut into batches of at most `max_tokens` stream tokens.

    Shared prefixes of any depth are found automatically. Sequences that share a prefix are neighbours, so a
    cut repeats at most one prefix, and cuts fall where little is repeated. A sequence longer than
    `max_tokens` gets its own batch.

    Args:
        sequences: the sequences; every one comes back exactly once, see `PackedBatch.sequence_ids`.
        max_tokens: budget in stream tokens (after sharing) per batch; None packs everything into one.

    Raises:
        ValueError: an empty sequence, a `score_from` outside the sequence, a `score_mask` of another length,
            or a budget below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    for i, sequence in enumerate(sequences):
        if not 0 <= sequence.score_from <= len(sequence.input_ids) or not len(sequence.input_ids):
            raise ValueError(
                f"sequence {i} has {len(sequence.input_ids)} tokens and score_from {sequence.score_from}; "
                "expected at least one token and 0 <= score_from <= length"
            )
        if sequence.score_mask is not None and len(sequence.score_mask) != len(sequence.input_ids):
            raise ValueError(
                f"sequence {i} has {len(sequence.input_ids)} tokens but {len(sequence.score_mask)} entries "
                "in score_mask"
            )
    ids = [list(s.input_ids) for s in sequences]
    order = sorted(range(len(ids)), key=lambda i: (ids[i], i))
    return [_build(sequences, ids, part) for part in _cut(ids, order, max_tokens)]


def _cut(ids: list[list[int]], order: list[int], max_tokens: int | None) -> list[list[int]]:
    """Split the sorted order into parts that pack into at most `max_tokens` each.

    There are as few parts as possible.  Each cut falls where the next part repeats the fewest tokens, as far
    as the number of parts allows, and of such places at the last.
    """
    if max_tokens is None or not order:
        return [order] if order else []
    repeated = [0, *(common_prefix(ids[a], ids[b]) for a, b in itertools.pairwise(order))]
    added = [len(ids[i]) - shared for i, shared in zip(order, repeated, strict=True)]
    before = [0, *itertools.accumulate(added)]

    def fits(start: int, end: int) -> bool:
        return end - start == 1 or repeated[start] + before[end] - before[start] <= max_tokens

    starts = [len(order)]  # the earliest at which the last part can begin, the last two, ...
    while starts[-1]:
        start = starts[-1] - 1
        while start and fits(start - 1, starts[-1]):
            start -= 1
        starts.append(start)
    parts, start = list[list[int]](), 0
    for least in starts[-2:0:-1]:
        end = max(start + 1, least)
        best = end
        while end < len(order) and fits(start, end):
            if repeated[end] <= repeated[best]:
                best = end
            end += 1
        parts.append(order[start:best])
        start = best
    return [*parts, order[start:]]


def _build(sequences: Sequence[TokenSequence], ids: list[list[int]], order: list[int]) -> PackedBatch:
    """Radix-tree split of the sequences of `order`, which sorts their ids lexicographically.

    So `ids[group[0]]` and `ids[group[-1]]` of a group bound the prefix common to all of it.
    """
    stream: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int]] = []
    paths: dict[int, list[int]] = {}
    # Each entry: sorted sequences that agree on their first `depth` tokens, the segment above, its path.
    stack: list[tuple[list[int], int, int, list[int]]] = [(order, 0, -1, [])]
    while stack:
        group, depth, parent, path = stack.pop()
        end = common_prefix(ids[group[0]], ids[group[-1]]) if len(group) > 1 else len(ids[group[0]])
        if end > depth:
            start = len(stream)
            stream += ids[group[0]][depth:end]
            positions += range(depth, end)
            segments.append((start, end - depth, parent))
            parent = len(segments) - 1
            path = path + list(range(start, len(stream)))
        branches: dict[int, list[int]] = {}
        for i in group:
            if len(ids[i]) == end:
                paths[i] = path
            else:
                branches.setdefault(ids[i][end], []).append(i)
        stack += [(branch, end, parent, path) for branch in reversed(branches.values())]
    return _tensors(stream, positions, segments, paths, sequences, sorted(order))


def _tensors(
    stream: list[int],
    positions: list[int],
    segments: list[tuple[int, int, int]],
    paths: dict[int, list[int]],
    sequences: Sequence[TokenSequence],
    members: list[int],
) -> PackedBatch:
    scored_at: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    for q, i in enumerate(members):
        scored = sequences[i].scored()
        scored_at += [paths[i][at - 1] for at in scored]
        targets += [sequences[i].input_ids[at] for at in scored]
        owner += [q] * len(scored)
    table = np.array(segments, dtype=np.int64).reshape(-1, 3)

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64))

    return PackedBatch(
        input_ids=tensor(stream),
        position_ids=tensor(positions),
        segment_start=tensor(table[:, 0]),
        segment_length=tensor(table[:, 1]),
        segment_parent=tensor(table[:, 2]),
        score_positions=tensor(scored_at),
        score_targets=tensor(targets),
        score_sequence=tensor(owner),
        last_positions=tensor([paths[i][-1] for i in members]),
        sequence_ids=tensor(members),
    )


@dataclass(frozen=True)
class StepTokens:
    """Tokens of a step.

    Args:
        packed: tokens of the prefix trees that are computed.
        padded: tokens of the same sequences as rows of one padded batch.
        largest: tokens of the largest single pass.
        longest: tokens of the longest sequence.
    """

    packed: int
    padded: int
    largest: int
    longest: int

    @classmethod
    def of(cls, batches: Iterable[PackedBatch], sequences: Sequence[TokenSequence]) -> StepTokens:
        """Count the sequences of a step, and the batches they are computed in."""
        sizes = [batch.num_tokens for batch in batches]
        longest = max(len(sequence.input_ids) for sequence in sequences)
        return cls(sum(sizes), longest * len(sequences), max(sizes), longest)

    @classmethod
    def mean(cls, steps: Sequence[StepTokens]) -> StepTokens:
        """The mean of several steps; the largest pass and the longest sequence of any."""
        packed, padded = sum(step.packed for step in steps), sum(step.padded for step in steps)
        return cls(
            round(packed / len(steps)),
            round(padded / len(steps)),
            max(step.largest for step in steps),
            max(step.longest for step in steps),
        )

    def __str__(self) -> str:
        return f"{self.packed:,} packed, {self.padded:,} padded ({self.padded / self.packed:.1f}x)"


def longest_completions(prompt_ids: Sequence[int], count: int, length: int) -> tuple[TokenSequence, ...]:
    """A prompt with `count` completions of `length` tokens, no two alike: the most that sampling returns."""
    return tuple(
        TokenSequence((*prompt_ids, *(number,) * length), len(prompt_ids)) for number in range(-count, 0)
    )
