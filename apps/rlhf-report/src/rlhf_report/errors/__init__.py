"""`rlhf-report errors`: from its options to rows, their scores, and a report."""
