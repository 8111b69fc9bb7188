"""Merging of language models."""

__all__: list[str] = []
