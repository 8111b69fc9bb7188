"""The command `rlhf-serve`: options, loading, the server's life, generation over files, the demonstration."""
