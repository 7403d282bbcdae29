"""Helpers without a subject of the engine: checks of values, the log, child processes."""
