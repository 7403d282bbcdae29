"""Eight lessons, the ladder and exercises: `python -m nanovllm.lessons`. Nothing imports them."""
