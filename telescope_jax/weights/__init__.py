"""Weights on their way out: Hugging Face names and layouts, and the store of versions."""
