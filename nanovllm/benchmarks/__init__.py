"""What bench.py needs beyond a screenful."""
