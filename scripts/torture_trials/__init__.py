"""The kinds of trials of `scripts/torture.py`."""

from __future__ import annotations

import random
from collections.abc import Callable

from torture_trials import damage, disks, inputs, kills, limits, network, servers
from torture_trials.place import Place
from torture_trials.trial import Trial

Draw = Callable[[Place, random.Random], Trial]
KINDS: dict[str, list[Draw]] = {
    "kills": [kills.killed_training, kills.killed_merge, kills.killed_pipeline, servers.killed_server],
    "signals": [
        kills.stopped_training,
        kills.stopped_merge,
        kills.closed_terminal,
        kills.closed_pipe,
        servers.stopped_server,
    ],
    "full-disk": [disks.full_training, disks.full_merge, disks.full_feedback],
    "read-only": [disks.read_only_training, disks.read_only_others],
    "damage": [
        damage.damaged_run,
        damage.damaged_model,
        damage.damaged_merge_input,
        damage.damaged_merge,
        damage.damaged_pipeline,
    ],
    "inputs": [inputs.mutated_rows, inputs.mutated_settings, inputs.mutated_model],
    "two-runs": [limits.two_trainings, limits.two_merges, limits.two_servers],
    "clock": [limits.jumping_clock_training, limits.jumping_clock_server],
    "memory": [limits.scarce_memory_training, limits.scarce_memory_merge],
    "network": [network.bad_line, network.bad_hub],
    "requests": [network.malformed_requests],
}
"""Trials by kind; a kind's trials take turns."""
