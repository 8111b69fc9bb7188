"""Training runs compared by their logs: finding and reading them, words, figures, page."""
