"""Checkpoint: the files of the included model, of a directory, or of the Hugging Face hub.

`find_checkpoint` may write to the cache of the hub (HF_HOME) or of nanovllm (XDG_CACHE_HOME).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from nanovllm.config import EMBEDDED
from nanovllm.models.model_config import ModelConfig, find_family, name_architectures
from nanovllm.models.weights import EMBEDDINGS, LM_HEAD
from nanovllm.plan import FILTERS
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import located, scalar_fields, similar
from nanovllm.utils.json_files import Fields, check_field, check_fields, read_json, unreadable

if TYPE_CHECKING:
    from nanovllm.features.formats.adapter import Adapter
    from nanovllm.features.formats.quantized_checkpoint import WeightFormat

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# Names in generation_config.json -> names in SamplingParams.
SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", *FILTERS, *PENALTIES)},
    **{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"},
}
INDEX = "model.safetensors.index.json"  # which file has which tensor
# The files that are fetched from the hub. Pickles and code are never among them.
WANTED = ["*.json", "*.txt", "*.jinja", "*.model"]
SKIPPED = ["original/*", "onnx/*", "consolidated*"]


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None = None, weights: bool = True
) -> Path:
    """Return the directory that holds `model`, which may be a name of formats/gguf/named.py.

    Raises ValueError with a remedy. Weights are fetched from the hub only if `weights` is true.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be a directory or a name, not {model!r}")
    name = os.fspath(model)
    path = Path(os.path.expanduser(name))
    if name == EMBEDDED:
        path = Path(__file__).with_name(EMBEDDED)
    # os.path returns False if a parent directory is not accessible; Path can raise an error.
    if os.path.isdir(path):
        if weights and not list(path.glob("*.safetensors")) and (gguf := list(path.glob("*.gguf"))):
            from nanovllm.features.formats.gguf.named import convert_command

            raise ValueError(f"{name} has no *.safetensors; {convert_command(gguf[0])}")
        return path
    from nanovllm.features.formats.gguf.named import convert_command, find_named

    if os.path.exists(path):
        with path.open("rb") as file:
            is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"  # as a blob of Ollama
        remedy = (
            convert_command(path) if is_gguf else "give the directory that contains config.json"
        )
        raise ValueError(f"{name} is a file; {remedy}")
    if (found := find_named(name)) is not None:
        return found
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith("/"):
        remedy = f"give a directory, a hub id like Qwen/Qwen3-0.6B, {EMBEDDED!r}, or 'smollm2-135m'"
        near = similar(name, [EMBEDDED, "smollm2-135m"])
        raise ValueError(f"there is no directory {name!r}; {near or remedy}")
    from nanovllm.features.formats.hub import download

    directory = download(name, revision, WANTED, SKIPPED)
    if weights:
        commit = directory.name
        files = sorted(set(read_index(directory).values()))
        if files:  # also of an adapter, which may be beside a model
            download(name, commit, [*files, "adapter_model.safetensors"], [])
        if not any((directory / file).is_file() for file in files):
            download(name, commit, ["*.safetensors"], [*SKIPPED, "*/*"])
    return directory


def config_class(raw: dict[str, Any], path: Path) -> type[ModelConfig]:
    """Return the class that reads `raw`, the fields of the config.json at `path`.

    Raises ValueError for an architecture that is not supported.
    """
    family = find_family(raw["architectures"])[1]
    if family in ("Qwen3", "Qwen2", "Llama", "Mistral"):
        return ModelConfig
    from nanovllm.features.models.families import CONFIGS, why_refused

    if not family:
        raise ValueError(f"{path}: {why_refused(raw, path)}")
    return CONFIGS[family]


