"""What the forward keeps for the backward, and what is computed again."""
