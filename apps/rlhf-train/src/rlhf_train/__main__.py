"""`python -m rlhf_train`, as `torchrun` starts it."""

from rlhf_train.cli import main

main(prog_name="rlhf-train")
