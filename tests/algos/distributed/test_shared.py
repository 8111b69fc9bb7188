"""What reward functions gave for a step, dealt out to the training processes."""

from __future__ import annotations

import pytest

from rlhf_algos.distributed.shared import shares
from rlhf_infer import Measured


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_each_gets_its_prompts_and_the_first_the_metrics(processes: int, batch: int):
    """Three prompts of two completions; the function gives the number of the completion, 0 to 5."""
    measured = []
    for first in range(0, 6, 2 * batch):
        numbers = [float(each) for each in range(first, min(first + 2 * batch, 6))]
        extras = {"text": [str(each) for each in numbers]}
        measured.append(Measured([numbers, [-each for each in numbers]], {"seen": numbers[:1]}, extras))
    found = shares(measured, 3, processes)
    of_prompt = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    for process, parts in enumerate(found):
        own = of_prompt[process::processes]
        assert [part.rows for part in parts] == [[each, [-x for x in each]] for each in own]
        assert [part.extras for part in parts] == [{"text": [str(x) for x in each]} for each in own]
    logged = [part.metrics for parts in found for part in parts]
    assert logged == [{"seen": [float(first) for first in range(0, 6, 2 * batch)]}] + [{}] * 2
