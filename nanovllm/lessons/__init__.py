"""Eight lessons, the ladder and exercises: `nanovllm lessons`. Nothing imports them."""
