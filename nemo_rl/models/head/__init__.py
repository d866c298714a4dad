"""From hidden states to log-probabilities: the head, top-k and sampling masks."""
