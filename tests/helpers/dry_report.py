"""Every part of bench.py --gpu-report on the model of a GPU, with small sizes and without times.

    python tests/helpers/dry_report.py

It prints JSON, which test_gpu.py checks: the rows of each process, and where the probe of launches
loads its weights. It needs a process of its own, as dry_run.py does.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tools.benchmarks import workloads

# The modules read these tables when they are imported.
TINY = (64, 96, 1, 4, 2, 16, 224, True, 4096)
workloads.SHAPES = dict.fromkeys(("qwen3-0.6b", "qwen3-8b"), TINY)

import dry_run  # noqa: E402

from nanovllm import LLM  # noqa: E402
from nanovllm.backends.gpu import graphs  # noqa: E402
from tools.benchmarks import baselines, roofline, turn  # noqa: E402
from tools.benchmarks.gpu import (  # noqa: E402
    decode,
    engine,
    launches,
    peers,
    probe,
    products,
    pytests,
    rows,
    step,
    timing,
)
from tools.benchmarks.gpu.report import PARTS  # noqa: E402

PEAK = {"bandwidth": 1e12, "buffer_bytes": 1, "flops": 1e15}
SIZES: dict[ModuleType, dict[str, Any]] = {
    timing: dict(COLD_BYTES=1 << 12, REPLAYS=2, MIN_CALLS=2),
    launches: dict(NODES=3),
    products: dict(ROWS=(1, 3)),
    decode: dict(ROWS=(1, 3), CONTEXTS=((5, 40), (32, 32)), CANDIDATES=((32, 2, 3),)),
    step: dict(ROWS=(1, 3), CONTEXT=5, STEPS=2, CHUNK=4, CHUNK_ROWS=2),
    peers: dict(CASES=((2, 32),), WORKSPACE_BYTES=16),
    engine: dict(BATCH_SIZE=2),
    pytests: dict(COMMAND=[sys.executable, "-c", "print('== 3 passed ==')"]),
}


class Event(dry_run.Event):
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0  # ms


@contextmanager
def capturing(graph: Any, pool: Any = None, stream: Any = None, **mode: str) -> Iterator[None]:
    with dry_run.capturing(graph, pool, stream, mode.get("capture_error_mode", "")):
        yield


class Profile:
    """A profiler that saw one kernel of each kind."""

    def __init__(self, activities: Any) -> None:
        names = ("_attend_decode", "nvjet_tst_64x8", "_draw")
        self.events = [SimpleNamespace(key=n, count=4, self_device_time_total=9.0) for n in names]

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def key_averages(self) -> list[SimpleNamespace]:
        return self.events


class FlashInfer(ModuleType):
    __version__ = "0"

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer: Any, kv_layout: str, use_tensor_cores: bool
        ) -> None:
            assert kv_layout == "HND"

        def plan(
            self,
            indptr: Any,
            indices: Any,
            last_page_len: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:
            lengths = (indptr.diff() - 1) * page_size + last_page_len
            assert lengths.tolist() == [32, 32]
            assert len(indices) == indptr[-1]

        def run(self, q: Any, paged_kv_cache: Any) -> Any:
            k, v = paged_kv_cache
            return q + k.float().mean() + v.float().mean()


class Model:
    """A model of transformers that generates zeros."""

    device = torch.device("cpu")

    def generate(self, ids: Any, attention_mask: Any, generation_config: Any) -> Any:
        return torch.zeros(len(ids), ids.shape[1] + generation_config.max_new_tokens)


def gemv(a: Any) -> None:
    a.out.copy_(a.weight.float() @ a.x[: a.INPUTS].float())


LLMS: dict[str, LLM] = {}
FEW: dict[str, Any] = dict(max_num_seqs=3, num_kv_cache_blocks=32, max_model_len=64)


def shared_llm(path: str, **options: Any) -> LLM:
    """All shapes are the same, so that an engine serves all runs with its options."""
    options |= FEW
    key = str(sorted(options.items()))
    if key not in LLMS:
        LLMS[key] = LLM(path, **options)
    LLMS[key].engine.abort_all()
    return LLMS[key]


def make_small() -> None:
    for module, values in SIZES.items():
        for name, value in values.items():
            assert hasattr(module, name), name
            setattr(module, name, value)
    small = dict(count=2, input=(3, 9), output=(2, 3))
    for name, spec in workloads.WORKLOADS.items():
        workloads.WORKLOADS[name] = replace(spec, **small)
    roofline.measure_peak = lambda *_: PEAK
    baselines.load_hf_model = lambda *_: Model()
    turn.LLM = step.LLM = shared_llm
    step.profile = Profile
    graphs.batch_sizes = lambda num: [num]


def replace_device() -> None:
    dry_run.replace_device()
    torch.cuda.graph, torch.cuda.Event = capturing, Event
    generator = torch.Generator
    torch.Generator = lambda device: generator()
    torch.cuda.get_device_name = lambda _: "a model of a GPU"
    torch.backends.cuda.preferred_blas_library = lambda library="default": library
    dry_run.REFERENCES |= {"_empty": lambda a: None, "_gemv": gemv}
    library = FlashInfer("flashinfer")
    library.__spec__ = ModuleSpec("flashinfer", None)
    sys.modules["flashinfer"] = library


def loads_around_wait(early: bool) -> list[int]:
    """Compile the product of the probe for sm_90: its loads of 16 bytes before and after the wait."""
    caught: list[Any] = []

    def catch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        caught.append(dry_run.compile_kernels.Variant(kernel, dry_run.TARGET, args, kwargs))

    x, weight, out = (torch.empty(s, dtype=torch.bfloat16) for s in ((512,), (16, 512), (16,)))
    with patch.object(JITFunction, "run", catch):
        probe.gemv(x, weight, out, True, early)
    options, *specialized = caught[0].packed
    source = ASTSource(caught[0].kernel, *specialized)
    cubin = triton.compile(source, dry_run.TARGET, options.__dict__).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert sass.count("ACQBULK") == 1
    return [part.count("LDG.E.128") for part in sass.split("ACQBULK")]


def main() -> None:
    torch.set_num_threads(1)
    make_small()
    replace_device()
    found = []
    gc.collect()
    gc.freeze()  # as dry_run.py does
    for number, part in enumerate(PARTS):
        for run in part.runs:
            with redirect_stdout(StringIO()) as printed, dry_run.GPU:
                few = {"count": 2} if "count" in run.options else {}
                rows.print_rows(run.module, run.options | few)
            parsed = [rows.parse(line) for line in printed.getvalue().splitlines()]
            found.append({"part": number, "run": str(run), "rows": [row for row in parsed if row]})
    loads = {str(early): loads_around_wait(early) for early in (False, True)}
    print(json.dumps({"runs": found, "loads": loads}))


if __name__ == "__main__":
    main()
