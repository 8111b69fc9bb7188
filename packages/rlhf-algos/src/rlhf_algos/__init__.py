"""Losses, advantages and trainers for RLHF."""

__all__: list[str] = []
