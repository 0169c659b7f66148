"""Facts about operators that several rooms read."""
