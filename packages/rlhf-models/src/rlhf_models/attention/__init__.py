"""Attention over packed prefix trees: the tree's mask, and dense and variable-length kernels for it."""
