"""Connects to a cluster one of whose machines dies, and waits until Ray has noticed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from ray_faults import ray_cluster
from rlhf_algos.distributed.cluster import Cluster
from rlhf_algos.distributed.config import DistributedConfig

with ray_cluster() as cluster:
    connected = Cluster(DistributedConfig(rollout_workers=1, address=cluster.address))
    before = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    cluster.kill_machine()
    while before <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
        time.sleep(0.5)
    time.sleep(10)  # what is said of it comes a moment later
    connected.close()
    print("noticed", flush=True)
