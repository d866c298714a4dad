"""`nemo-rl plan`: who runs where, what it needs, how long it takes at least, and whether it fits."""
