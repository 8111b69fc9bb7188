"""Command line for training: rlhf-train minmax."""

__all__: list[str] = []
