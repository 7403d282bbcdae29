"""Helpers that contain nothing about the engine.

checks      types and ranges of values
child       the command of another Python process
errors      errors of requests for which no token could be sampled
host        the memory, the cores and the instructions that this process may use
json_files  files in JSON and the types of their fields
log         the log and the progress bars
"""
