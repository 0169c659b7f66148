"""Recompute and offload: which values the forward saves for the backward, under a memory budget."""
