"""Routes of experts: shape, digests, places of tokens, columns. Of libraries it needs torch alone."""
