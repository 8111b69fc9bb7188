"""`python -m rlhf_report`."""

from rlhf_report.cli import main

main(prog_name="rlhf-report")
