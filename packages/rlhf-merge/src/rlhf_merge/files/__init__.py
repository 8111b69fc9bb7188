"""Models on disk and on the hub, read in pieces, and the resumable writer of the result; knows no merge."""
