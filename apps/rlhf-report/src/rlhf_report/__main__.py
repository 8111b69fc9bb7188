"""`python -m rlhf_report`."""

from rlhf_report.cli import main

if __name__ == "__main__":
    main(prog_name="rlhf-report")
