"""One pass of the game: prompts, answers, critiques, scores, violations."""
