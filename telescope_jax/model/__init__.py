"""The policy: one Flax NNX decoder, its attention and its log-probs."""
