"""Fetches checkpoints from the Hugging Face hub."""

from pathlib import Path

from nanovllm.config import EMBEDDED


def download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the directory in the cache of the hub (HF_HOME) with the files that match `patterns`.

    Raises ValueError with a remedy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a directory and not a valid hub id: {error}") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the hub has no model {name!r}, or it is private; check the spelling, or set HF_TOKEN"
        ) from None
    except Exception as error:  # for example: no network, a wrong revision
        raise ValueError(
            f"{name!r} is not a local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}). "
            "Give a local directory, set HF_ENDPOINT to a mirror, or set HF_HOME to a cache that "
            f"has the model already; {EMBEDDED!r} needs no hub"
        ) from error
