"""`python -m rlhf_merge`."""

from rlhf_merge.cli.main import main

main(prog_name="rlhf-merge")
