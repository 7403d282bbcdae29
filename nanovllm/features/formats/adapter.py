"""A LoRA adapter in PEFT's format, merged into the weights of its base model at load.

An adapter changes the weight W [O, I] of a linear layer by the product of two small matrices (Hu et
al. 2021, arXiv:2106.09685):

    W + scale * B A     B [O, r], A [r, I], scale = lora_alpha / r, or / sqrt(r) with use_rslora

For an embedding table B A is transposed. `Adapter.merged` gives a view of open safetensors files in
which W is this sum, computed in float32 when it is read. Weights are therefore fused, sharded and
quantized as without an adapter. Other tensors of the adapter, such as biases and modules_to_save,
replace tensors of the model; those of a vision tower are skipped, as the model's are. The names of
its tensors say which modules an adapter changes; target_modules and similar fields are not read.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.features.formats.tensor_view import TensorView, ViewedTensor, viewed
from nanovllm.features.models.moe.moe_config import STACKED
from nanovllm.features.models.text_config import NOT_TEXT
from nanovllm.models.weights import EMBEDDINGS, LM_HEAD, PREFIX
from nanovllm.utils.checks import located
from nanovllm.utils.json_files import Fields, check_fields, named, read_json, unusual
from nanovllm.utils.log import logger

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS: Fields = {
    "peft_type": (str, ("LORA",)),
    "r": (int, (1, math.inf)),
    "lora_alpha": (float, ()),
    "use_rslora": (bool, ()),
    "rank_pattern": (dict, ()),
    "alpha_pattern": (dict, ()),
    "ensure_weight_tying": (bool, ()),
    "peft_version": (str, ()),
}
# Fields that only say how the adapter was made, or that have no effect on linear layers.
UNUSED = """
    auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_dropout
    megatron_config megatron_core modules_to_save qalora_group_size revision target_modules
    target_parameters task_type
