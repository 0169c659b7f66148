"""The memory of this process: how the C library hands it out, how much is in use, and running out of it."""
