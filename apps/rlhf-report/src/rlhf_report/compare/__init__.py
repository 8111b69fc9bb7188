"""Models compared by files of what they answered: reading, statistics, words, page."""
