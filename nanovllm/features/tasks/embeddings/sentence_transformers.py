"""Reads the settings of a sentence-transformers checkpoint.

If the engine does not support a setting, a request for an embedding raises an error that names it.
"""

import math
import os
from pathlib import Path

from nanovllm.features.tasks.embeddings.pooling import PoolingSettings
from nanovllm.utils.json_files import Fields, check_field, check_fields, named, read_json, unusual

OLD = "pooling_mode_"
FIELDS: Fields = {
    "prompts": (dict, ()),
    "default_prompt_name": (str, ()),
    "truncate_dim": (int, (1, math.inf)),
}
# Fields of sentence_bert_config.json, which says how a text is read, and those without effect.
TEXT_FIELDS: Fields = {"max_seq_length": (int, (1, math.inf)), "do_lower_case": (bool, ())}
UNUSED = ("transformer_task", "module_output_name", "unpad_inputs")


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
    modules = read_modules(directory)
    path = modules.get("Transformer", directory) / "sentence_bert_config.json"
    fields = check_fields(read_json(path), path, TEXT_FIELDS) if os.path.isfile(path) else {}
    if "message" not in fields.get("modality_config", {}):  # a text is no message of a chat
        fields.pop("modality_config", None)
    others = unusual(fields, (*TEXT_FIELDS, *UNUSED))
    if (path := directory / "modules.json").is_file():
        refused = why_refused(path, modules)
        if others and not refused:
            refused = f"no embeddings: {named(others)} of {path.parent} is not supported"
    return PoolingSettings(
        size=size,
        refused=refused,
        dimensions=raw.get("truncate_dim"),
        normalize="Normalize" in modules or not path.is_file(),
        prompts=prompts,
        prompt_name=name,
        max_seq_length=fields.get("max_seq_length"),
        lower_case=fields.get("do_lower_case", False),
        others=others,
    )


def read_modules(directory: Path) -> dict[str, Path]:
    """Return the modules of a checkpoint: class -> directory. Empty without modules.json.

    Raises ValueError for a broken file.
    """
    path = directory / "modules.json"
    modules = {}
    for module in read_json(path, list) if path.is_file() else []:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ValueError(f"{path}: the module {module!r:.80} has no 'type'")
        modules[module["type"].rpartition(".")[2]] = directory / str(module.get("path", ""))
    return modules


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
