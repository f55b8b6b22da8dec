"""Environments: where prompts come from and how an answer is judged."""
