"""Rows of JSON, CSV, Parquet, Arrow and the hub, with errors that name file, line and problem."""
