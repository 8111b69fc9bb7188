"""Tree search over the steps of completions: MCTS, beam, DVTS, best-first, and step labels by Monte Carlo."""
