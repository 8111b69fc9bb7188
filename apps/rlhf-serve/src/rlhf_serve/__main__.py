"""`python -m rlhf_serve`."""

from rlhf_serve.cli.main import main

if __name__ == "__main__":
    main(prog_name="rlhf-serve")
