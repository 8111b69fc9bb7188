"""`python -m rlhf_merge`."""

from rlhf_merge.cli.main import main

if __name__ == "__main__":
    main(prog_name="rlhf-merge")
