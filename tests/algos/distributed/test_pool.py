"""What is said where a pool of workers has none left."""

from __future__ import annotations

from typing import Literal

import pytest

from raises import raises_error
from rlhf_algos.distributed.config import DistributedConfig
from rlhf_algos.distributed.pool import no_workers_left


@pytest.mark.parametrize("how", ["restart", "shrink"])
@pytest.mark.parametrize("never_up", [False, True])
def test_advice_is_what_can_help(how: Literal["restart", "shrink"], never_up: bool) -> None:
    config = DistributedConfig(on_worker_loss=how, rollout_workers=2)
    with raises_error("no_workers_left", workers=2, never_up=never_up) as error:
        raise no_workers_left(config, "rollout", never_up=never_up)
    said = str(error.value)
    assert ("on_worker_loss" in said) == (how == "shrink" and not never_up)
    assert ("py_executable" in said) == ("start_timeout" in said) == ("logs" in said) == never_up
