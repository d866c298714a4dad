"""Measures of held-out prompts: several samples of each, what they are worth, how sure that is."""