class Checkpoint:
    """A model in Hugging Face layout: the fields of its config.json, and where its weights are."""

    adapter: Adapter | None = None  # to merge into the weights; set by loading/make_engine.py

    def __init__(self, directory: Path, overrides: Mapping[str, Any] | None = None) -> None:
        """Read config.json. `overrides` replace its fields.

        Raises ValueError for a model, or a format of its weights, that is not supported.
        """
        self.directory = directory
        self.opened: dict[Path, os.stat_result] = {}  # files of weights, when they were opened
        self.is_replaced = False  # whether LLM.load_weights has stored other weights
        # Messages show this name.
        self.config_path = directory / ("config.json" + " with hf_overrides" * bool(overrides))
        self.config = read_config(directory, overrides or {})
        config_type = config_class(self.config, self.config_path)
        self.model_config = config_type.from_json(self.config, self.config_path)
        self.weight_format: WeightFormat | None = None  # of quantized weights
        # compression_config is the old name of compressed-tensors. MLX has `quantization`, and in
        # new versions also the same as quantization_config. ModelOpt may write only its own file.
        names = ("quantization_config", "compression_config", "quantization")
        fields, source = next(filter(None, map(self.config.get, names)), None), self.config_path
        path = directory / "hf_quant_config.json"
        if not fields and path.is_file():
            fields, source = read_json(path) | {"quant_method": "modelopt"}, path
        if fields:
            from nanovllm.features.formats.quantized_checkpoint import WeightFormat

            self.weight_format = WeightFormat.from_config(fields, source)

    @property
    def names(self) -> set[str]:
        """The names of the model in lower case: of its directory, and in its config.json."""
        parts = Path(os.path.abspath(self.directory)).parts
        # The hub's cache has models--Qwen--Qwen3-0.6B/snapshots/REVISION.
        name = parts[-3 if parts[-2:-1] == ("snapshots",) else -1].rpartition("--")[2]
        return {x.lower() for x in (name, Path(self.config.get("_name_or_path") or name).name)}

    def generation_defaults(self) -> tuple[frozenset[int], SamplingParams]:
        """Return the end-of-sequence tokens and the sampling parameters of generation_config.json.

        Without this file, they come from config.json and SamplingParams().
        """
        path = self.directory / "generation_config.json"
        declared = scalar_fields(SamplingParams)
        fields: Fields = {
            theirs: declared[ours][:2] for theirs, ours in SAMPLING_FIELDS.items()
        } | {"do_sample": (bool, ())}
        raw = check_fields(read_json(path), path, fields) if path.is_file() else {}
        eos, source = raw.get("eos_token_id"), path
        if eos is None:
            eos, source = self.config.get("eos_token_id"), self.config_path
        if not isinstance(eos, list):
            eos = [] if eos is None else [eos]
        eos_ids = [check_field(source, "eos_token_id", x, int, (0, math.inf)) for x in eos]
        values = {SAMPLING_FIELDS[name]: x for name, x in raw.items() if name in SAMPLING_FIELDS}
        with located(f"{path}: "):
            sampling = SamplingParams(**values)
        # Without do_sample, transformers is greedy. As in vLLM, the temperature of the file counts.
        if raw.get("do_sample") is False:
            sampling.temperature = 0.0
        return frozenset(eos_ids), sampling

    @contextmanager
    def open_weights(self, has_weights: bool = True) -> Iterator[dict[Path, Any]]:
        """Open the safetensors files, without the tensors that the model does not have.

        The files are memory-mapped: a tensor is read, and decoded if quantized, when it is used.
        There are no files if `has_weights` is false, as with load_format="dummy".
        """
        with ExitStack() as stack:

            def opened(path: Path) -> Any:
                try:
                    self.opened[path] = path.stat()
                    return stack.enter_context(safe_open(path, framework="pt"))
                except Exception as error:  # the error types of safetensors are not public
                    raise unreadable(path, "a readable safetensors file", error) from None

            paths, listed = weight_files(self.directory) if has_weights else ([], {})
            files = as_listed({path: opened(path) for path in paths}, listed)
            files = self.model_config.select_tensors(files)
            if files and self.weight_format is not None:
                files = self.weight_format.decoded(files)
            if files and self.adapter is not None:
                files = self.adapter.merged(files, opened(self.adapter.path))
            yield files

    def match_head(self, files: Mapping[Path, Any]) -> tuple[ModelConfig, bool]:
        """Return the config of the model that `files` contain, and whether it has a head.

        As in transformers, a head in the files is used unless tie_word_embeddings is true and it
        equals the embeddings, as in files of older versions: one tensor then serves for both. This
        saves the memory of a head. Without files, config.json decides.
        """
        config = self.model_config
        if any(LM_HEAD in file.keys() for file in files.values()):  # noqa: SIM118
            is_tied = config.tie_word_embeddings and self.head_equals_embeddings(files)
            has_head = True
        else:
            is_whole = not files and not config.architecture.endswith("Model")
            has_head = config.tie_word_embeddings or is_whole
            is_tied = config.tie_word_embeddings or not has_head
        return replace(config, tie_word_embeddings=is_tied), has_head

    @staticmethod
    def head_equals_embeddings(files: Mapping[Path, Any]) -> bool:
        """Compare the head in the files with the embeddings, which they may lack."""
        names = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        head = names[LM_HEAD].get_tensor(LM_HEAD)
        bits = getattr(torch, f"int{8 * head.itemsize}")  # NaN is not equal to itself
        tables = (names[name].get_tensor(name) for name in EMBEDDINGS if name in names)
        return any(  # in parts, so that little is read of tensors that differ
            (table.shape, table.dtype) == (head.shape, head.dtype)
            and all(map(torch.equal, head.view(bits).split(1024), table.view(bits).split(1024)))
            for table in tables
        )


