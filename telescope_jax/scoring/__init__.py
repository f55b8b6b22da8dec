"""From rewards to advantages: what is kept, and what it is worth."""
