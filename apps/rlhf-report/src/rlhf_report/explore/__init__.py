"""`rlhf-report explore`: from its options to columns and words of the pairs, and a report."""
