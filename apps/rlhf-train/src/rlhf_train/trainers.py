"""The training processes of a command on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rlhf_algos import ClusterConfig, trainers
from rlhf_algos.process_group import world_size
from rlhf_data import BaseConfig, RunFolder, UserError
from rlhf_train.inputs import check_inputs
from rlhf_train.runs import resumable


def processes_of(config: BaseConfig) -> int:
    """How many processes train: those that the settings ask for on a cluster, or those that run."""
    cluster = trainers(config)
    return cluster.trainer_workers if cluster else world_size()


def train_on_cluster(
    cluster: ClusterConfig,
    config: BaseConfig,
    run: RunFolder,
    work: Callable[[bool], None],
    *,
    job: str,
    trains: bool,
) -> None:
    """Do a command's work in training processes on a cluster; see `rlhf_algos.run_trainers`.

    Args:
        cluster: the section `distributed` of `config`.
        config: the settings, whose inputs are looked for before Ray starts.
        run: the folder, which this process locks.
        work: see `rlhf_algos.run_trainers`.
        job: the words after `rlhf-train` that continue the run.
        trains: see `resumable`.
    """
    if world_size() > 1:
        raise UserError(
            f"torchrun has started {world_size()} processes, and distributed.trainer_workers asks for "
            f"{cluster.trainer_workers} on a cluster; leave out one of them",
            code="conflicting_options",
        )
    check_inputs(config)
    from rlhf_algos import run_trainers

    click.echo(f"starting {cluster.trainer_workers} training processes on Ray, once there is room for them")
    with resumable(run, job, trains=trains):
        run_trainers(cluster, run.path, work)


def share_rows(values: dict[str, Any], run: RunFolder) -> dict[str, Any]:
    """Settings with which a step has as many rows with fewer training processes as with all.

    After the first checkpoint the job itself does that.
    """
    processes, wanted = world_size(), values["distributed"]["trainer_workers"]
    if processes == wanted or run.latest_checkpoint():
        return values
    rows = values["per_device_train_batch_size"] * wanted
    if rows % processes:
        raise UserError(
            f"the cluster has room for {processes} training processes, which cannot share the {rows} rows of "
            "a step (per_device_train_batch_size x distributed.trainer_workers) equally; change one of the "
            "two, or leave out distributed.min_trainer_workers",
            code="conflicting_options",
        )
    return {**values, "per_device_train_batch_size": rows // processes}
