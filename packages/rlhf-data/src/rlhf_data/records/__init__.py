"""Records of every kind, and how the rows of a file become them; no files, no tokens."""
