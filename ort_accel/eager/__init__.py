"""Steps that eager PyTorch runs instead of the engine, and how that is decided."""
