"""A Ray cluster in real processes, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_faults import started


@pytest.fixture(scope="session")
def ray_here(ray_installed: None) -> Iterator[None]:
    from rlhf_algos.distributed.cluster import Cluster
    from rlhf_algos.distributed.config import DistributedConfig

    config = DistributedConfig(address="local", rollout_workers=4, object_store_gb=0.2)
    cluster = started(lambda: Cluster(config))
    cluster.release()
    yield
    cluster.close()
