"""`python -m rlhf_serve`."""

from rlhf_serve.cli import main

main(prog_name="rlhf-serve")
