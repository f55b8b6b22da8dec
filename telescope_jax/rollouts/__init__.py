"""From a prompt to a group of finished rollouts."""
