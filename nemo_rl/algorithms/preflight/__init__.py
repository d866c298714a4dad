"""What can be known of a run before anything starts."""
