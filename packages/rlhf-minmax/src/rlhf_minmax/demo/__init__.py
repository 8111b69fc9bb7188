"""The demonstration's models: base, reward model, judge, and the texts that teach them."""
