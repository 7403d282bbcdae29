"""Fetches checkpoints from the Hugging Face hub."""

from functools import partial
from pathlib import Path

from nanovllm.config import EMBEDDED
from nanovllm.utils.log import logger


def download(name: str, revision: str | None, patterns: list[str], skipped: list[str]) -> Path:
    """Return the directory in the cache of the hub (HF_HOME) with the files that match `patterns`.

    Files that match `skipped` are not fetched. If the hub cannot be reached, and other programs
    have fetched some of the files, a warning names missing ones. Raises ValueError with a remedy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    options = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": skipped}
    fetch = partial(snapshot_download, name, **options)
    try:
        return Path(fetch())
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a directory and not a valid hub id: {error}") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the hub has no model {name!r}, or it is private; check the spelling, or set HF_TOKEN"
        ) from None
    except Exception as error:  # for example: no network, a wrong revision
        if isinstance(error, LocalEntryNotFoundError):  # the hub cannot be reached
            try:
                return Path(fetch(local_files_only=True))
            except LocalEntryNotFoundError as local_error:
                # IncompleteSnapshotError of new versions of huggingface_hub has this field.
                if (found := getattr(local_error, "snapshot_path", None)) is not None:
                    logger.warning(f"{name!r} is loaded from an incomplete cache. {local_error}")
                    return Path(found)
        raise ValueError(
            f"{name!r} is not a local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}). "
            "Give a local directory, set HF_ENDPOINT to a mirror, or set HF_HOME to a cache that "
            f"has the model already; {EMBEDDED!r} needs no hub"
        ) from error
