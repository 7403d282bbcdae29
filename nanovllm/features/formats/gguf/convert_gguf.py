"""Converts a GGUF file, of llama.cpp, to a checkpoint in Hugging Face layout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.features.formats.gguf.gguf_tokenizer import read_tokenizer
from nanovllm.features.models.gemma3 import Gemma3Config
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.rope import RopeConfig
from nanovllm.utils.json_files import read_json
from nanovllm.utils.log import progress_bar

SHARD_BYTES = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# `general.architecture` -> the architecture, and whether llama.cpp has reordered q and k.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),  # also Mistral
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "gemma3": ("Gemma3ForCausalLM", False),  # whose norms are stored as 1 + w
}
# Fields of config.json -> GGUF fields, without the architecture prefix.
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
GEMMA3 = {
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_type": "rope.scaling.type",
    "rope_factor": "rope.scaling.factor",
}
GEMMA3_27B = 62  # layers, by which llama.cpp knows the scale of its scores
# Other fields, with the values that change nothing.
USUAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "pooling_type": (0, 3),  # none, or the last token's embedding
    "rope.scale_linear": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
}
# Fields that are checked by the shapes of tensors, or have no effect without the ones above.
UNUSED = """
    attention.value_length rope.dimension_count rope.scaling.finetuned
    rope.scaling.original_context_length tensor_data_layout vocab_size
