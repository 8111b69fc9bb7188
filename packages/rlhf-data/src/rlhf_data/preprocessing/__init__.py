"""Cleaning of training data: duplicates, ties, contaminated rows, long dialogues, held-out splits."""