"""
# With other values of init_lora_weights, PEFT also changes the weights of the base model.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")
DOWN = "down_proj.weight"  # the end of the name of this weight of an expert
Part = tuple[int, int, slice]  # an expert, the number of experts, and rows of its product
WHOLE: Part = (0, 1, slice(None))
Products = dict[str, Callable[[], Tensor]]  # name in the base model -> what is added


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
        self.path = directory / WEIGHTS
        config = directory / CONFIG
        raw = check_fields(read_json(config), config, FIELDS)
        refused = unusual(raw, (*FIELDS, *UNUSED.split()))
        if (start := raw.get("init_lora_weights", True)) not in PLAIN_STARTS:
            refused["init_lora_weights"] = start
        if refused:
            raise ValueError(
                f"{config}: {named(refused)} is not supported; merge the adapter with "
                "merge_and_unload of peft, and load the model that its save_pretrained then writes"
            )
        self.base = raw.get("base_model_name_or_path")
        self.use_rslora = raw.get("use_rslora")
        self.keeps_tied = raw.get("ensure_weight_tying")
        self.version = [int(part) for part in re.findall(r"\d+", raw.get("peft_version", ""))]
        # Patterns of module names -> ranks and alphas. The last pattern matches every name.
        self.ranks = raw.get("rank_pattern", {}) | {".*": raw.get("r", 8)}
        self.alphas = raw.get("alpha_pattern", {}) | {".*": raw.get("lora_alpha", 8)}

    def check_base(self, names: Collection[str]) -> None:
        """Log for which base model the adapter was made. Warn if it has none of the `names`."""
        is_same = self.base is None or Path(str(self.base)).name.lower() in names
        logger.log(
            logging.INFO if is_same else logging.WARNING,
            f"the adapter {self.path.parent}, which was made for the base model {self.base}, is "
            f"merged into {' or '.join(sorted(names))}",
        )

    def merged(self, files: Mapping[Path, Any], adapter: Any) -> dict[Path, Any]:
        """Return views of the open `files` of the base model, merged with the open `adapter`.

        Raises ValueError with all tensors that do not fit the base model.
        """
        base = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        names = {name.removeprefix(PREFIX): name for name in base}
        table = names.get(EMBEDDINGS[1], "")
        is_tied = LM_HEAD not in base
        found = {name: adapter.get_slice(name).get_shape() for name in adapter.keys()}  # noqa: SIM118
        expected = dict[str, list[int] | None]()  # shapes by name in the adapter
        replaced = dict[str, str]()  # name in the base model -> name in the adapter
        products: Products = {}

        @functools.lru_cache(maxsize=4)  # those of all experts are read for each expert
        def read(name: str) -> Tensor:
            factor: Tensor = adapter.get_tensor(name)
            return factor.float()

        def shape_of(target: str) -> list[int] | None:
            like = table if target == LM_HEAD and is_tied else target
            return base[like].get_slice(like).get_shape() if like in base else None

        for stored in found:
            name = stored.removeprefix("base_model.model.").replace(".base_layer.", ".")
            name = name.replace("language_model.", "")
            if name.startswith(NOT_TEXT):
                continue
            factor = FACTOR.fullmatch(name)
            target = (name if factor is None else f"{factor[1]}.weight").removeprefix(PREFIX)
            target = names.get(target, target)
            shape = shape_of(target)
            if factor is None:
                replaced[target] = stored
                expected[stored] = shape
                continue
            a, b = (re.sub(r"(.*lora_(embedding_)?)[AB]", rf"\g<1>{x}", stored) for x in "AB")
            add = functools.partial(product, read, a, b)
            rank, scale = self.rank_and_scale(factor[1])
            if down := shape_of(names.get(f"{target.removesuffix('.weight')}.0.{DOWN}", "")):
                stacked = self.of_experts(factor[1], [found.get(a), found.get(b)], down, names, add)
                products |= stacked
                expected |= {x: found[x] if stacked else None for x in (a, b)}
            elif shape is None or len(shape) != 2:
                expected[stored] = None
            else:
                products[target] = functools.partial(add, scale, bool(factor[2]), WHOLE)
                outputs, inputs = reversed(shape) if factor[2] else shape
                expected |= {a: [rank, inputs], b: [outputs, rank]}
        problems = [] if expected else ["it has no tensors of the text model"]
        problems += [
            f"{name} is {found.get(name, 'missing')}, expected {shape or 'no such tensor'}"
            for name, shape in expected.items()
            if found.get(name) != shape
        ]
        if problems:
            raise ValueError(
                f"{self.path}, an adapter of {self.base!r:.200} with r={self.ranks['.*']}, does "
                f"not fit {next(iter(files)).parent} in {len(problems)} tensors: "
                + "; ".join(problems[:4])
            )
        # The head becomes a copy of the table if one of them changes. Of two LoRA modules that are
        # tied (ensure_weight_tying) PEFT saves both, and of replaced tensors at least the table.
        tied = {LM_HEAD, table} if is_tied else set()
        is_untied = tied & products.keys() or (tied & replaced.keys() and not self.keeps_tied)
        is_copied = is_untied and LM_HEAD not in replaced
        views = {}
        for path, file in {**files, self.path: adapter}.items():
            kept = {name: name for name in file.keys() if name not in replaced}  # noqa: SIM118
            if is_copied and file is base[table]:
                kept[LM_HEAD] = table
            views[path] = TensorView(
                (name, merged_tensor(file, stored, products.get(name)))
                for name, stored in (replaced if file is adapter else kept).items()
            )
        return views

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return r of a module, and lora_alpha / r, or lora_alpha / sqrt(r)."""
        rank, alpha = (of_module(values, module) for values in (self.ranks, self.alphas))
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def of_experts(
        self, module: str, shapes: list[Any], down: list[int], names: dict[str, str], add: Any
    ) -> Products:
        """Return what is added to all experts of a layer, or nothing for wrong `shapes` of A and B.

        PEFT (target_parameters) stacks the factors of a parameter of all experts. Their shapes say
        of which one, and whether inputs and outputs are exchanged, as before PEFT 0.19.1.

        down: the shape [E, F] of an expert's down projection. add: `product` of A and B.
        """
        hidden, inner = down
        start = module.removeprefix(PREFIX)
        number = sum(name.startswith(f"{start}.") and name.endswith(DOWN) for name in names)
        sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        for kind, (outputs, inputs) in sizes.items():
            rank, scale = self.rank_and_scale(f"{module}.{kind}")
            new, old = (
                [[number * rank, columns], [rows, number * rank]]
                for rows, columns in ((outputs, inputs), (inputs, outputs))
            )
            if shapes in (new, old):
                is_old = shapes == old and (shapes != new or self.version < [0, 19, 1])
                step = outputs // len(STACKED[kind])
                return {
                    names[f"{start}.{x}.{name}.weight"]: functools.partial(
                        add, scale, is_old, (x, number, slice(i * step, (i + 1) * step))
                    )
                    for x in range(number)
                    for i, name in enumerate(STACKED[kind])
                }
        return {}


def product(
    read: Callable[[str], Tensor], a: str, b: str, scale: float, is_transposed: bool, part: Part
) -> Tensor:
    """Return scale * B A, or its transpose, of A [number * r, I] and B [O, r * number]."""
    expert, number, rows = part
    left = read(b).unflatten(1, (-1, number))[..., expert]
    whole = scale * (left @ read(a).unflatten(0, (number, -1))[expert])
    return (whole.T if is_transposed else whole)[rows]


def merged_tensor(file: Any, name: str, product: Callable[[], Tensor] | None) -> ViewedTensor:
    """Return a tensor of an open file as it is stored, or with its product in float32."""
    tensor = viewed(file, name)
    if product is None:
        return tensor
    return ViewedTensor(tensor.shape, tensor.dtype, lambda: tensor.read().float() + product())


def of_module(values: Mapping[str, Any], module: str) -> Any:
    """Return the value of the first pattern that matches a module, as PEFT does."""
    return next(x for pattern, x in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
