"""The config of a merge: YAML, JSON, mergekit's schema, values over the depth of a model."""
