"""Optional programs around the engine: trace, batch files, benchmarks, tests' oracle, training."""
