"""Checks at the start of an engine: its kernels, and its CUDA graphs.

A kernel that fails, or differs from plain torch, is replaced by plain torch, and graphs that differ
from eager steps are not used. Both print one warning. comparisons.py compares a kernel.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.features.kernel_check import comparisons as compare
from nanovllm.features.kernel_check.comparisons import CONTEXTS, Backends, Comparison, Comparisons
from nanovllm.models.backend import Backend, FusedModel, num_experts
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling, StepPlan
from nanovllm.utils.log import logger, progress_bar

if TYPE_CHECKING:
    from nanovllm.backends.gpu.graphs import DecodeGraphs
    from nanovllm.runner.device_runner import DeviceRunner


def system(device: torch.device) -> str:
    """Return the name of the processor, and the versions of the packages that compile kernels."""
    name = f"this {platform.machine()} processor"
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = f"{torch.cuda.get_device_name(device)} (compute capability {capability})"
    modules = [sys.modules.get(package) for package in ("torch", "triton", "numba")]
    versions = [f"{module.__name__} {module.__version__}" for module in modules if module]
    return f"{name} with {', '.join(versions)}"


def check(comparisons: Comparisons, dtype: torch.dtype) -> None:
    """Run comparisons for a model in `dtype`. Raises ArithmeticError for the first that fails."""
    for comparison in comparisons:
        comparison.check(dtype)


def checked(
    backend: Backend,
    plain: Backend,
    config: EngineConfig,
    model_config: ModelConfig,
    vocab_size: int,
) -> Backend:
    """Return the backend, with plain torch in place of a kernel that fails or is wrong.

    Returns `plain` if there are several, or if no single one can be replaced. Raises ValueError
    instead if attention_backend is not "auto".
    """
    if not config.check_kernels:
        logger.info("check_kernels=False: no kernel is compared with plain torch")
        return backend
    model = model_config.model_class().on_meta(model_config)
    sizes = model, vocab_size, config.block_size, config.kv_cache_dtype != "auto"
    errors: dict[str, Exception] = {}
    is_replaced = True
    cases = [*checks((backend, plain), *sizes)]
    bar = progress_bar("Compiling and checking kernels", "kernel", cases)
    with torch.inference_mode(), backend.step_context():
        for name, comparisons in bar:
            bar.set_postfix_str(name, refresh=False)
            try:
                check(comparisons, backend.dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of Triton, of its compilers, of torch or of Numba
                check_device(backend.device)
                errors.setdefault(name, error)
                is_replaced &= backend.replace_kernel(name, plain)
    if not errors:
        backend.set_checked()
        return backend
    first = next(iter(errors.values()))
    problem = (
        f"the kernel {' and the kernel '.join(errors)} fails or is wrong on "
        f"{system(backend.device)}: {type(first).__name__}: {first!s:.500}. Please report it "
        "with the output of the command `nanovllm check`"
    )
    if config.attention_backend != "auto":
        instead = "attention_backend='auto' computes it in plain torch, and 'sdpa' everything"
        if config.batch_invariant:
            instead = "batch_invariant=True needs all kernels; leave it out"
        raise ValueError(f"{problem}. {instead}") from first
    # The store of attention is not counted, because plain attention replaces it too. Nor are the
    # products of experts, if those of other layers fail: on a GPU they are one kernel.
    counted = errors.keys() - {"norm_rope_store", "expert_mlp" if "linear" in errors else ""}
    is_replaced &= len(counted) <= 1
    what = ", ".join(errors) if is_replaced else "everything"
    logger.warning(f"plain torch, which is slower, computes {what}: {problem}")
    return backend if is_replaced else plain


def check_device(device: torch.device) -> None:
    """Raise an error of the GPU that has come before, such as an illegal memory access."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """Make `device` the current GPU. An error that leaves it unusable is a ValueError."""
    try:
        with torch.cuda.device(device):
            yield
    except Exception as error:
        try:
            check_device(device)
        except RuntimeError as lost:
            raise ValueError(
                f"a kernel has made {system(device)} unusable for this process: "
                f"{lost!s:.200}. Start again with attention_backend='sdpa', which uses none of the "
                "kernels, and please report it with the output of the command `nanovllm check`"
            ) from error
        raise


def checks(
    backends: Backends, model: Qwen3, vocab_size: int, block_size: int, is_fp8: bool
) -> Iterator[tuple[str, Comparisons]]:
    """Yield (name, comparisons) of each kernel that the engine of a model uses, once for each size.

    The names are the functions of comparisons.py. `model` is on the meta device. The sizes are the
    model's where a kernel is compiled for them, and small elsewhere.
    """
    kernels, plain = backends
    config = model.config
    is_cpu = kernels.device.type == "cpu"
    calls: dict[tuple[Callable[..., Comparisons], Any], None] = {}  # a set in order

    def add(function: Callable[..., Comparisons], *sizes: Any) -> None:
        calls[function, sizes] = None

    def dtype_of(norm: Tensor) -> torch.dtype:
        return norm.dtype if norm.dtype is torch.float32 else kernels.dtype

    def fit(size: int, most: int) -> int:
        """A size of at most about `most`. Kernels are compiled for what its last bits divide."""
        return size if size <= most else most + size % 32

    add(compare.add_rms_norm, config.hidden_size, dtype_of(model.norm))
    attentions: list[Any] = [layer.self_attn for layer in model.layers]
    for attn in attentions:
        if hasattr(attn, "norms"):
            norms = attn.norms
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            sizes = heads, None if norms is None else dtype_of(norms[0]), block_size, is_fp8
            add(compare.norm_rope_store, *sizes)
            add(compare.attend, *sizes, config.windows[config.kv_layers[attn.layer]])
        else:
            add(compare.delta_rule, attn.sizes)
    is_gelu = model.layers[0].mlp.activation == "gelu_and_mul"
    for module in model.linears():
        outputs, inputs = module.weight.shape
        names = [*module.projections]
        num = num_experts(names)
        is_up = names[-1].endswith("up_proj")
        if is_up:
            activation = compare.gelu_and_mul if is_gelu else compare.silu_and_mul
            add(activation, outputs // max(1, num) // 2)
        if num and is_up:
            size = outputs // num // 2
            add(compare.expert_mlp, num, fit(size, 64) if is_cpu else size, fit(inputs, 64))
        if not num and (is_cpu or kernels.linear is not plain.linear):
            name = "lm_head" if "lm_head" in names else "q_proj"
            add(compare.linear, name, fit(outputs, 256), fit(inputs, 1024), module.bias is not None)
    add(compare.sample, min(vocab_size, 4096) if is_cpu else vocab_size)
    for function, sizes in calls:
        yield function.__name__, function(backends, *sizes)


def replay_is_right(
    runner: DeviceRunner,
    graphs: DecodeGraphs,
    chunks: FusedModel | None,
    max_tokens: int,
) -> bool:
    """Return whether CUDA graphs compute what eager steps do, on all ranks. If not, warn.

    `chunks` has the graphs of steps with chunks. A step has at most `max_tokens` tokens.
    """
    problem = ""
    eager = runner.fused_model
    try:
        check(replay(runner, graphs, chunks or eager, max_tokens), runner.dtype)
    except (ArithmeticError, RuntimeError) as error:
        check_device(runner.device)  # raises an error that no later step survives
        if runner.ranks.size > 1 and isinstance(error, RuntimeError):
            raise  # other ranks wait in this step
        # Text, because the error refers to this frame, and so to the runner.
        problem = str(error) or repr(error)
    finally:
        runner.fused_model = eager
    if runner.ranks.min(int(not problem)):
        return True
    logger.warning(
        "steps run without CUDA graphs, which is slower, because "
        f"{problem or 'they fail on another rank'}, on {system(runner.device)}. "
        "Please report it with the output of the command `nanovllm check`"
    )
    return False


def replay(
    runner: DeviceRunner, graphs: DecodeGraphs, chunks: FusedModel, max_tokens: int
) -> Comparisons:
    """Compare replays with eager steps: chunks of prompts, then a decode of two rows.

    The decode is at a context that attention splits. The rows and the KV cache, which no request
    uses yet, are changed.
    """
    rows = [*range(min(2, runner.rows.num_rows, runner.num_blocks))]
    block_size = runner.rows.block_size
    num_blocks = runner.num_blocks // len(rows)
    context = max(1, min(CONTEXTS[-1], runner.max_model_len, num_blocks * block_size) - 1)
    tables = [[1 + row + i * len(rows) for i in range(context // block_size + 1)] for row in rows]
    vocab_size = runner.model.config.vocab_size
    prompts = [[(7 * i * i + row) % vocab_size for i in range(context)] for row in rows]
    sampling = RowSampling(temperature=0.0, seed=0)
    results = []
    sent = torch.tensor([rows, rows], device=runner.device)  # rows and their order
    # A size that is captured, so that eager steps have the same products. The rest is padded.
    size = min(256, max_tokens)
    replayed = chunks, partial(graphs.replay, rows)
    for model, decode in (replayed, (runner.fused_model, partial(runner.decode, *sent))):
        runner.fused_model = model
        hidden_states = []
        for row, table, prompt in zip(rows, tables, prompts, strict=True):
            new = [NewRow(row, table, sampling)]
            for start in range(0, context, size):
                chunk = Chunk(row, start, prompt[start : start + size], ResultKind.HIDDEN_STATE)
                output = runner.launch(StepPlan(new, chunks=[chunk]))()
                hidden_states.append(output.results[row].hidden_state)
                new = []
        runner.rows.last_tokens[sent[0]] = 0  # both decodes have the same inputs
        hidden, tokens = decode()
        states = torch.tensor(hidden_states, dtype=torch.float32, device="cpu")
        results.append((states, hidden.clone(), tokens.clone()))
    # As before: the next step with these rows sends them again, and nothing has been computed.
    graphs.decode_rows = None
    runner.rows.positions[rows] = 0
    runner.device_rows.positions[sent[0]] = 0
    (found_states, found, tokens), (wanted_states, wanted, _) = results
    # All ranks compute this, before one of them can find a difference.
    logits = runner.model.logits(found)
    yield Comparison("chunks in CUDA graphs", found_states, wanted_states, factor=3)
    yield Comparison(f"{len(rows)} decodes in a CUDA graph", found, wanted, factor=3)
    chosen = logits.gather(1, tokens[:, None])
    best = logits.amax(dim=1, keepdim=True)
    yield Comparison("the tokens of a CUDA graph", chosen, best, factor=3)
