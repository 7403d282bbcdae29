"""MoeConfig: the fields of config.json for mixtures of experts, and the tensors of the experts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.features.formats.tensor_view import TensorView, ViewedTensor, viewed
from nanovllm.models.model_config import ANY, SIZE, ModelConfig
from nanovllm.utils.json_files import Fields, check_field

if TYPE_CHECKING:
    from nanovllm.features.models.moe.qwen3_moe import Qwen3Moe

FIELDS: Fields = {
    "norm_topk_prob": (bool, ANY),
    "decoder_sparse_step": (int, SIZE),
    "mlp_only_layers": (list, ANY),
    "num_experts": (int, (1, 10_000)),
    "num_experts_per_tok": (int, SIZE),
    "moe_intermediate_size": (int, SIZE),
}
SHARED: Fields = {"shared_expert_intermediate_size": (int, SIZE)}
# The projections in the rows of a tensor of all experts, in order.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Experts:
    """The sizes of the mixtures of experts of a model: X experts, of which a token uses k."""

    num_experts: int  # X
    num_per_token: int  # k
    size: int  # F, the feed-forward size of an expert
    normalized: bool  # whether the weights of a token's experts are divided by their sum
    layers: frozenset[int]  # the layers that have experts; the others have one MLP
    shared_size: int = 0  # of the shared expert, which all tokens use; 0 means none

    @classmethod
    def from_json(
        cls, raw: dict[str, Any], path: Path, normalized: bool, shared: bool = False
    ) -> Experts:
        """Create Experts from the fields of config.json. Raises ValueError for wrong fields.

        `normalized` is the default of norm_topk_prob.
        """
        raw = {
            "num_experts": raw.get("num_local_experts"),  # its name in transformers 5
            "norm_topk_prob": normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        } | {name: value for name, value in raw.items() if value is not None}
        fields = FIELDS | (SHARED if shared else {})
        if missing := [name for name in fields if raw.get(name) is None]:
            raise ValueError(f"{path} has no {missing[0]!r}")
        values = [check_field(path, name, raw[name], *kind) for name, kind in fields.items()]
        normalized, step, dense, num_experts, num_per_token, size, *shared_size = values
        if (router := raw.get("scoring_func", "softmax")) != "softmax":
            raise ValueError(f"{path}: scoring_func {router!r} is not supported; 'softmax' is")
        layers = set(range(step - 1, raw["num_hidden_layers"], step)) - set(dense)
        return cls(num_experts, num_per_token, size, normalized, frozenset(layers), *shared_size)


@dataclass(frozen=True)
class MoeConfig(ModelConfig):
    """A ModelConfig of a model with mixtures of experts."""

    experts: Experts | None = field(default=None, kw_only=True)

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> MoeConfig:
        base = super().from_json(raw, path)
        assert isinstance(base, MoeConfig)
        return replace(base, experts=Experts.from_json(raw, path, normalized=False))

    def model_class(self) -> type[Qwen3Moe]:
        from nanovllm.features.models.moe.qwen3_moe import Qwen3Moe

        return Qwen3Moe

    def select_tensors(self, files: dict[Path, Any]) -> dict[Path, Any]:
        """Return the files with one tensor per expert and projection."""
        return {
            path: unstacked(file, {name: name for name in file.keys()})  # noqa: SIM118
            for path, file in files.items()
        }


def unstacked(file: Any, names: dict[str, str]) -> TensorView:
    """Return a view of an open safetensors file with one tensor per expert and projection.

    Two layouts exist. In one, the tensors are called experts.0.gate_proj.weight [F, E] and so on.
    In the other one they are experts.gate_up_proj [X, 2 F, E] and experts.down_proj [X, E, F].

    names: the names of the tensors in the view -> their names in the file.
    """
    view = TensorView()
    for whole, stored in names.items():
        tensor = viewed(file, stored)
        module, _, kind = whole.rpartition(".")
        if not (module.endswith(".experts") and kind in STACKED and len(tensor.shape) == 3):
            view[whole] = tensor
            continue
        size = tensor.shape[1] // len(STACKED[kind])
        for expert, (i, name) in product(range(tensor.shape[0]), enumerate(STACKED[kind])):
            index = expert, slice(i * size, (i + 1) * size)
            read = partial(read_part, tensor, index)
            part = tensor._replace(shape=[size, tensor.shape[2]], read=read)
            view[f"{module}.{expert}.{name}.weight"] = part
    return view


def read_part(stacked: ViewedTensor, index: tuple[int, slice]) -> Any:
    return stacked.read()[index]  # a view: the file is memory-mapped
