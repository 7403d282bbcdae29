"""The control plane: plain Python, no torch."""
