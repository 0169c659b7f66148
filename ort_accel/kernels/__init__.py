"""Operators of ort_accel's own, each with its fake implementation, registered with torch.library."""
