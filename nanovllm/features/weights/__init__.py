"""Weights that change while the engine lives.

new_weights    load_weights: new values for the same model
sleep          memory that is given back until wake_up
dummy_weights  random values, for timings without a checkpoint
"""
