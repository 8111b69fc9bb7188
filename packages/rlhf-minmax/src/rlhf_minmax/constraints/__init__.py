"""The constraints of a run, each with a controller of its multiplier; guards that undo a collapse."""
