"""Finds a checkpoint: the embedded one, a local directory, or one on the Hugging Face hub.

It may write to the hub's cache (HF_HOME).
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

from nanovllm.api.checks import scalar_fields
from nanovllm.api.config import EMBEDDED
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.models.config import check_field, check_fields, read_json
from nanovllm.plan import FILTERS

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # no pickles, no code


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None = None, weights: bool = True
) -> Path:
    """Return the directory that holds `model`. Raises ValueError with a remedy.

    Weights are fetched from the hub only if `weights` is true.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be a directory or a name, not {model!r}")
    name = os.fspath(model)
    if not name:
        raise ValueError(f"model is empty; give a directory, a hub id, or {EMBEDDED!r}")
    patterns = WANTED if weights else [w for w in WANTED if "tensors" not in w]
    path = Path(os.path.expanduser(name))
    if name == EMBEDDED:
        path = Path(__file__).with_name(EMBEDDED)
        if not path.is_dir():
            raise ValueError(
                f"{path} is not a directory; pip install the package, do not import it from a zip file"
            )
    # Unlike Path's methods, these are false also where a directory above may not be entered.
    if os.path.isdir(path):
        check_files(path, patterns)
        return path
    if os.path.exists(path):
        raise ValueError(f"{name} is a file; give the directory that holds config.json beside it")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise ValueError(
            f"there is no directory {name!r}; give a local directory, a hub id like "
            f"'Qwen/Qwen3-0.6B', or {EMBEDDED!r} for the embedded model"
        )
    path = _download(name, revision, patterns)
    check_files(path, patterns)
    return path


def check_files(directory: Path, patterns: list[str]) -> None:
    """Raise ValueError for a file that cannot be read. Opening a FIFO would wait for a writer."""
    for path in sorted(path for pattern in patterns for path in directory.glob(pattern)):
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError("it is not a regular file")
            path.open("rb").close()
        except OSError as error:  # a dangling link, a loop of links, no permission
            raise ValueError(
                f"{path} cannot be read ({error.strerror or error}); replace or remove it"
            ) from None


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
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
    except Exception as error:  # huggingface_hub raises many: offline, revision, proxy
        raise ValueError(
            f"{name!r} is not a local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}). "
            "Give a local directory, set HF_ENDPOINT to a mirror, or set HF_HOME to a cache that "
            f"has the model already; {EMBEDDED!r} needs no hub"
        ) from error


def config_file(directory: Path) -> Path:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{directory} has no config.json; it is not a model in Hugging Face layout"
        )
    return path


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files, from the index if any. Raises ValueError if there are none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(n, str) and n == os.path.basename(n) for n in names):
            raise ValueError(
                f"{index} needs a 'weight_map' from the names of tensors to those of files beside "
                f"it, not {weight_map!r:.200}"
            )
        names = sorted(set(names))
        # Path.is_file would raise OSError for a name that is too long.
        missing = [name for name in names if not os.path.isfile(directory / name)]
        if missing:
            raise ValueError(f"{index} names missing files: {', '.join(missing):.200}")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = [p.name for pattern in PICKLES for p in sorted(directory.glob(pattern))]
    if pickles:
        raise ValueError(
            f"{directory} holds only pickle weights ({', '.join(pickles[:3])}), which can run code "
            "when loaded; convert them to safetensors (transformers: model.save_pretrained)"
        )
    raise ValueError(
        f"{directory} has no *.safetensors weights (load_format='dummy' needs config.json only and "
        "makes random weights)"
    )


# Names in generation_config.json -> names in SamplingParams.
SAMPLING_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"} | {
    name: name for name in ("temperature", *FILTERS, "repetition_penalty")
}


def generation_defaults(directory: Path) -> tuple[frozenset[int], SamplingParams]:
    """Return the end-of-sequence tokens and the sampling parameters of generation_config.json.

    Without this file they are those of config.json and SamplingParams().
    """
    path = directory / "generation_config.json"
    has_file = path.is_file()
    raw = check_fields(read_json(path), path) if has_file else {}
    eos, source = raw.get("eos_token_id"), path
    if eos is None:
        source = directory / "config.json"
        eos = read_json(source).get("eos_token_id")
    listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
    eos_ids = [check_field(source, "eos_token_id", x, int, (0, math.inf)) for x in listed]
    declared = scalar_fields(SamplingParams)
    fields = {
        ours: check_field(path, theirs, raw[theirs], *declared[ours][:2])
        for theirs, ours in SAMPLING_FIELDS.items()
        if theirs in raw
    }
    try:
        sampling = SamplingParams(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    # transformers' default is greedy, so a file that does not mention sampling is greedy.
    if has_file and not raw.get("do_sample"):
        sampling.temperature = 0.0
    return frozenset(eos_ids), sampling
