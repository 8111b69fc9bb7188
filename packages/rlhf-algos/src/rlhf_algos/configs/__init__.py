"""Settings of every method; the names are those of TRL and transformers. Loads no torch."""
