"""Measurements of a game: accuracy, exploitability, cross-play, dynamics, the run doctor."""
