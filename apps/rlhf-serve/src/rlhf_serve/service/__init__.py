"""One request for candidates, from text to selected answer: tokenization, generation, scoring, selection."""
