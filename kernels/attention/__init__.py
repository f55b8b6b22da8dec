"""Causal attention within the segments of packed rows."""
