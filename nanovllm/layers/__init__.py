"""The parts of a transformer layer that are not attention: small modules without initialisation.

Parameters are allocated uninitialised; runner/weights.py fills them.
"""
