"""A dry run of the CUDA path without a GPU, on a model of the device.

    python tests/helpers/dry_run.py DIRECTORY NAME ...    scenarios by their names in SCENARIOS

It prints JSON, which test_dry_run.py checks. The checkpoints are in folders of DIRECTORY. It needs
a process of its own: torch.cuda is replaced, and the kernels are imported without TRITON_INTERPRET.

A CudaTensor claims to be on cuda:0 and holds a tensor of the CPU. Gpu, a dispatch mode, sees each
operation, and refuses or counts what a GPU would. A graph is a list of what ran in its capture; it
keeps what was allocated there, and refuses to read other memory that has been freed. What is copied
on another stream is copied as late as the events allow; it may read or write nothing that a launch
could still use, and no launch may use its memory before it has ended.
Triton specializes each launch for its real arguments; a plain reference computes the result.
"""

import contextlib
import gc
import itertools
import json
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2] / ".ci"))

import compile_kernels
import references

import nanovllm.backends.int4
import nanovllm.backends.int8
from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu import graphs, profile
from nanovllm.backends.gpu.kernels import attention, pointwise
from nanovllm.features.kv.host_cache import pool as host_pool
from nanovllm.features.models.hybrid import delta_rule
from nanovllm.features.models.moe import experts
from nanovllm.features.parallel import ranks as tensor_parallel
from nanovllm.features.sampling.logit_rules import penalties
from nanovllm.loading import memory as runner_memory
from nanovllm.models import layers, sampler
from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.qwen3 import DecoderLayer, Qwen3

ROOT = f"{Path(__file__).parents[2]}/"
OWN = f"{ROOT}nanovllm/", f"{ROOT}tests/"  # a virtual environment may be in ROOT too
DEVICE = torch.device("cuda", 0)
TARGET, SHARED_MEMORY_KIB, _ = compile_kernels.TARGETS["sm_90"]


class CudaTensor(torch.Tensor):
    """`inner` holds the data. C++ sees device meta, because a CPU build has no code for CUDA."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = None  # Gpu handles all operations
    device = property(lambda self: DEVICE)

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        place = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        with torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device="meta", **place
            )
        self.inner = inner
        GPU.count(inner.untyped_storage())
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    # In C++ a list of indices would become a tensor of meta. On a GPU it is copied from the host.
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(torch.LongTensor(index) if isinstance(index, list) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(torch.LongTensor(index) if isinstance(index, list) else index, value)


def convert(kind: type, function: Callable[[Any], Any], x: Any) -> Any:
    """x with `function` applied to everything of a kind in its lists, tuples and dicts."""
    if isinstance(x, kind):
        return function(x)
    if isinstance(x, (list, tuple)):
        return type(x)([convert(kind, function, y) for y in x])
    if isinstance(x, dict):
        return {key: convert(kind, function, y) for key, y in x.items()}
    return x


unwrap = partial(convert, CudaTensor, lambda x: x.inner)


class Address:
    """Where a captured launch finds a tensor, which does not keep the memory."""

    def __init__(self, x: Tensor, where: str) -> None:
        self.storage, self.dtype, self.site = StorageWeakRef(x.untyped_storage()), x.dtype, where
        self.place = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a graph uses memory that has been freed, captured at {self.site}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, (list, tuple)):
        return [tensor for y in x for tensor in tensors_in(y)]
    return [x] if isinstance(x, Tensor) else []


def is_pinned(x: Any) -> bool:
    return any(hasattr(tensor, "has_been_pinned") for tensor in tensors_in(x))


def spoil(*tensors: Tensor) -> None:
    """Write what uninitialized memory may hold."""
    for x in tensors:
        whole = True if x.dtype == torch.bool else 107 if x.itemsize == 1 else 10**6 + 7
        x.fill_(float("nan") if x.is_floating_point() else whole)


# The host needs the result of these, or its size.
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2"}
INDEXING = {"index", "index_put_", "_index_put_impl_"}


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is made of others. A product is one launch, of whatever it is made."""
    products = torch.ops.aten.linear.default, torch.ops.aten.matmul.default
    return func.namespace == "aten" and func not in products and func._can_decompose()


