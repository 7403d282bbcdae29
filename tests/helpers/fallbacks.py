"""What an engine on the model of a GPU does if kernels or graphs fail there, or are wrong.

    python tests/helpers/fallbacks.py DIRECTORY

It prints JSON, which test_dry_run.py checks. DIRECTORY has a checkpoint,
and its folder "experts" another one.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import dry_run
import torch
from dry_run import GPU, Graph
from triton.runtime import build
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu.chunk_graphs import ChunkGraphs
from nanovllm.backends.gpu.graphs import CudaCapture
from nanovllm.models.attention import PlainAttention

PROMPTS = [[1 + (7 * i + n) % 150 for i in range(n)] for n in (1, 5, 40, 60)]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8) for i in range(4)]


def generate(directory: str, model: str = "", **options: Any) -> dict[str, Any]:
    """Return tokens or an error, the log, its warnings, and what the engine uses."""
    messages: list[str] = []
    log: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        (log if record.levelno < logging.WARNING else messages).append(record.getMessage())

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("nanovllm")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    fixed = dict(dtype="float32", max_num_seqs=4, max_model_len=128, skip_tokenizer_init=True)
    try:
        with GPU:
            llm = LLM(
                f"{directory}/{model}", device="cuda", num_kv_cache_blocks=99, **fixed | options
            )
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    except ValueError as error:
        return {"error": str(error), "warnings": messages}
    finally:
        logger.removeHandler(handler)
        GPU.capture = None
    runner = llm.engine.runner
    return {
        "tokens": [x.outputs[0].token_ids for x in outputs],
        "warnings": messages,
        "log": " ".join(log),
        "decodes": getattr(runner, "graphs", None) is not None,
        "chunks": isinstance(runner.fused_model, ChunkGraphs),
        "plain attention": type(runner.attention) is PlainAttention,
    }


def failing(error: Callable[[], Exception], *names: str) -> Any:
    """A patch with which kernels of these names, or all, raise an error at their first launch."""
    run = JITFunction.run

    def fail(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        if not names or self.__name__ in names:
            raise error()
        run(self, *args, **kwargs)

    return patch.object(JITFunction, "run", fail)


def wrong_row(kernel: str, name: str) -> Any:
    """A patch with which the last row of a kernel's result `name` is wrong."""
    right = dry_run.REFERENCES[kernel]

    def reference(arguments: Any) -> None:
        right(arguments)
        result = getattr(arguments, name)
        result[-1] += 1

    return patch.dict(dry_run.REFERENCES, {kernel: reference})


def no_c_compiler() -> Exception:
    """The error of Triton, which compiles a module in C before its first launch."""
    with TemporaryDirectory() as empty, patch.dict(os.environ, CC="/nonexistent"):
        os.environ["TRITON_CACHE_DIR"] = empty
        try:
            build.compile_module_from_src("", "cuda_utils")
        except Exception as error:
            return error
    raise AssertionError("there is a compiler")


def raising(owner: Any, name: str, error: Exception) -> Any:
    return patch.object(owner, name, side_effect=error)


def incomplete_replay(sizes: range) -> Any:
    """A patch with which a graph of so many launches leaves one of them out."""
    replay = Graph.replay

    def replay_most(self: Graph) -> None:
        if len(self.calls) in sizes:
            self.calls.pop(len(self.calls) // 2)
        replay(self)

    return patch.object(Graph, "replay", replay_most)


@contextmanager
def lost() -> Iterator[None]:
    """A kernel makes all that follows fail."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with ExitStack() as stack:

        def fail() -> Exception:
            stack.enter_context(raising(torch.cuda, "synchronize", error))
            return error

        stack.enter_context(failing(fail, "_silu_and_mul"))
        yield


@contextmanager
def on_card(major: int, minor: int, shared_memory_kib: int) -> Iterator[None]:
    properties = torch.cuda.get_device_properties(0)
    memory = {"shared_memory_per_block_optin": shared_memory_kib << 10}
    capability = patch.object(torch.cuda, "get_device_capability", lambda _: (major, minor))
    with patch.multiple(properties, **memory), capability:
        yield


def main() -> None:
    torch.set_num_threads(1)
    dry_run.replace_device()
    directory = sys.argv[1]
    out = torch.OutOfMemoryError("CUDA out of memory")
    unsupported = RuntimeError("operation not permitted when stream is capturing")
    compilation = lambda: RuntimeError("PassManager::run failed")  # noqa: E731
    resources = lambda: OutOfResources(300_000, 232_448, "shared memory")  # noqa: E731
    faults: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "none": (ExitStack, {}),
        "no check": (ExitStack, dict(check_kernels=False)),
        "compilation": (lambda: failing(compilation, "_silu_and_mul"), {}),
        "explicit": (
            lambda: failing(compilation, "_silu_and_mul"),
            dict(attention_backend="triton"),
        ),
        "invariant": (
            lambda: failing(compilation, "_linear"),
            dict(batch_invariant=True, dtype="bfloat16"),
        ),
        "resources": (lambda: failing(resources, "_attend"), {}),
        "wrong norm": (lambda: wrong_row("_add_rms_norm", "out"), {}),
        "wrong store": (lambda: wrong_row("_norm_rope_store", "q_out"), {}),
        "wrong attention": (lambda: wrong_row("_attend_decode", "out"), {}),
        "wrong tokens": (lambda: wrong_row("_draw", "tokens"), {}),
        "no C compiler": (lambda: failing(no_c_compiler), {}),
        "decodes": (lambda: raising(CudaCapture, "__call__", unsupported), {}),
        "chunks": (lambda: raising(ChunkGraphs, "_capture", unsupported), {}),
        "memory of chunks": (lambda: raising(ChunkGraphs, "_capture", out), {}),
        "replay": (lambda: incomplete_replay(range(21, 999)), {}),
        "replay of chunks": (lambda: incomplete_replay(range(4, 21)), {}),
        "experts": (ExitStack, dict(model="experts", quantization="int8")),
        "no products": (
            lambda: failing(compilation, "_linear"),
            dict(model="experts", quantization="int8"),
        ),
        "failed replay": (lambda: raising(Graph, "replay", RuntimeError("invalid handle")), {}),
        "illegal access": (lost, {}),
        "T4": (lambda: on_card(7, 5, 64), {}),
        "V100": (lambda: on_card(7, 0, 96), {}),
        "A100 with fp8": (lambda: on_card(8, 0, 163), dict(kv_cache_dtype="fp8")),
    }
    results = {}
    for name, (fault, options) in faults.items():
        GPU.variants.clear()
        with fault():
            results[name] = generate(directory, **options)
        results[name]["variants"] = sorted(GPU.variants.values())
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
