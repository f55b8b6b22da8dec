"""Asynchronous reinforcement-learning post-training of language models in JAX."""
