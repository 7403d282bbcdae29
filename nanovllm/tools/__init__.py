"""Optional programs: chat, trace, batch jobs, benchmarks, the oracle of the tests, training."""
