"""What can be checked about a run before anything starts."""
