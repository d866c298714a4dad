"""The proof after a refit that engines sample from the weights that they were sent."""
