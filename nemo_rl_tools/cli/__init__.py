"""Subcommands of `nemo-rl` that belong to the tools."""
