"""The units of a CPU: what computes attention and products of few rows on one kind of processor."""
