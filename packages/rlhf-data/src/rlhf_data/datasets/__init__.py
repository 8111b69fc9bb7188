"""Tokenised examples, in memory or streamed, and their packing as prefix trees."""
