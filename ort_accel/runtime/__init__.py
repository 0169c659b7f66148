"""The installed onnxruntime: what it can do, its sessions, and tensors going in and out without copies."""