@cache
def written_by(func: Any) -> list[int]:
    """Which arguments an operation writes, by position."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]


@cache
def returns_alias(func: Any) -> bool:
    return any(x.alias_info for x in func._schema.returns)


class Gpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.capture: Graph | None = None
        # Copies that have not arrived: memory of the host, and what makes the copy.
        self.arrivals: list[tuple[int, Callable[[], object]]] = []
        self.strict = False  # whether a wait is an error
        self.variants: dict[str, str] = {}  # Triton's key -> what it stands for
        self.all_variants: set[str] = set()  # `variants` of all engines
        self.counted: dict[int, int] = {}  # memory of the device, but that of graphs -> bytes
        # Bytes. `pool` is shared by all graphs, `most` is the largest sum of it and `allocated`.
        self.allocated = self.peak = self.pool = self.most = 0
        self.memory = 80 << 30  # of the whole device
        self.reset()

    def reset(self) -> None:
        self.waits: Counter[str] = Counter()
        self.launches = 0

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count memory until it is freed. A capture takes as much as its warm-up did before."""
        place = storage._cdata
        if self.capture is None and place not in self.counted:
            self.counted[place] = -(-storage.nbytes() // 512) * 512  # as torch rounds it
            self.allocated += self.counted[place]
            self.peak = max(self.peak, self.allocated)
            self.most = max(self.most, self.allocated + self.pool)
            weakref.finalize(storage, self.freed, place)

    def freed(self, place: int) -> None:
        self.allocated -= self.counted.pop(place)

    def reset_peak(self, *_: Any) -> None:
        self.peak = self.allocated

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would make torch import its compiler, which takes seconds."""
        return False

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise RuntimeError(f"in a capture: {what} at {site()}")

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.refuse_in_capture(what)
        self.waits[f"{what} at {site()}"] += 1
        if self.strict:
            raise RuntimeError(f"a wait: {what} at {site()}")

    @torch.inference_mode()
    def finish(self, arrivals: list[tuple[int, Callable[[], object]]]) -> None:
        for arrival in [x for x in self.arrivals if x in arrivals]:
            arrival[1]()
            self.arrivals.remove(arrival)

    def synchronize(self) -> None:
        self.wait("synchronize")
        self.finish(self.arrivals)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = (x for x in args if isinstance(x, torch.device))
        device = kwargs.get("device", next(given, None))
        tensors = tensors_in(args) + tensors_in(list(kwargs.values()))
        host = [x for x in tensors if not isinstance(x, CudaTensor)]
        to_host = device is not None and torch.device(device).type == "cpu"
        if len(host) == len(tensors) and (device is None or to_host):
            return self.run_on_host(func, name, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("copy_", "_to_copy") and (host or to_host):
            return self.transfer(func, name, args, kwargs)
        for x in host:
            if x.dim() and (name not in INDEXING or x is args[0]):
                raise RuntimeError(f"{func} mixes cpu and cuda at {site()}")
            if x.dim():
                self.wait(f"{name} by indices of the host")
        masked = name in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1]))
        if name in READS or masked:
            self.wait(name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse_in_capture(f"random numbers of {name}")
        return self.execute(func, name, args, kwargs)

    def run_on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Pinned memory is ordinary memory with a mark."""
        if name == "is_pinned":
            return False
        if name in ("pin_memory", "_pin_memory"):
            func, kwargs = torch.ops.aten.clone.default, {"pin_memory": True}
        pinned = kwargs.pop("pin_memory", False)
        found = func(*args, **kwargs)
        if pinned:
            self.refuse_in_capture("pinned memory is allocated")
        if pinned or (returns_alias(func) and is_pinned(args)):
            for x in tensors_in(found):
                x.has_been_pinned = True
        return found

    def transfer(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        """Copy between host and device, asynchronously if the host's memory is pinned."""
        self.refuse_in_capture("a copy between host and device")
        non_blocking = kwargs.pop("non_blocking", args[2:] == (True,))
        pinned = is_pinned(args)
        if not (non_blocking and pinned):
            self.wait("a copy between host and device")
        if name == "_to_copy":
            found = func(*unwrap(args), **kwargs | {"device": "cpu"}).clone()
            return found if isinstance(args[0], CudaTensor) else CudaTensor(found)
        # The device makes copies in their order: this one finds what earlier ones write.
        place = args[1].untyped_storage().data_ptr() if args[1].device.type == "cpu" else None
        self.finish([x for x in self.arrivals if x[0] == place])
        target, data = unwrap(args[0]), unwrap(args[1]).clone()
        if target is args[0] and non_blocking and pinned:
            spoil(target)
            self.arrivals.append((target.untyped_storage().data_ptr(), partial(target.copy_, data)))
        else:
            target.copy_(data)
        return args[0]

    def execute(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation of the device, which is a launch unless it allocates or makes a view."""
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        found = func(*unwrap(args), **unwrap(kwargs))
        written = [args[i] for i in written_by(func) if i < len(args)]
        written += [kwargs["out"]] if "out" in kwargs else []
        if name.startswith(("empty", "new_empty")):
            spoil(found)
            if self.capture is not None:
                self.capture.owned.append(found)
        elif written or not returns_alias(func):
            self.launch(func, args, kwargs, [] if written else tensors_in(found))
        if written:
            return written[0]
        return convert(Tensor, CudaTensor, found)

    def launch(self, function: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        self.launches += 1
        if self.capture is not None:
            self.capture.owned += results
            where = site()
            found = convert(CudaTensor, lambda x: Address(x.inner, where), (args, kwargs))
            self.capture.calls.append((function, found, results))

    def launch_kernel(self, kernel: JITFunction, grid: Any, args: Any, kwargs: Any) -> None:
        x, y, z = grid  # limits: CUDA C++ Programming Guide, of every compute capability
        if not (0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16):
            raise RuntimeError(f"{kernel.__name__} cannot have the grid {grid} at {site()}")
        # Triton 3.9 warns without this option, and 3.10 changes its default.
        assert kwargs["enable_fp_fusion"], kernel.__name__
        variant = compile_kernels.Variant(kernel, TARGET, args, kwargs)
        if variant.key not in self.variants:
            self.variants[variant.key] = variant.text
            self.all_variants.add(variant.text)
        for key, x in variant.arguments.items():
            if isinstance(x, Tensor) and not isinstance(x, CudaTensor):
                raise RuntimeError(f"{kernel.__name__} mixes cpu and cuda: {key} at {site()}")
            assert not isinstance(x, Tensor) or x.is_contiguous(), (kernel.__name__, key)
        reference = REFERENCES[kernel.__name__]

        def call(**arguments: Any) -> None:
            reference(SimpleNamespace(**arguments))

        with _disable_current_modes():
            call(**unwrap(variant.arguments))
        self.launch(call, (), dict(variant.arguments), [])


class Graph:
    def __init__(self) -> None:
        self.owned: list[Tensor] = []  # what it allocates
        self.calls: list[tuple[Any, Any, list[Tensor]]] = []  # function, addresses, results

    def replay(self) -> None:
        GPU.launches += len(self.calls)
        with _disable_current_modes():
            # Another graph of the pool may have used the memory meanwhile.
            spoil(*self.owned)
            for function, addresses, results in self.calls:
                args, kwargs = convert(Address, Address.tensor, addresses)
                found = tensors_in(function(*args, **kwargs))
                for result, x in zip(results, found, strict=False):
                    result.copy_(x)


class Event:
    def record(self) -> None:
        self.arrivals, self.launched = list(GPU.arrivals), GPU.launches

    def synchronize(self) -> None:
        """It counts as a wait if it leaves the device without work."""
        GPU.refuse_in_capture("a wait for an event")
        if GPU.launches == self.launched:
            GPU.wait("the last event")
        GPU.finish(self.arrivals)


def site() -> str:
    """file:line of the innermost frame of the project that is not a method of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path, code = frame.f_code.co_filename, frame.f_code  # f_locals would keep the tensors
        is_method = "self" in code.co_varnames + code.co_freevars
        if path.startswith(OWN) and not (path == __file__ and is_method):
            return f"{path.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


GPU = Gpu()


# ---- the plain reference of each kernel, which names the arguments of the launch ----


def attend(a: Any, starts: Tensor) -> None:
    cache = a.k_cache, a.v_cache, starts, a.context_lens, a.block_tables
    k_scale = a.scale * a.q.shape[2] ** 0.5 / attention.LOG2E
    a.out.copy_(references.attend(a.q, *cache, k_scale, a.v_scale, a.WINDOW))


def attend_chunks(a: Any) -> None:
    """Tiles of whole groups, as many as the queries need."""
    wanted = attention.query_tiles(a.query_start_loc.diff().numpy(), a.M // (a.H // a.K))
    assert a.tiles.tolist() == wanted.tolist()
    attend(a, a.query_start_loc)


def attend_decode(a: Any) -> None:
    assert sorted(a.order.tolist()) == list(range(len(a.q)))
    attend(a, torch.arange(len(a.q) + 1))


def norm_rope_store(a: Any) -> None:
    norms = (a.q_weight, a.k_weight) if a.NORM else (None, None)
    cache = a.slot_mapping, a.k_cache, a.v_cache, a.k_scale, a.v_scale
    a.q_out.copy_(references.norm_rope_store(a.qkv, *norms, a.eps, a.cos, a.sin, *cache))


def add_rms_norm(a: Any) -> None:
    out, total = layers.add_rms_norm(a.x, a.residual if a.ADD else None, a.weight, a.eps)
    a.out.copy_(out)
    a.total.copy_(total)


def draw(a: Any) -> None:
    filters = {"top_k": a.top_ks, "top_p": a.top_ps, "min_p": a.min_ps}
    batch = SamplingBatch(a.temperatures, a.seeds, a.positions, filters)
    a.tokens.copy_(sampler.sample(a.logits.float(), batch))


def linear(a: Any) -> None:
    """The product of a Linear, or of each expert, of which there are num_experts."""
    weight, scale = a.weight.float(), a.scale.float()
    if a.weight.dtype == torch.int8:
        weight *= scale[:, None]
    elif a.weight.dtype == torch.uint8:
        values = torch.cat((a.weight & 15, a.weight >> 4), dim=2).float() - 8
        weight = (values * scale[:, :, None]).flatten(1)[:, : a.x.shape[1]]
    if not a.EXPERTS:
        a.out.copy_(F.linear(a.x.float(), weight, a.bias.float() if a.BIAS else None))
        return
    assert len(a.ends) == a.num_experts
    module: Any = SimpleNamespace(weight=weight, backend=Backend(torch.device("cpu"), weight.dtype))
    a.out.copy_(experts.expert_linear(a.x.float(), module, a.ends))


DELTA: dict[str, Any] = {}  # arguments of the launches of a layer's delta rule


def delta_layer(a: Any) -> Any:
    """All arguments of the layer's launches, with the names of a LinearAttention."""
    DELTA.update(vars(a))
    layer = SimpleNamespace(**DELTA)
    DELTA.clear()
    layer.sizes = layer.HK, layer.HV, layer.DK, layer.DV
    layer.conv1d, layer.norm = layer.conv_weight, layer.norm_weight
    sizes = dict(qkv=layer.conv1d.shape[1], z=layer.HV * layer.DV, b=layer.HV, a=layer.HV)
    layer.in_proj = SimpleNamespace(projections=sizes)
    return layer


def decode_rule(a: Any) -> None:
    layer = delta_layer(a)
    a.out.copy_(delta_rule.decode(layer, layer.x, layer.conv, layer.rule, layer.rows))


def chunk_rule(a: Any) -> None:
    layer = delta_layer(a)
    rows, starts, ends, has_state, _ = layer.segments.T.tolist()
    segments = delta_rule.Segments(rows, starts, ends, [not x for x in has_state])
    delta_rule.chunk(layer, layer.x, layer.conv, layer.rule, segments, layer.out)


REFERENCES: dict[str, Callable[[Any], Any]] = {
    # The last launch of a layer's delta rule computes all of it.
    **dict.fromkeys(
        ("_convolve_decode", "_convolve", "_solve", "_chunk_rule"), lambda a: DELTA.update(vars(a))
    ),
    "_decode_rule": decode_rule,
    "_gated_norm": chunk_rule,
    "_linear": linear,
    "_attend": attend_chunks,
    "_attend_decode": attend_decode,
    "_merge_splits": lambda a: None,  # the reference of _attend_decode does not split
    "_norm_rope_store": norm_rope_store,
    "_add_rms_norm": add_rms_norm,
    "_silu_and_mul": lambda a: a.out.copy_(
        (Backend.gelu_and_mul if a.GELU else layers.silu_and_mul)(a.x)
    ),
    "_weigh_chunks": lambda a: None,  # the reference of _draw reads all logits
    "_draw": draw,
}


# ---- torch.cuda and Triton ----


@contextmanager
def capturing(graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
    GPU.pool = max(GPU.pool, GPU.peak - GPU.allocated)
    GPU.capture = graph
    try:
        yield
    finally:
        GPU.capture = None
    spoil(*graph.owned)


def replace_device() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    properties = SimpleNamespace(
        shared_memory_per_block_optin=SHARED_MEMORY_KIB << 10,
        shared_memory_per_block=48 << 10,
        multi_processor_count=132,
    )
    zero = "current_device", "_exchange_device", "_maybe_exchange_device"
    stubs = dict(
        **dict.fromkeys(("_lazy_init", "empty_cache"), lambda *_: None),
        **dict.fromkeys(("reset_peak_memory_stats", "graph_pool_handle"), GPU.reset_peak),
        **dict.fromkeys(zero, lambda *_: 0),
        memory_allocated=lambda: GPU.allocated,
        memory_reserved=lambda: GPU.allocated + GPU.pool,
        max_memory_allocated=lambda: GPU.peak,
        is_available=lambda: True,
        get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: "model of a GPU",
        get_device_properties=lambda _: properties,
        mem_get_info=lambda *_: (GPU.memory - GPU.allocated - GPU.pool, GPU.memory),
        synchronize=lambda *_: GPU.synchronize(),
        set_sync_debug_mode=lambda mode: setattr(GPU, "strict", mode == "error"),
        graph=capturing,
        CUDAGraph=Graph,
        Event=Event,
        Stream=type("Stream", (), {}),
    )
    for name, stub in stubs.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, stub)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        GPU.launch_kernel(self, grid, args, kwargs)

    JITFunction.run = run
    gc.freeze()  # each engine collects garbage, and need not look at all that was imported


# ---- scenarios ----

OPTIONS: dict[str, Any] = dict(skip_tokenizer_init=True, num_kv_cache_blocks=99)
# (enforce_eager, async_scheduling, blocks): 5 blocks are hardly enough for one request.
Run = tuple[bool, bool, int]
RUNS: tuple[Run, ...] = ((True, True, 5), (False, False, 99))
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {},
        {"top_k": 5},
        {"top_p": 0.9, "n": 3},
        {"min_p": 0.05},
        {"top_k": 9, "top_p": 0.9},
    ],
    "ruled": [
        {"repetition_penalty": 1.3, "n": 2},
        {"logprobs": 2, "logits_processors": [lambda ids, logits: logits * 0.9]},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {3: 2.0}},
        {"allowed_token_ids": list(range(10, 60)), "min_tokens": 3, "logprobs": 1},
    ],
}


def quantized(directory: str, quantization: str) -> Any:
    """Quantized weights. The CPU takes the products of a GPU, so that the answers are the same."""
    with contextlib.ExitStack() as stack:
        for module in (nanovllm.backends.int8, nanovllm.backends.int4):
            product = nanovllm.backends.int8.weight_only
            stack.enter_context(patch.object(module, "dynamic", product))
        return serve(directory, quantization=quantization)


class Alone(tensor_parallel.Ranks):
    """The first of 2 ranks, without the other: its results would be the same, its logits half."""

    def __init__(self, config: Any) -> None:
        self.rank, self.size, self.is_connected, self.host, self.device = 0, 2, True, None, None

    def _call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if function is tensor_parallel.dist.all_gather:
            [first, second], x = args
            first.copy_(x)
            second.copy_(x * 0.5 if x.is_floating_point() else x)
        else:
            args[0].mul_(2)

    def rank_0_first(self) -> nullcontext[None]:
        return nullcontext()


def ranks(directory: str) -> Any:
    """A rank's half of the model; what it sends to others is captured too."""
    started = patch.dict(os.environ, WORLD_SIZE="2", RANK="0")
    with started, patch.object(tensor_parallel, "Ranks", Alone):
        return serve(directory, tensor_parallel_size=2)


# The answers of a CPU, by the checkpoint and those options on which they depend.
WANTED: dict[tuple[str, str], dict[str, list[float]]] = {}
HOST_TIER: dict[str, Any] = dict(swap_space=2**-9)


def host_cache(directory: str, runs: tuple[Run, ...] = ((True, True, 5), (False, False, 5))) -> Any:
    """Host memory has several chunks. Nothing is loaded into large pools."""
    with patch.object(host_pool, "CHUNK_BYTES", 50 << 10):
        return serve(directory, runs, **HOST_TIER)


def drafts(directory: str) -> Any:
    """Speculation. Outputs of two different tokens repeat themselves."""
    two: list[dict[str, Any]] = [
        {"allowed_token_ids": [3, 4], "logprobs": i or None} for i in (0, 1)
    ]
    with patch.dict(SAMPLING, plain=[*two, {**two[0], "n": 3}]):
        return serve(directory, speculative_config={"prompt_lookup_min": 1})


def serve(
    directory: str,
    runs: tuple[Run, ...] = RUNS,
    dtype: str = "float32",
    kv_cache_dtype: str = "auto",
    **more: Any,
) -> Any:
    """A mixed workload: waits, variants and, in float32, whether the answers are a CPU's."""
    rng = random.Random(0)
    prompts = [[rng.randrange(199) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    prompts[1] = [*prompts[0], 5]  # a shared prefix
    sampling = {
        kind: [
            SamplingParams(
                temperature=0.8 * (i % 3 > 0),
                seed=i,
                max_tokens=4 + 7 * i % 19,
                ignore_eos=True,
                **fields[i % len(fields)],
            )
            for i in range(len(prompts))
        ]
        for kind, fields in SAMPLING.items()
    }
    base = OPTIONS | dict(dtype=dtype, max_num_seqs=5, max_num_batched_tokens=48, max_model_len=80)
    base |= dict(kv_cache_dtype=kv_cache_dtype, **more)
    wanted = {}
    if dtype == "float32":  # lower precision has near-ties
        key = directory, str({name: x for name, x in base.items() if name not in HOST_TIER})
        if key not in WANTED:
            cpu = LLM(directory, device="cpu", attention_backend="sdpa", **base)
            answers = {k: cpu.generate(prompts, p, use_tqdm=False) for k, p in sampling.items()}
            WANTED[key] = {k: numbers(outputs) for k, outputs in answers.items()}
        wanted = WANTED[key]
    results = []
    for eager, overlap, blocks in runs:
        options = dict(enforce_eager=eager, async_scheduling=overlap)
        options["num_kv_cache_blocks"] = blocks
        GPU.variants.clear()
        GPU.reset()
        with GPU:
            llm = LLM(directory, device="cuda", **base | options)
        num_at_start = len(GPU.variants)
        run: dict[str, Any] = {"options": options}
        for kind, params in sampling.items():
            GPU.reset()
            with GPU:
                llm.generate(prompts[:1], params[:1], use_tqdm=False)  # a sequence alone
                found = numbers(llm.generate(prompts, params, use_tqdm=False))
            run[f"{kind} waits"] = dict(GPU.waits)
            if kind in wanted:
                pairs = zip_longest(found, wanted[kind], fillvalue=1e9)
                right = [abs(a - b) < 1e-3 for a, b in pairs]
                # In fp8 a number on an edge may be rounded to its other neighbour.
                share = 1.0 if kv_cache_dtype == "auto" else 0.8
                run[f"{kind} is right"] = sum(right) >= share * len(right)
        stats = llm.stats()
        for name in ("preemptions", "accepted_tokens", "drafted_tokens", "host_loads"):
            run[name] = stats.get(name, 0)
        run["variants at start"] = list(GPU.variants.values())[:num_at_start]
        run["variants while serving"] = list(GPU.variants.values())[num_at_start:]
        results.append(run)
    return results


def numbers(outputs: list[Any]) -> list[float]:
    """All tokens, ranks and log-probabilities, in order."""
    sampled = [x for output in outputs for x in output.outputs]
    entries = [x.logprobs for x in sampled] + [x.prompt_logprobs for x in outputs]
    flat: list[float] = [token for x in sampled for token in x.token_ids]
    for entry in (y for x in entries for y in x or [] if y):
        for token, x in entry.items():
            flat += token, x.rank, x.logprob
    return flat


def decode(directory: str) -> Any:
    """Launches and waits of steady decode steps of 256 sequences, on which no number depends."""
    per_layer: list[int] = []  # launches
    call = DecoderLayer.__call__

    def counted(layer: DecoderLayer, x: Tensor, *args: Any) -> Any:
        before = GPU.launches
        result = call(layer, x, *args)
        if len(x) == 256:
            per_layer.append(GPU.launches - before)
        return result

    rules: dict[str, dict[str, Any]]
    rules = {"plain": {}, "logprobs": {"logprobs": 5}, "penalties": {"presence_penalty": 0.5}}
    found: dict[str, Any] = {}
    zero: Any = lambda a: a.out.zero_()  # noqa: E731
    with (
        GPU,
        patch.object(DecoderLayer, "__call__", counted),
        patch.dict(REFERENCES, _attend=zero, _attend_decode=zero),
        patch.dict(REFERENCES, _draw=lambda a: a.tokens.fill_(1)),
        patch.object(graphs, "batch_sizes", lambda num: [num]),  # the others would not be replayed
    ):
        options = dict(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=64)
        options |= dict(num_kv_cache_blocks=999, skip_tokenizer_init=True)
        options |= dict(check_kernels=False)  # these references would be found to be wrong
        llm = LLM(directory, device="cuda", dtype="bfloat16", **options)
        for name, fields in rules.items():
            params = SamplingParams(top_k=20, max_tokens=30, ignore_eos=True, **fields)
            for i in range(256):
                llm.engine.add_request([i + 1] * 10, params)
            for _ in range(4):
                llm.engine.step()
            GPU.reset()
            GPU.strict = name == "plain"
            for _ in range(5):  # one of them starts a new block
                llm.engine.step()
            GPU.strict = False
            found[name] = dict(launches=GPU.launches / 5, waits=dict(GPU.waits))
            llm.engine.abort_all()
    in_layers = max(per_layer) * len(llm.engine.runner.model.layers)
    found["per layer"] = max(per_layer)
    found["outside the layers"] = found["plain"]["launches"] - in_layers
    return found


def memory(directory: str) -> Any:
    """The memory of a small device and the most that an engine takes, with and without a profile.

    The KV cache takes all that remains. Requests have all that takes memory beside it.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(199) for _ in range(rng.randint(1, 450))] for _ in range(10)]
    kinds = {"plain": [{"top_k": 9, "top_p": 0.9}], "ruled": SAMPLING["ruled"]}
    kinds["long"] = [{"frequency_penalty": 0.1, "logprobs": 20, "logit_bias": {3: 1.0}}]
    kinds["prompts"] = [{"prompt_logprobs": 20, "top_k": 9}]
    found, read = [], penalties.PenaltyState.read
    lengths: list[int] = []  # of the known tokens that penalties read, at the start

    def recorded(state: Any, rows: Tensor, positions: Tensor, length: int) -> Any:
        lengths.append(length)
        return read(state, rows, positions, length)

    for scratch in (profile.scratch_bytes, lambda *_: 0):
        gc.collect()
        GPU.pool, GPU.memory = 0, GPU.allocated + (18 << 20)
        with (
            GPU,
            patch.object(runner_memory, "CUDA_MARGIN", 1 << 18),  # for penalties
            patch.object(graphs, "MIN_FREE_BYTES", 0),
            patch.object(profile, "scratch_bytes", scratch),
        ):
            options = dict(max_num_seqs=8, max_num_batched_tokens=64, skip_tokenizer_init=True)
            with patch.object(penalties.PenaltyState, "read", recorded):
                llm = LLM(directory, device="cuda", gpu_memory_utilization=1.0, **options)
            most = {}
            for kind, fields in kinds.items():
                params = [
                    SamplingParams(temperature=0.8, seed=i, max_tokens=8, ignore_eos=True, **each)
                    for each, i in zip(itertools.cycle(fields), range(len(prompts)))
                ]
                GPU.most = 0
                llm.generate(prompts, params, use_tqdm=False)
                most[kind] = GPU.most
        found.append(dict(memory=GPU.memory, most=most, read=lengths))
        kinds = {"plain": kinds["plain"]}
        del llm
    GPU.memory = 80 << 30
    return found


def faults(directory: str) -> Any:
    """(what a deliberate fault must lead to, what it leads to)."""

    def attempt(fault: Callable[[], Any], capture: bool = False, strict: bool = False) -> str:
        GPU.reset()
        GPU.capture, GPU.strict = Graph() if capture else None, strict
        try:
            fault()
            return "; ".join(GPU.waits)
        except RuntimeError as error:
            return str(error)
        finally:
            GPU.capture, GPU.strict = None, False

    def generate() -> Any:
        with GPU:
            llm = LLM(directory, device="cuda", max_num_seqs=2, max_model_len=64, **OPTIONS)
            return numbers(llm.generate([[1, 2, 3]], use_tqdm=False))

    with GPU, torch.inference_mode():
        x, host, event = torch.ones(2, device=DEVICE), torch.ones(2), Event()
        pinned = host.pin_memory()
        event.record()
        here = "at tests/helpers/dry_run.py:"
        pairs = [
            (f"_local_scalar_dense {here}", attempt(lambda: float(x.sum()))),
            (f"a wait: _local_scalar_dense {here}", attempt(lambda: float(x.sum()), strict=True)),
            ("a copy between", attempt(lambda: host.to(DEVICE, non_blocking=True))),
            (f"index {here}", attempt(lambda: x[x > 0])),
            (f"indices of the host {here}", attempt(lambda: x[[0]])),
            (f"the last event {here}", attempt(lambda: (event.record(), event.synchronize()))),
            ("mixes cpu and cuda: x", attempt(lambda: pointwise.silu_and_mul(host[None]))),
            (f"mixes cpu and cuda {here}", attempt(lambda: x + host)),
            ("in a capture: a copy", attempt(x.tolist, capture=True)),
            ("in a capture: pinned memory", attempt(host.pin_memory, capture=True)),
            ("in a capture: a wait for an event", attempt(event.synchronize, capture=True)),
            ("in a capture: random numbers", attempt(x.uniform_, capture=True)),
        ]
        run = pointwise._silu_and_mul[1, 70_000, 1]
        pairs.append(("cannot have the grid", attempt(partial(run, x[None], x[None], F=1))))
        # A copy to the host arrives when its event is waited for.
        pinned.copy_(x, non_blocking=True)
        event.record()
        pairs.append(("[nan, nan]", str(pinned.tolist())))
        event.synchronize()
        pairs.append(("[1.0, 1.0]", str(pinned.tolist())))
        # A graph computes when it is replayed, and may not read memory that has been freed.
        graph = Graph()
        with capturing(graph, None, None, "thread_local"):
            sums, unwritten = x + 1, torch.empty_like(x)
        pairs.append(("[nan, nan]", str(sums.tolist())))
        graph.replay()
        pairs.append(("[2.0, 2.0] [nan, nan]", f"{sums.tolist()} {unwritten.tolist()}"))
        for function in (torch.neg, pointwise.silu_and_mul):
            outside, graph = torch.ones((1, 2), device=DEVICE), Graph()
            with capturing(graph, None, None, "thread_local"):
                function(outside[:1])
            pairs.append(("allowed", attempt(graph.replay) or "allowed"))
            del outside
            pairs.append(("memory that has been freed, captured at ", attempt(graph.replay)))

    # Faults of a whole engine: one that does not wait for its tokens, and one that reads in a
    # capture, which is therefore not used.
    right, logits = generate(), Qwen3.logits
    with patch.object(Event, "synchronize", lambda self: None):
        pairs.append(("wrong", "right" if generate() == right else "wrong"))
    reading = lambda self, hidden: logits(self, hidden * float(hidden.amax()))  # noqa: E731
    with patch.object(Qwen3, "logits", reading):
        with patch.object(graphs.logger, "warning") as warning:
            generate()
        pairs.append(("in a capture: _local_scalar_dense at nanovllm/", str(warning.mock_calls)))
    return pairs


# name -> (folder of the checkpoint, what runs)
SCENARIOS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "qwen3": ("qwen3", partial(serve, runs=((False, True, 99), (False, False, 5)))),
    "qwen2": ("qwen2", serve),
    "smollm3": ("smollm3", serve),
    "gemma3": ("gemma3", serve),
    "host cache": ("qwen3", host_cache),
    "bfloat16": ("qwen3", partial(serve, dtype="bfloat16")),
    "bfloat16 with fp8": ("scaled", partial(serve, dtype="bfloat16", kv_cache_dtype="fp8")),
    "invariant": ("qwen3", partial(serve, dtype="bfloat16", batch_invariant=True)),
    "int8": ("qwen3", partial(quantized, quantization="int8")),
    "int4": ("qwen3", partial(quantized, quantization="int4")),
    "ranks": ("qwen3", ranks),
    "drafts": ("qwen3", drafts),
    "hybrid experts": ("hybrid experts", serve),
    "int8 experts": ("experts", partial(quantized, quantization="int8")),
    "decode": ("wide", decode),
    "memory": ("wide", memory),
    "faults": ("qwen3", faults),
}


def main() -> None:
    torch.set_num_threads(1)
    jobs = compile_kernels.jobs("sm_90")
    compiled = {v.text for job in jobs for v in compile_kernels.variants(*job)}
    replace_device()
    directory, *names = sys.argv[1:]
    results = {}
    for name in names:
        checkpoint, scenario = SCENARIOS[name]
        GPU.all_variants.clear()
        found = scenario(f"{directory}/{checkpoint}")
        missing = sorted(GPU.all_variants - compiled)
        results[name] = {"found": found, "not compiled": missing}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
