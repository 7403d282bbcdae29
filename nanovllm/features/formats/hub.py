"""Fetches checkpoints from the Hugging Face hub."""

from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import EMBEDDED
from nanovllm.utils.log import logger


def download(name: str, revision: str | None, patterns: list[str], skipped: list[str]) -> Path:
    """Return the directory in the cache of the hub (HF_HOME) with the files that match `patterns`.

    Files that match `skipped` are not fetched. If the hub cannot be reached, and other programs
    have fetched some of the files, a warning names missing ones. Raises ValueError with a remedy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": skipped}
    fetch = partial(snapshot_download, name, revision=revision, **options)
    try:
        try:
            return Path(fetch())
        except LocalEntryNotFoundError:  # the hub cannot be reached
            return Path(fetch(local_files_only=True))
    except Exception as error:  # for example: no network, no such model, a wrong revision
        # IncompleteSnapshotError of new versions of huggingface_hub has this field.
        if (found := getattr(error, "snapshot_path", None)) is not None:
            logger.warning(f"{name!r} is loaded from an incomplete cache. {error}")
            return Path(found)
        raise ValueError(
            f"{name!r} is not a local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}). "
            "Check the spelling, give a local directory, set HF_TOKEN if the model is private, set "
            "HF_ENDPOINT to a mirror, or set HF_HOME to a cache that has the model already; "
            f"{EMBEDDED!r} needs no hub"
        ) from error
