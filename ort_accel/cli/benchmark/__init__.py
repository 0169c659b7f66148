"""Measuring a training step: eager PyTorch, Inductor and ort_accel side by side."""
