"""Names of tensors: layers, kinds, tied heads, and which source tensor each one of the result comes from."""
