"""Causal attention over sequences packed in one row."""
