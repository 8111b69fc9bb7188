"""Checkpoints that a killed run resumes from to the bit; nothing in them is pickled."""
