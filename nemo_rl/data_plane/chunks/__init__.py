"""The way of columns to bytes: checks, ragged and dense rows, tags and keys on the wire."""
