"""Serving of aligned models."""

__all__: list[str] = []
