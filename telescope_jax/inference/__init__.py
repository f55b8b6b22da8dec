"""Engines: the embedded one, and servers."""
