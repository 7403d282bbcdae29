"""bench.py as a module: it stands outside the package."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("bench", Path(__file__).parents[2] / "bench.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
