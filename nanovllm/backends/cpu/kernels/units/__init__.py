"""Units: attention and products of few rows, for processors with the same instructions."""
