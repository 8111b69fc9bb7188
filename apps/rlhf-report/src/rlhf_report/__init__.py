"""Command line for reports: `rlhf-report`."""

__all__: list[str] = []
