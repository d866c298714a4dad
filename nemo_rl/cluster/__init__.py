"""From one machine to many: what starts a run on a cluster, and what can be known before it starts."""
