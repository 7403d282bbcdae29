"""The benchmarks that bench.py runs."""
