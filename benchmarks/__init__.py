"""Benchmarks: each prints a table, writes JSON with raw samples, and fails when its numbers make no sense."""
