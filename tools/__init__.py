"""Programs of the clone that are not in the wheel: benchmarks, training of the included model."""
