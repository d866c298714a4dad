"""Tensors of a forward or backward pass on disk: which place in the model, which token, whose part."""
