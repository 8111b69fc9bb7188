"""The `math` rule: formulas compared by math-verify, in processes with a time limit."""
