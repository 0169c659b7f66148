"""Graph passes; `pipeline.py` lists them in their order."""
