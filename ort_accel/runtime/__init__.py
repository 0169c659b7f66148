"""The installed onnxruntime: its abilities, its sessions, its caches, and tensors shared with torch without copies."""
