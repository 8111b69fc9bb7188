"""`python -m rlhf_serve`."""

from rlhf_serve.cli.main import main

main(prog_name="rlhf-serve")
