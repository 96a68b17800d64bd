"""Engines as processes: start, see, explain, stop. Torch-free."""
