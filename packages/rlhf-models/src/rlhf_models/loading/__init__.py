"""Decoders and tokenizers: pretrained, quantized, from scratch, tiny."""
