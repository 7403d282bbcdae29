"""Reads the pooling settings of a sentence-transformers checkpoint.

If the engine does not support a setting, a request for an embedding raises an error that names it.
"""

import math
import os
from pathlib import Path

from nanovllm.features.requests.embeddings.pooling import PoolingSettings
from nanovllm.utils.json_files import Fields, check_field, check_fields, read_json

OLD = "pooling_mode_"
FIELDS: Fields = {
    "prompts": (dict, ()),
    "default_prompt_name": (str, ()),
    "truncate_dim": (int, (1, math.inf)),
}


def read_pooling_settings(directory: Path, size: int) -> PoolingSettings:
    """Return the settings of the checkpoint in `directory`. `size` is its hidden size.

    Without modules.json the defaults of PoolingSettings apply. Raises ValueError for a broken file.
    """
    path = directory / "config_sentence_transformers.json"
    raw = check_fields(read_json(path), path, FIELDS) if path.is_file() else {}
    prompts = raw.get("prompts", {})
    name = raw.get("default_prompt_name")
    for text in prompts.values():
        check_field(path, "a prompt", text, str, ())
    if name not in (None, *prompts):
        raise ValueError(f"{path}: default_prompt_name {name!r} is none of the prompts")
    refused = ""
    normalize = True
    path = directory / "modules.json"
    if path.is_file():
        kinds = {}
        for module in read_json(path, list):
            if not isinstance(module, dict) or not isinstance(module.get("type"), str):
                raise ValueError(f"{path}: the module {module!r:.80} has no 'type'")
            kinds[module["type"].rpartition(".")[2]] = directory / str(module.get("path", ""))
        refused = why_refused(path, kinds)
        normalize = "Normalize" in kinds
    return PoolingSettings(size, refused, raw.get("truncate_dim"), normalize, prompts, name)


def why_refused(path: Path, kinds: dict[str, Path]) -> str:
    """Return why these modules (class -> directory) are not supported, or an empty string."""
    others = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if others or not {"Transformer", "Pooling"} <= kinds.keys():
        return (
            f"no embeddings: {path} has the modules {', '.join(kinds)}; supported are Transformer, "
            "Pooling and Normalize. Use sentence-transformers for this checkpoint"
        )
    path = kinds["Pooling"] / "config.json"
    config = read_json(path) if os.path.isfile(path) else {}  # a name may be too long for Path
    # The older format has a bool for each mode.
    old = [name.removeprefix(OLD) for name, on in config.items() if name.startswith(OLD) and on]
    modes = config.get("pooling_mode", old or "mean")
    if modes in ("lasttoken", ["lasttoken"]):
        return ""
    return (
        f"no embeddings: {path} has the pooling mode {modes!r}; only 'lasttoken' is supported. Use "
        "sentence-transformers for this checkpoint"
    )
