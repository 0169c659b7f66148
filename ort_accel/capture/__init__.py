"""From an unchanged module to its forward and backward graphs."""
