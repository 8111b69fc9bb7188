"""Data cleaned, cut and split for training, with a page that shows what was done."""
