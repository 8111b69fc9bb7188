"""Settings of a game: players, scorers, constraints, whose turn it is."""
