"""Converts a GGUF file to a checkpoint in Hugging Face layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.features.formats.gguf.gguf_tokenizer import read_tokenizer
from nanovllm.features.formats.gguf.reader import GGUF
from nanovllm.utils.json_files import read_json
from nanovllm.utils.log import progress_bar

SHARD_BYTES = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def convert(source: Path, target: Path, dtype: str = "bfloat16", run_in: str | None = None) -> None:
    """Convert a GGUF file to the directory `target`, which must not exist yet.

    The weights are stored in `dtype`. `run_in` is the dtype in which LLM() computes by default, if
    it is not `dtype`.

    Raises ValueError if the file is broken or not supported, and OSError if `target` cannot be
    written. The directory has a temporary name, which begins with a dot, until it is complete.
    """
    file = GGUF(source)
    raw = file.config(run_in or dtype)
    config = file.config_class.from_json(raw, source)
    model = config.model_class().on_meta(config)
    expected = {t.name: t.shape for t in model.checkpoint_tensors()}
    if wrong := expected.keys() ^ file.tensors.keys():
        has = "has no" if min(wrong) in expected else "has the unknown"
        raise ValueError(f"{source} {has} tensor {min(wrong)!r}")
    for name, tensor in file.tensors.items():
        shape = tuple(tensor.shape.tolist()[::-1])  # GGUF has the innermost dimension first
        if shape != expected[name]:
            raise ValueError(
                f"{source} has the tensor {name!r} with the shape {shape}, but its metadata say "
                f"{expected[name]}; download the file again, or convert the original weights"
            )
    if target.exists():
        raise ValueError(f"{target} exists; remove it or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        read_tokenizer(file).save_pretrained(temporary)
        path = temporary / "tokenizer_config.json"
        # transformers drops this field.
        adds_eos = bool(file.field("tokenizer.ggml.add_eos_token"))
        path.write_text(json.dumps(read_json(path) | {"add_eos_token": adds_eos}, indent=2))
        (temporary / "config.json").write_text(json.dumps(raw, indent=2))
        generation = {"do_sample": False, "eos_token_id": raw["eos_token_id"]}
        (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2))
        weights = file.weights(config, DTYPES[dtype])
        bar = progress_bar(f"Converting {source.name}", "tensor", weights, len(expected))
        save_weights(bar, temporary)
        temporary.chmod(0o755)
        temporary.rename(target)  # fails if another process has made `target`
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_weights(weights: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Save weights in files of about SHARD_BYTES, with an index of their names."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}

    def save() -> None:
        path = directory / f"model-{len(set(weight_map.values())):05}.safetensors"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:  # for example if the disk is full
            raise OSError(f"{path} cannot be written: {error}") from None
        path.chmod(0o644)  # the same permissions as the other files
        weight_map.update(dict.fromkeys(shard, path.name))
        shard.clear()

    for name, tensor in weights:
        shard[name] = tensor
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            save()
    if shard:
        save()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
