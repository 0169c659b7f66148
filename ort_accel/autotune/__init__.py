"""Measures operators on this machine, and divides graphs by what was measured."""
