"""What is measured of a game: accuracy, exploitability, cross-play, dynamics, the run doctor."""
