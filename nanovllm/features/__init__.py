"""Kinds of requests, models, formats of checkpoints, memory and devices."""
