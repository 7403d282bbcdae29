"""The control plane: plain Python ints, no torch (but for llm_engine.py, which joins the two)."""
