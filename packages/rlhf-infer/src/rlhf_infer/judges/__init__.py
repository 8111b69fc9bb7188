"""Judges of answers: language models on this machine or behind an API, their prompts and replies."""
