"""Defines the requests and models of benchmarks: the tables WORKLOADS and SHAPES.

Python's `random` with seed 0 draws the requests, so they are the same on every machine. The weights
of a shape are random, as with load_format="dummy" and seed 0, and nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EMBEDDED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Spec:
    """Requests whose lengths are drawn uniformly.

    model: a shape. alone: one request at a time.
    long_every: every prompt with a number divisible by it is 10 times as long.
    chats: the requests are in chats.json instead. rows: max_num_seqs, unless it is set.
    """

    help: str
    count: int
    input: tuple[int, int]
    output: tuple[int, int]
    model: str | None = None
    prefix: int = 0
    turns: int = 1
    alone: bool = False
    long_every: int = 0
    chats: bool = False
    rows: int | None = None

    def __str__(self) -> str:
        if self.chats:
            return f"{self.help}; {self.model}"
        prompt, output = ("-".join(map(str, sorted({*ends}))) for ends in (self.input, self.output))
        return f"{self.help}; {self.count} x {prompt} in, {output} out; {self.model or EMBEDDED}"


WORKLOADS = {
    "short": Spec("short requests", 64, (16, 128), (16, 128)),
    "nano": Spec("nano-vllm's benchmark", 256, (100, 1024), (100, 1024), "qwen3-0.6b"),
    "cpu-mixed": Spec("mixed lengths on a CPU", 16, (64, 256), (16, 128), "qwen3-0.6b"),
    "hybrid": Spec("cpu-mixed with linear attention", 16, (64, 256), (16, 128), "qwen3.5-0.8b"),
    "moe": Spec("cpu-mixed with experts", 16, (64, 256), (16, 128), "cpu-moe"),
    "cpu-prefix": Spec("one prefix of 512", 16, (32, 32), (32, 32), "qwen3-0.6b", prefix=512),
    "cpu-small": Spec("many requests, small model", 64, (100, 512), (50, 256), "cpu-small"),
    "prefix": Spec("one prefix of 512 tokens for all", 64, (16, 64), (16, 64), prefix=512),
    "chat": Spec("conversations of 4 turns", 16, (16, 48), (16, 48), turns=4),
    "long": Spec("long prompts: prefill", 16, (8192, 8192), (16, 16), "qwen3-0.6b"),
    "mixed": Spec("every eighth prompt is 10 x as long", 64, (16, 64), (16, 128), long_every=8),
    "many": Spec("many short requests; see --host-only", 100_000, (4, 12), (1, 8)),
    "chat-real": Spec(
        "real chats, 2 turns", 16, (0, 0), (0, 0), "smollm2-135m", turns=2, chats=True
    ),
    # Short answers of different lengths: a prompt joins nearly every step.
    "stream": Spec("a stream of requests", 512, (64, 64), (16, 48), "qwen3-0.6b", rows=64),
    "latency": Spec("one request at a time", 4, (16, 128), (128, 128), alone=True),
    "pp512": Spec("llama-bench's pp512: one prompt", 1, (512, 512), (1, 1), alone=True),
    "tg128": Spec("llama-bench's tg128: one output", 1, (1, 1), (128, 128), alone=True),
}

SHAPE_FIELDS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim vocab_size tie_word_embeddings max_position_embeddings"
)
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True, 40_960),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True, 40_960),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True, 40_960),
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 128, 151_936, False, 40_960),
    "qwen3-14b": (5120, 17_408, 40, 40, 8, 128, 151_936, False, 40_960),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 128, 152_064, False, 32_768),
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, 256, 248_320, True, 262_144),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 128, 151_936, False, 40_960),
    "qwen3.5-35b-a3b": (2048, 1, 40, 16, 2, 256, 248_320, False, 262_144),
    "cpu-small": (256, 768, 4, 4, 2, 64, 4096, True, 4096),
    "cpu-moe": (1024, 3072, 8, 16, 8, 128, 151_936, True, 40_960),
}
# The value heads of linear attention.
LINEAR_VALUE_HEADS = {"qwen3.5-0.8b": 16, "qwen3.5-35b-a3b": 32}
# num_experts, num_experts_per_tok, moe_intermediate_size
EXPERTS = {
    "qwen3-30b-a3b": (128, 8, 768),
    "qwen3.5-35b-a3b": (256, 8, 512),
    "cpu-moe": (64, 8, 384),
}


@dataclass(frozen=True)
class Workload:
    """Requests, each with its number of output tokens. The requests of a round run together."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]
    rounds: list[list[int]]
    temperature: float = 0.6

    @property
    def lengths(self) -> list[int]:
        """The tokens of each request, prompt and output together."""
        return [len(p) + n for p, n in zip(self.prompts, self.outputs, strict=True)]

    def subset(self, chosen: Sequence[int]) -> Workload:
        """Return the chosen requests alone, in the same rounds."""
        rounds = [[chosen.index(i) for i in r if i in chosen] for r in self.rounds]
        prompts = [self.prompts[i] for i in chosen]
        outputs = [self.outputs[i] for i in chosen]
        return Workload(self.name, prompts, outputs, [r for r in rounds if r], self.temperature)


