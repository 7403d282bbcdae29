"""The parts of `bench.py --gpu-report`; report.py runs them, each command in a separate process."""
