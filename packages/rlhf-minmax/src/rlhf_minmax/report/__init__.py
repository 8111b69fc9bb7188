"""The report of a game: one HTML page and its figures, drawn from a run folder."""
