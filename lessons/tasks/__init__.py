"""The stubs that `python -m lessons build NAME` copies. Nothing imports them."""
