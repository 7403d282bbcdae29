"""A LoRA adapter in PEFT's format, merged into the weights of its base model at load.

An adapter changes the weight W [O, I] of a linear layer by the product of two small matrices (Hu et
al. 2021, arXiv:2106.09685):

    W + scale * B A     B [O, r], A [r, I], scale = lora_alpha / r, or / sqrt(r) with use_rslora

`Adapter.merged` gives a view of open safetensors files in which W is this sum, computed in float32
when it is read. Weights are therefore fused, sharded and quantized as without an adapter. Other
tensors of the adapter, such as biases and modules_to_save, replace tensors of the model. The names
of its tensors say which modules an adapter changes; target_modules and similar fields are not read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.models.weights import EMBEDDINGS, HEAD, PREFIX
from nanovllm.utils.checks import located
from nanovllm.utils.json_files import Fields, check_fields, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS: Fields = {
    "peft_type": (str, ("LORA",)),
    "r": (int, (1, math.inf)),
    "lora_alpha": (float, ()),
    "use_rslora": (bool, ()),
    "rank_pattern": (dict, ()),
    "alpha_pattern": (dict, ()),
}
# Fields that only say how the adapter was made, or that have no effect on linear layers.
UNUSED = """
    auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_dropout
    megatron_config megatron_core modules_to_save peft_version qalora_group_size revision
    target_modules task_type
"""
# With other values of init_lora_weights, PEFT also changes the weights of the base model.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
Factors = dict[str, tuple[str, str, float]]  # name in the base model -> A, B and scale
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")


class Adapter:
    """The fields of an adapter_config.json, and the path of the adapter's tensors."""

    def __init__(self, adapter: str | os.PathLike[str], find: Callable[..., Path]) -> None:
        """Read the config of an adapter, whose directory `find` returns.

        Raises TypeError for several adapters, and ValueError for what is missing or not supported.
        """
        if not isinstance(adapter, str | os.PathLike):
            raise TypeError(
                f"adapter must be one directory or hub id, not {adapter!r:.200}; make an LLM for "
                "each of several"
            )
        with located("adapter: "):
            directory = find(adapter)
        self.path, config = directory / WEIGHTS, directory / CONFIG
        for path in (config, self.path):
            if not path.is_file():
                raise ValueError(
                    f"adapter: {directory} has no {path.name}; give a directory that "
                    "save_pretrained of peft has written. Pickles (*.bin) are not read"
                )
        raw = check_fields(read_json(config), config, FIELDS)
        refused = {x: y for x, y in raw.items() if y and x not in (*FIELDS, *UNUSED.split())}
        if (start := raw.get("init_lora_weights", True)) not in PLAIN_STARTS:
            refused["init_lora_weights"] = start
        if refused:
            named = ", ".join(f"{name}={value!r:.80}" for name, value in refused.items())
            raise ValueError(
                f"{config}: {named} is not supported; merge the adapter with merge_and_unload of "
                "peft, and load the model that its save_pretrained then writes"
            )
        self.base, self.use_rslora = raw.get("base_model_name_or_path"), raw.get("use_rslora")
        # Patterns of module names -> ranks and alphas. The last pattern matches every name.
        self.ranks = raw.get("rank_pattern", {}) | {".*": raw.get("r", 8)}
        self.alphas = raw.get("alpha_pattern", {}) | {".*": raw.get("lora_alpha", 8)}

    def merged(self, files: Mapping[Path, Any], adapter: Any) -> dict[Path, Any]:
        """Return views of the open `files` of the base model, merged with the open `adapter`.

        Raises ValueError with all tensors that do not fit the base model.
        """
        base = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        names = {name.removeprefix(PREFIX): name for name in base}
        table, is_tied = names.get(EMBEDDINGS[1], ""), HEAD not in base
        found = {name: adapter.get_slice(name).get_shape() for name in adapter.keys()}  # noqa: SIM118
        expected = dict[str, list[int] | None]()  # shapes by name in the adapter
        replaced = dict[str, str]()  # name in the base model -> name in the adapter
        factors: Factors = {}
        for stored in found:
            name = stored.removeprefix("base_model.model.").replace(".base_layer.", ".")
            factor = FACTOR.fullmatch(name)
            target = name if factor is None else f"{factor[1]}.weight"
            target = target.replace("language_model.", "").removeprefix(PREFIX)
            target = names.get(target, target)
            like = table if target == HEAD and is_tied else target
            shape = base[like].get_slice(like).get_shape() if like in base else None
            if factor is None:
                replaced[target], expected[stored] = stored, shape
            elif shape is None or len(shape) != 2:
                expected[stored] = None
            else:
                a, b = (stored.replace(f".lora_{factor[2]}.", f".lora_{x}.") for x in "AB")
                rank, alpha = (of_module(x, factor[1]) for x in (self.ranks, self.alphas))
                factors[target] = a, b, alpha / (math.sqrt(rank) if self.use_rslora else rank)
                expected |= {a: [rank, shape[1]], b: [shape[0], rank]}
        problems = [] if found else ["the file has no tensors"]
        problems += [
            f"{name} is {found.get(name, 'missing')}, expected {shape or 'no such tensor'}"
            for name, shape in expected.items()
            if found.get(name) != shape
        ]
        if is_tied and (HEAD in factors or (HEAD in replaced) != (table in replaced)):
            problems.append(
                "embeddings and head are one tensor of the model, so either none of them can be in "
                "the adapter, or both in its modules_to_save"
            )
        if problems:
            raise ValueError(
                f"{self.path}, an adapter of {self.base!r:.200} with r={self.ranks['.*']}, does "
                f"not fit {next(iter(files)).parent} in {len(problems)} tensors: "
                + "; ".join(problems[:4])
            )
        views = {}
        for path, file in {**files, self.path: adapter}.items():
            kept = {name: name for name in file.keys() if name not in replaced}  # noqa: SIM118
            views[path] = MergedFile(file, replaced if file is adapter else kept, adapter, factors)
        return views


@dataclass(frozen=True)
class MergedFile:
    """A view of some tensors of an open safetensors file, with products added to them."""

    file: Any
    names: dict[str, str]  # in the view -> in the file
    adapter: Any  # the open file of the factors
    factors: Factors

    def keys(self) -> list[str]:
        return [*self.names]

    def get_slice(self, name: str) -> Any:
        """Return an object with the methods get_shape and get_dtype, of the stored tensor."""
        return self.file.get_slice(self.names[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor as it is stored, or W + scale * B A in float32."""
        weight: Tensor = self.file.get_tensor(self.names[name])
        if name not in self.factors:
            return weight
        *factors, scale = self.factors[name]
        a, b = (self.adapter.get_tensor(factor).float() for factor in factors)
        return weight.float() + scale * (b @ a)

    def get_int4(self, name: str) -> Any:
        """Return a packed weight, or None; see DecodedFile of quantized_checkpoint.py."""
        get_int4 = getattr(self.file, "get_int4", None)
        return None if get_int4 is None or name in self.factors else get_int4(name)


def of_module(values: Mapping[str, Any], module: str) -> Any:
    """Return the value of the first pattern that matches a module, as PEFT does."""
    return next(x for pattern, x in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
