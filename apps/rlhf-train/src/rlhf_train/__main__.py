"""`python -m rlhf_train`, as `torchrun` starts it."""

from rlhf_train.cli import main

if __name__ == "__main__":
    main(prog_name="rlhf-train")
