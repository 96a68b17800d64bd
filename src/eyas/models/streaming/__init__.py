"""Boundaries of a target larger than memory: layer by layer, expert by expert, from the checkpoint as published."""
