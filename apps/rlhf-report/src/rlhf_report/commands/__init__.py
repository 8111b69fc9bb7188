"""One module per command: its options at the top, what it calls imported where it is called."""
