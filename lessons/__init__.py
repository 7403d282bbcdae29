"""Lessons, the ladder and exercises, which `python -m lessons` runs in a clone."""
