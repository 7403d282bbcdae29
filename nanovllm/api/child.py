"""Commands of Python processes that import what this process would."""

import subprocess
import sys
from pathlib import Path


def python(code: str) -> list[str]:
    """Return the command of a process that runs `code`.

    `-c` and `-m` alone would put the current directory first on the path, and run a file numba.py
    that lies there. They would not find a package that this process found on a path of its own.
    """
    # The last is for a package that was found without the path.
    paths = [str(p) for p in sys.path if isinstance(p, str)] + [str(Path(__file__).parents[1])]
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, "-c", f"import sys; sys.path[:] = {paths!r}\n{code}"]
