"""Pallas kernels and their pure-JAX peers; imports jax only, never telescope_jax."""
