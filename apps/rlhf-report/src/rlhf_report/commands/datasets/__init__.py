"""Commands that look at data to train on, clean it, and write it."""
