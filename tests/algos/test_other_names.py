"""Names by which some know the trainers, and the logging of scripts."""

import logging

import pytest

import rlhf_algos
from rlhf_algos import TrainingStage, setup_logging


def test_the_same_things_by_other_names():
    assert rlhf_algos.RewardModelTrainer is rlhf_algos.RewardTrainer
    assert rlhf_algos.ProcessRewardModelTrainer is rlhf_algos.PRMTrainer
    assert rlhf_algos.RewardModelConfig is rlhf_algos.RewardConfig
    assert (TrainingStage.SFT, TrainingStage.REWARD_MODEL) == ("sft", "reward")


@pytest.mark.parametrize("rich", [True, False])
def test_logging_is_set_up_anew_each_time(tmp_path, rich):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        for name in ("first", "second"):
            setup_logging("INFO", rich=rich, file=tmp_path / name)
            logging.getLogger("rlhf_algos.jobs.training_job").info("step of %s", name)
        assert "INFO rlhf_algos.jobs.training_job: step of first" in (tmp_path / "first").read_text()
        assert "step of second" in (tmp_path / "second").read_text()
        assert "second" not in (tmp_path / "first").read_text()
    finally:
        for handler in root.handlers:
            if handler not in before:
                handler.close()
        root.handlers, root.level = before, level
