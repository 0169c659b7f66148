"""Nodes, symbolic sizes and memory layouts of an ATen graph."""
