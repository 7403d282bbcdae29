"""Models with linear attention, whose layers keep a state for each sequence: Qwen3.5."""