def read_config(directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json, with `overrides`."""
    adapter, path = directory / "adapter_config.json", directory / "config.json"
    if adapter.is_file() and not list(directory.glob("model*.safetensors*")):
        base = read_json(adapter).get("base_model_name_or_path")
        raise ValueError(
            f"{directory} is an adapter; load it with its base model: "
            f"LLM({base!r:.200}, adapter={os.fspath(directory)!r})"
        )
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: it is not in Hugging Face layout")
    raw = read_json(path)
    if isinstance(raw.get("text_config"), dict):
        from nanovllm.features.models.text_config import with_text_config

        raw = with_text_config(raw)
    if overrides:
        from nanovllm.features.formats.hf_overrides import override

        raw = override(raw, overrides)
    return raw | {"architectures": name_architectures(raw)}


def read_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, as a path relative to `directory`; empty without an index."""
    path = directory / INDEX
    raw = read_json(path).get("weight_map") if path.is_file() else None
    return {
        name: check_field(path, f"weight_map[{name!r}]", file, str, ())
        for name, file in check_field(path, "weight_map", raw or {}, dict, ()).items()
    }


def weight_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the safetensors files, and which of them has which tensor, if an index says it.

    The index decides, also about other files in the directory, unless it is left from weights that
    are not there. Raises ValueError if there are no files, or only some of those in the index.
    """
    listed = {name: directory / file for name, file in read_index(directory).items()}
    paths = sorted(set(listed.values()))
    absent = [path for path in paths if not path.is_file()]
    if paths and not absent:
        return paths, listed
    shards = sorted(directory.glob("model*.safetensors"))
    if absent and (not shards or len(absent) < len(paths)):
        name = os.path.relpath(absent[0], directory)
        more = f" and {len(absent) - 1} more" * (len(absent) > 1)
        raise ValueError(
            f"{directory} has no {name}{more}, which {INDEX} names; fetch the checkpoint again"
        )
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else shards or sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{directory} has no *.safetensors, such as model.safetensors. Pickled weights (*.bin, "
            "*.pt) can run code and are not read: convert them with model.save_pretrained of "
            "transformers"
        )
    return files, {}


def as_listed(files: dict[Path, Any], listed: Mapping[str, Path]) -> dict[Path, Any]:
    """Return the open files, each without the tensors that the index reads from another file."""
    names = {path: dict.fromkeys(file.keys()) for path, file in files.items()}
    for path, file in files.items():
        kept = [x for x in names[path] if path == (of := listed.get(x, path)) or x not in names[of]]
        if len(kept) < len(names[path]):
            from nanovllm.features.formats.tensor_view import TensorView, viewed

            files[path] = TensorView((name, viewed(file, name)) for name in kept)
    return files
