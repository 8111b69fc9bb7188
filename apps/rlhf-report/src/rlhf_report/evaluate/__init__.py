"""`rlhf-report evaluate`: from its options to models, an evaluation of each, and a report."""
