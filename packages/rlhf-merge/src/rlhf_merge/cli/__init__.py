"""The command `rlhf-merge`: parses, calls the library, prints."""
