"""GGUF: a file of llama.cpp, read as the configuration and the weights of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.models.gemma3 import Gemma3Config
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.rope import RopeConfig

# `general.architecture` -> the architecture, and whether llama.cpp has reordered q and k.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),  # also Mistral
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "gemma3": ("Gemma3ForCausalLM", False),  # whose norms are stored as 1 + w
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
GEMMA3_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
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
    "pooling_type": (0, 3),  # no embeddings, or those of the last token
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
EMBEDDINGS = "model.embed_tokens.weight"
# The divisors of the rope frequencies [D / 2] of Llama 3.1 and later.
ROPE_DIVISORS = "rope_freqs.weight"
# Llama 3.1 to 3.3 have these values in common. The factor is the largest divisor.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUF:
    """A GGUF file. Raises ValueError if it cannot be read or describes another kind of model."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError("GGUF files need the package gguf: pip install gguf") from None
        self.path = path
        self.dequantize = gguf.quants.dequantize
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
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
        self.fields = FIELDS | (GEMMA3 if self.kind == "gemma3" else {})
        self.names = NAMES | (GEMMA3_NAMES if self.kind == "gemma3" else {})
        self.config_class = Gemma3Config if self.kind == "gemma3" else ModelConfig
        stored = {tensor.name: tensor for tensor in self.reader.tensors}
        divisors = stored.pop(ROPE_DIVISORS, None)
        self.rope_divisors = None if divisors is None else torch.tensor(divisors.data)
        self.tensors = {self.name_of(name): tensor for name, tensor in stored.items()}

    def name_of(self, name: str) -> str:
        """Return the Hugging Face name of a GGUF tensor, such as blk.0.attn_q.weight."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in self.names:
            raise ValueError(f"{self.path} has the tensor {name!r}, which is not supported")
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        return f"{prefix}{self.names[match[2]]}.{match[3]}"

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
            raise ValueError(f"{self.path} has no tensor token_embd.weight")
        # A turn of a chat may end with a token of its own.
        kinds = ("eos", "eot", "eom")
        ends = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        raw |= {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": int(self.tensors[EMBEDDINGS].shape[1]),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": dtype,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
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
            if self.kind == "gemma3" and name.endswith("norm.weight"):
                values -= 1
            yield name, values.to(dtype).contiguous()
