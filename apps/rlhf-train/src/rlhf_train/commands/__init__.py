"""One module per command: from its options to a job."""
