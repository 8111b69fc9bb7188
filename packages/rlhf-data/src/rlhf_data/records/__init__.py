"""Record kinds, one file each: the record, how a row becomes one, and its tokens; no files."""
