"""Checks of a run before anything starts."""
