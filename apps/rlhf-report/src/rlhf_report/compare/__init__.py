"""Comparing models by files of their answers: reading, statistics, sentences, page."""
