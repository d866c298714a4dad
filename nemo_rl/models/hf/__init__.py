"""Hugging Face files and folders: reading, loading and writing a model."""
