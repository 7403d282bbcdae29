"""Units: products of few rows, for processors with the same instructions."""
