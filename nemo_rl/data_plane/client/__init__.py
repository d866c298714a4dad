"""The client that every adapter shares: reads, writes, claims, and what they cost."""
