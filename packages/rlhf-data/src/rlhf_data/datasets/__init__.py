"""Tokenised examples in memory, and their packing as prefix trees."""
