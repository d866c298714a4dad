"""Watching a model train: what is looked at, how it is reduced, and how it travels to those who look on."""
