"""Makes nanovllm.zip for the page docs/play/index.html, and may serve the page.

  python -m tools.play            writes docs/play/nanovllm.zip
  python -m tools.play --serve    also serves docs/play on http://localhost:8000

The zip has nanovllm without backends and models, the lessons with their checks, and pytest.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "play"
FOLDERS = ("nanovllm", "lessons", "tools/simulate", "tools/benchmarks", "tests/lessons/exercises")
PACKAGES = ("tqdm", "pytest", "pluggy", "iniconfig", "packaging", "pygments")  # plain Python


def write_zip(target: Path) -> None:
    """Write the zip. Raises PackageNotFoundError if pytest is not installed."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "nanovllm" / "cli" / "trace" / "page.html")
    left_out = {ROOT / "nanovllm" / "backends", ROOT / "nanovllm" / "models"}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(FOLDER / "play.py", "play.py")
        for path in sorted(path for path in files if left_out.isdisjoint(path.parents)):
            file.write(path, path.relative_to(ROOT))
        for name in (name for p in PACKAGES for name in importlib.metadata.files(p) or ()):
            if ".." not in name.parts and name.suffix != ".pyc":
                file.write(str(name.locate()), name)  # with the license


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("tools.play", description="Make the page docs/play.")
    parser.add_argument("--serve", action="store_true", help="serve it on localhost:8000")
    args = parser.parse_args(argv)
    write_zip(FOLDER / "nanovllm.zip")
    print(f"wrote {FOLDER / 'nanovllm.zip'}; --serve serves the page")
    if args.serve:
        server = [sys.executable, "-m", "http.server", "--bind", "localhost"]
        subprocess.run([*server, "--directory", str(FOLDER)], check=True)


if __name__ == "__main__":
    main()
