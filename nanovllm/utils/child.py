"""Starts Python processes that import the same packages as this process."""

import sys
from pathlib import Path


def python(code: str) -> list[str]:
    """Return the command of a process that runs `code` with the path of this process.

    `-c` and `-m` alone would put the current directory first on the path. A file numba.py in it
    would then be imported in place of Numba.
    """
    # The last entry is for a package that was found without the path.
    paths = [str(p) for p in sys.path if isinstance(p, str)] + [str(Path(__file__).parents[2])]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{code}"]
