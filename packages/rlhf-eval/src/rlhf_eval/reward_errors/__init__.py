"""What a reward model gets wrong on preference pairs: calibration, biases, slices, cases to read.

May import `rlhf_eval.stats`, `figures` and `html`; knows no model: it is given scores.
"""
