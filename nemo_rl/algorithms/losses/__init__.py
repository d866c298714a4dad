"""Losses: one file for each policy loss, and what they share."""
