"""Converts a GGUF file to a checkpoint that LLM() loads.

  nanovllm convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2/
  nanovllm chat --model smollm2/

The package gguf (pip install gguf) dequantizes the weights. They are stored in bfloat16 by default,
in files of about 1 GiB. OUT appears when it is complete. Its default is greedy sampling.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3

# `general.architecture` -> the architecture, and whether llama.cpp has reordered q and k.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),  # also Mistral
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}
# Names of tensors. "blk.N." is "model.layers.N.".
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
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
OPTIONAL = {"head_dim", "num_key_value_heads", "rope_theta"}
EMBEDDINGS = "model.embed_tokens.weight"
SHARD_BYTES = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GGUF:
    """A GGUF file. Raises ValueError if it cannot be read or describes another kind of model."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError("GGUF files need the package gguf: pip install gguf") from None
        self.path, self.dequantize = path, gguf.quants.dequantize
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # gguf raises many types for a broken file
            raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
        self.kind = self.field("general.architecture")
        if self.kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path} has the architecture {self.kind!r}; supported are {known}")
        self.architecture, self.is_reordered = ARCHITECTURES[self.kind]
        self.tensors = {self.name_of(tensor.name): tensor for tensor in self.reader.tensors}

    def name_of(self, name: str) -> str:
        """Return the Hugging Face name of a GGUF tensor, such as blk.0.attn_q.weight."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in NAMES:
            raise ValueError(f"{self.path} has the tensor {name!r}, which is not supported")
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        return f"{prefix}{NAMES[match[2]]}.{match[3]}"

    def field(self, name: str) -> Any:
        found = self.reader.get_field(name)
        return None if found is None else found.contents()

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the fields of config.json."""
        for name, usual in (("rope.scaling.type", "none"), ("attention.sliding_window", 0)):
            if (value := self.field(f"{self.kind}.{name}")) not in (None, usual):
                raise ValueError(f"{self.path} has {name} {value!r}, which is not supported")
        raw = {ours: self.field(f"{self.kind}.{theirs}") for ours, theirs in FIELDS.items()}
        for name, value in raw.items():
            if value is None and name not in OPTIONAL:
                raise ValueError(f"{self.path} has no field {self.kind}.{FIELDS[name]}")
        if EMBEDDINGS not in self.tensors:
            raise ValueError(f"{self.path} has no tensor token_embd.weight")
        raw = {name: value for name, value in raw.items() if value is not None}
        raw |= {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": int(self.tensors[EMBEDDINGS].shape[1]),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": dtype,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
        }
        return raw

    def weights(self, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with their names in Hugging Face layout, one after the other."""
        for name, tensor in self.tensors.items():
            try:
                values = torch.tensor(self.dequantize(tensor.data, tensor.tensor_type))
            except NotImplementedError as error:
                raise ValueError(f"{self.path}: gguf cannot dequantize {name!r}: {error}") from None
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            if self.is_reordered and (number := heads.get(name.split(".")[-2])):
                # llama.cpp rotates neighbours; the model here rotates halves of a head.
                pairs = values.view(number, -1, 2, *values.shape[1:])
                values = pairs.transpose(1, 2).reshape(values.shape)
            yield name, values.to(dtype).contiguous()

    def tokenizer(self) -> Any:
        """Return the tokenizer, as transformers reads it, with the chat template of the file."""
        from transformers import AutoTokenizer

        directory, name = str(self.path.parent), self.path.name
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
        except Exception as error:  # of many types
            raise ValueError(
                f"transformers cannot read the tokenizer of {self.path}: {error!r:.300}"
            ) from error
        tokens = self.field("tokenizer.ggml.tokens")
        ids = range(0, len(tokens), max(1, len(tokens) // 500))
        if wrong := [i for i in ids if tokenizer.convert_ids_to_tokens(i) != tokens[i]]:
            kind = self.field("tokenizer.ggml.model")
            raise ValueError(
                f"{self.path} has a tokenizer of the kind {kind!r}, of which transformers reads "
                f"token {wrong[0]} differently; it is not supported"
            )
        tokenizer.chat_template = self.field("tokenizer.chat_template")
        return tokenizer


def convert(source: Path, target: Path, dtype: str = "bfloat16", use_tqdm: bool = True) -> None:
    """Convert a GGUF file to the directory `target`, which must not exist yet.

    Raises ValueError for a file that is broken or not supported, OSError if it cannot be written.
    """
    file = GGUF(source)
    raw = file.config(dtype)
    config = ModelConfig.from_json(raw, source)
    if file.field(f"{file.kind}.rope.dimension_count") not in (None, config.head_dim):
        raise ValueError(f"{source} rotates a part of each head, which is not supported")
    expected = {tensor.name for tensor in Qwen3.on_meta(config).checkpoint_tensors()}
    if wrong := expected ^ file.tensors.keys():
        has = "has no" if min(wrong) in expected else "has the unknown"
        raise ValueError(f"{source} {has} tensor {min(wrong)!r}")
    if target.exists():
        raise ValueError(f"{target} exists; remove it or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        file.tokenizer().save_pretrained(temporary)
        (temporary / "config.json").write_text(json.dumps(raw, indent=2))
        generation = {"do_sample": False, "eos_token_id": raw["eos_token_id"]}
        (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2))
        weights = file.weights(config, DTYPES[dtype])
        size, show = len(expected), use_tqdm and sys.stderr.isatty()
        save_weights(tqdm(weights, "Converting", size, unit="tensor", disable=not show), temporary)
        temporary.chmod(0o755)
        temporary.rename(target)  # fails if another process has made it meanwhile
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_weights(weights: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Save weights in files of about SHARD_BYTES, with an index of their names."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)  # as the other files
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        shard[name] = tensor
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            save()
    if shard:
        save()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm convert", description=__doc__, formatter_class=raw)
    parser.add_argument("source", metavar="IN.gguf", type=Path, help="a GGUF file")
    parser.add_argument("target", metavar="OUT", type=Path, help="a new directory")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of OUT (%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        convert(args.source, args.target, args.dtype)
    except (OSError, ValueError) as error:
        print(f"nanovllm convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{args.target} is complete; try: nanovllm chat --model {args.target}")
    return 0
