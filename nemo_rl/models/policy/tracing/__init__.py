"""What a policy worker shows to the tracer's hub."""
