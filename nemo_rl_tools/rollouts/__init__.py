"""Readable rollouts of a run, for people: read, chosen, drawn on a terminal and as a page."""
