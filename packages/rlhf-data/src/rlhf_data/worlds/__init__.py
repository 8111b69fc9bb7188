"""Procedural worlds and tasks: stories with gossip, small sums."""