def make_workload(name: str, spec: Spec, vocab_size: int) -> Workload:
    """Draw the lengths and token ids of the prompts, then the lengths of the outputs.

    This order and ids from 0 to 10,000 make `nano` the same as nano-vllm's benchmark, token for
    token. The answers in a conversation are drawn too, so all engines get the same prompts.
    """
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randint(0, min(10_000, vocab_size - 1)) for _ in range(length)]

    prefix = ids(spec.prefix)
    prompts: list[list[int]] = []
    for i in range(spec.count):
        long = spec.long_every and i % spec.long_every == 0
        prompts.append(prefix + ids(rng.randint(*spec.input) * (10 if long else 1)))
    outputs: list[int] = []
    # Request i of a later turn continues request i of the previous turn.
    for i in range(spec.count * (spec.turns - 1)):
        outputs.append(rng.randint(*spec.output))
        prompts.append(prompts[i] + ids(outputs[i]) + ids(rng.randint(*spec.input)))
    outputs += [rng.randint(*spec.output) for _ in range(spec.count)]
    size = 1 if spec.alone else spec.count
    rounds = [list(range(i, i + size)) for i in range(0, len(prompts), size)]
    return Workload(name, prompts, outputs, rounds)


def read_chats(name: str, tokenizer: Any) -> Workload:
    """Return the turns of the conversations in chats.json.

    The answers in the file are the model's own, greedy in float32 with at most 200 tokens. So the
    prompts share what real ones share, and the lengths of the outputs, each with its end token, are
    those at which the model stops.
    """
    chats = json.loads(Path(__file__).with_name("chats.json").read_text(encoding="utf-8"))
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for end in (2, 4):  # a system message, then questions and answers in turns
        for chat in chats:
            text = tokenizer.apply_chat_template(
                chat[:end], tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
            answer = tokenizer.encode(chat[end]["content"], add_special_tokens=False)
            outputs.append(len(answer) + 1)
    rounds = [list(range(i, i + len(chats))) for i in range(0, len(prompts), len(chats))]
    return Workload(name, prompts, outputs, rounds)


def write_shape(name: str, parent: Path) -> Path:
    """Create a directory with config.json alone, which is enough for load_format="dummy"."""
    family = {"qwen2.5": "Qwen2", "qwen3.5": "Qwen3_5"}.get(name.split("-")[0], "Qwen3")
    config: dict[str, object] = dict(zip(SHAPE_FIELDS.split(), SHAPES[name], strict=True))
    config |= {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16"}
    if family == "Qwen2":
        # In Qwen2 the head size follows from the other sizes.
        del config["head_dim"]
    if family == "Qwen3_5":
        rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
        config |= {"rope_parameters": rope, "full_attention_interval": 4}
        config |= {"linear_num_key_heads": 16, "linear_num_value_heads": LINEAR_VALUE_HEADS[name]}
        config |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        config |= {"linear_conv_kernel_dim": 4}
    if name in EXPERTS:
        family += "Moe"
        experts, used, size = EXPERTS[name]
        config |= {"num_experts": experts, "num_experts_per_tok": used, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    model_type = family.lower().replace("moe", "_moe") + "_text" * family.startswith("Qwen3_5")
    config |= {"architectures": [f"{family}ForCausalLM"], "model_type": model_type}
    directory = parent / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def write_weights(directory: Path, dtype: torch.dtype) -> None:
    """Write random weights next to config.json, for engines that cannot make them."""
    import torch
    from safetensors.torch import save_file

    from nanovllm.features.weights.dummy_weights import random_weights
    from nanovllm.loading.checkpoint import Checkpoint
    from nanovllm.models.weights import CheckpointTensor

    config = Checkpoint(directory).model_config
    tensors = list(config.model_class().on_meta(config).checkpoint_tensors())
    weights = {tensor.name: torch.empty(tensor.shape, dtype=dtype) for tensor in tensors}
    stored = [CheckpointTensor.of(name, weight) for name, weight in weights.items()]
    random_weights(stored, 0, torch.device("cpu"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