"""
OPTIONAL = {"head_dim", "num_key_value_heads", "rope_theta"}
EMBEDDINGS = "token_embd.weight"
# The divisors of the rope frequencies [D / 2] of Llama 3.1 and later.
ROPE_DIVISORS = "rope_freqs.weight"
# Llama 3.1 to 3.3 have these values in common. The factor is the largest divisor.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(source: Path, target: Path, dtype: str = "bfloat16", run_in: str | None = None) -> None:
    """Convert a GGUF file to the directory `target`, which must not exist yet.

    The weights are stored in `dtype`. `run_in` is the dtype in which LLM() computes by default, if
    it is not `dtype`.

    Raises ValueError if the file is broken or not supported, and OSError if `target` cannot be
    written. The directory has a temporary name, which begins with a dot, until it is complete.
    """
    file = GGUF(source)
    raw = file.config(run_in or dtype)
    if target.exists():
        raise ValueError(f"{target} exists; remove it or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        directory = Path(temporary) / target.name
        directory.mkdir()
        read_tokenizer(file).save_pretrained(directory)
        path = directory / "tokenizer_config.json"
        # transformers drops this field.
        adds_eos = bool(file.field("tokenizer.ggml.add_eos_token"))
        path.write_text(json.dumps(read_json(path) | {"add_eos_token": adds_eos}, indent=2))
        (directory / "config.json").write_text(json.dumps(raw, indent=2))
        generation = {"do_sample": False, "eos_token_id": raw["eos_token_id"]}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
        weights = file.weights(file.config_class.from_json(raw, source), DTYPES[dtype])
        bar = progress_bar(f"Converting {source.name}", "tensor", weights, len(file.tensors))
        save_weights(bar, directory)
        directory.rename(target)  # fails if another process has made `target`


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


class GGUF:
    """A GGUF file. Raises ValueError if it cannot be read or describes another kind of model."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError("GGUF files need the package gguf: pip install gguf") from None
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # gguf raises many types for a broken file
            raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from error
        if (count := self.field("split.count") or 1) > 1:
            raise ValueError(
                f"{path} is one of {count} parts; merge them with llama-gguf-split --merge"
            )
        self.kind = self.field("general.architecture")
        if self.kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path} has the architecture {self.kind!r}; supported are {known}")
        self.architecture, self.is_reordered = ARCHITECTURES[self.kind]
        is_gemma = self.kind == "gemma3"
        self.fields = FIELDS | (GEMMA3 if is_gemma else {})
        self.config_class = Gemma3Config if is_gemma else ModelConfig
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        divisors = self.tensors.pop(ROPE_DIVISORS, None)
        self.rope_divisors = None if divisors is None else torch.tensor(divisors.data)

    def field(self, name: str) -> Any:
        found = self.reader.get_field(name)
        return None if found is None else found.contents()

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the fields of config.json. Raises ValueError for unsupported fields."""
        prefix = f"{self.kind}."
        names = {
            name.removeprefix(prefix) for name in self.reader.fields if name.startswith(prefix)
        }
        for name in sorted(names - {*self.fields.values(), *UNUSED.split()}):
            value = self.field(prefix + name)
            if value not in USUAL[name] if name in USUAL else value:
                raise ValueError(f"{self.path} has {name} {value!r:.80}, which is not supported")
        found = {ours: self.field(prefix + theirs) for ours, theirs in self.fields.items()}
        raw = {name: value for name, value in found.items() if value is not None}
        if missing := FIELDS.keys() - OPTIONAL - raw.keys():
            raise ValueError(f"{self.path} has no field {prefix}{FIELDS[min(missing)]}")
        if EMBEDDINGS not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {EMBEDDINGS}")
        # A turn of a chat may end with another token than a text.
        kinds = ("eos", "eot", "eom")
        ends = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        raw |= {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": int(self.tensors[EMBEDDINGS].shape[1]),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "torch_dtype": dtype,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "_name_or_path": self.field("general.name"),
        }
        if self.rope_divisors is not None:
            raw["rope_scaling"] = {**LLAMA3, "factor": float(self.rope_divisors.max())}
        if self.kind == "gemma3":
            scaling = {"rope_type": raw.pop("rope_type", ""), "factor": raw.pop("rope_factor", 1)}
            is_27b = raw["num_hidden_layers"] == GEMMA3_27B
            size = raw["hidden_size"] / raw["num_attention_heads"] if is_27b else raw["head_dim"]
            raw |= {"hidden_act": None, "query_pre_attn_scalar": size}
            raw["rope_scaling"] = scaling if scaling["factor"] > 1 else None
        config = self.config_class.from_json(raw, self.path)
        if self.field(prefix + "rope.dimension_count") not in (None, config.head_dim):
            raise ValueError(f"{self.path} rotates a part of each head, which is not supported")
        if (divisors := self.rope_divisors) is not None:
            whole, _ = RopeConfig(config.rope.rope_theta).frequencies(config.head_dim)
            expected = whole / config.rope.frequencies(config.head_dim)[0]
            if divisors.shape != expected.shape or not divisors.allclose(expected, rtol=1e-4):
                raise ValueError(f"{self.path} has a {ROPE_DIVISORS} that is not of Llama 3.1-3.3")
        return raw

    def weights(self, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with their names in Hugging Face layout, one after the other.

        Raises ValueError unless the file has exactly the tensors of a model with this config.
        """
        import gguf

        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.kind.upper()], config.num_layers)
        expected = {
            str(names.get_name(tensor.name, (".weight", ".bias"))): tensor
            for tensor in config.model_class().on_meta(config).checkpoint_tensors()
        }
        if wrong := expected.keys() ^ self.tensors.keys():
            has = "has no" if min(wrong) in expected else "has the unknown"
            raise ValueError(f"{self.path} {has} tensor {min(wrong)!r}")
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape.tolist()[::-1])  # GGUF has the innermost dimension first
            if shape != expected[name].shape:
                raise ValueError(
                    f"{self.path} has the tensor {name!r} with the shape {shape}, but its metadata "
                    f"say {expected[name].shape}; download the file again, or convert the original "
                    "weights"
                )
            try:
                values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            except NotImplementedError as error:
                raise ValueError(f"{self.path}: gguf cannot dequantize {name!r}: {error}") from None
            if self.is_reordered and (number := heads.get(name.split(".")[-2])):
                # llama.cpp rotates neighbours; the model here rotates halves of a head.
                pairs = values.view(number, -1, 2, *values.shape[1:])
                values = pairs.transpose(1, 2).reshape(values.shape)
            if self.kind == "gemma3" and name.endswith("norm.weight"):
                values -= 1
            yield expected[name].name, values.to(dtype).contiguous()
