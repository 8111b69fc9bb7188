"""Vocabularies that differ: the union of tokens, and tensors with their rows aligned to it."""
