"""Tools for clusters: they start a run on several machines, and tell what can be known before it starts."""
