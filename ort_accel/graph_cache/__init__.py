"""Keeps compiled graphs on disk for the next start."""
