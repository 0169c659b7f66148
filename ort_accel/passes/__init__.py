"""Graph passes: each takes an ATen graph and changes it in place."""
