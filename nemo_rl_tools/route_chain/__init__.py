"""The verifier of route traces."""
