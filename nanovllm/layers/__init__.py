"""The parts of a transformer layer that are not attention: functions, and objects that own weights.

Weights are allocated uninitialised; runner/weights.py fills them.
"""
