"""Runs the real scheduler on a trace of requests, without a model and without waiting.

traces      the requests, from a file or made
simulation  the loop, and what each request saw
clock       how long a step takes: a roofline, or a table measured on this machine
__main__    the command: python -m tools.simulate --help
"""
