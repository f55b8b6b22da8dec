"""Per-token log-probabilities from hidden states, without the logits."""
