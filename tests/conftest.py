"""What tests share: the environment, the order in which they run, and LLMs that are made once."""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

# Kernels run in Triton's interpreter where there is no GPU. It is chosen when they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from checkpoints import make_checkpoint, make_config, random_llm, wrong_by_task
from fake_runner import make  # noqa: F401 (a fixture)

from nanovllm import LLM
from nanovllm.loading.checkpoint import find_checkpoint
from nanovllm.models.fp8 import FP8
from nanovllm.utils.host import available_cores
from tools.training import data

# A shell without job control lets what it starts in the background ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny products gain nothing from threads, and a busy machine makes them wait for one another.
torch.set_num_threads(1)

DTYPES = torch.bfloat16, torch.float32  # of the CPU's kernels

# Tests that share an expensive result: dry runs, answers of transformers, a large model, graded
# answers, a process that forks ranks.
GROUPS = {
    "dry runs": r"/test_dry_run\.py::",
    "parity": r"/test_qwen3\.py::",
    "real model": r"/test_real_model\.py::",
    "ranks": r"/test_parallel\.py::",
    "grades": r"::test_(grades|accuracy_in_bf16)",
}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes run the whole suite. What the command line names runs in this process alone, so
    does everything with a debugger, and where there is a GPU, whose memory one engine takes."""
    return (
        2
        if is_whole(config) and len(available_cores()) > 1 and not torch.cuda.is_available()
        else 0
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist what the command line said."""
    node.workerinput["whole"] = is_whole(node.config)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All cases of a test, or all tests of a group, go to the process that is free.

    pytest-xdist has a mark for groups, but its version 3.8 ignores it with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "/test_gpu_kernels.py::" in nodeid:
                return nodeid  # each case compiles other kernels
            groups = (name for name, pattern in GROUPS.items() if re.search(pattern, nodeid))
            return next(groups, nodeid.partition("[")[0])

    config.option.loadscopereorder = False  # by the number of cases; ours is below
    return Scheduler(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that take long")


def is_whole(config: pytest.Config) -> bool:
    """Return whether the command line names no test."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, unless --all, -m or the names of tests ask for them.

    Of two processes, none should begin something long when the other is done.
    """
    options = config.option
    asked = options.all or options.markexpr or options.keyword
    is_worker = hasattr(config, "workerinput")
    whole = config.workerinput["whole"] if is_worker else is_whole(config)
    if whole and not asked:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    if is_worker:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Collections of garbage look at what comes now, and not at all that was imported."""
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the CPU's kernels before the first test: otherwise small models run in torch."""
    if session.config.getoption("numprocesses"):
        return  # the two processes do it
    if session.config.option.markexpr == "gpu":
        return  # a card's time is short
    try:
        from nanovllm.backends.cpu import backend, compile
    except ImportError:
        return  # without Numba
    if hasattr(session.config, "workerinput"):
        share_compilation()
    for dtype in DTYPES:
        compile.compile_now(dtype)
        # Tests replace kernels, which the first start would find to be wrong.
        for kind in (backend.CpuBackend, backend.CpuInt8Backend, backend.CpuInt4Backend):
            kind(torch.device("cpu"), dtype).set_checked()


def share_compilation() -> None:
    """Compile what the whole suite needs, fp8 caches too, with the other process: each first does
    what the other is not doing, and then waits for what the other has begun."""
    from nanovllm.backends.cpu import compile, kernel_files

    # The same kernel of several lists once: in the order of a list, in which attention comes first.
    work: dict[tuple[Any, Any], int] = {}
    for dtypes in [*((d, d) for d in DTYPES), *((d, FP8) for d in DTYPES)]:
        for place, call in enumerate(compile.calls(*dtypes)):
            work.setdefault(call, place)
    calls = sorted(work, key=work.__getitem__)
    for wait in (False, True):
        for number, (kernel, types) in enumerate(calls):
            lock = FileLock(kernel_files.DIRECTORY / f"tests-{number}.lock")
            with suppress(Timeout), lock.acquire(timeout=-1 if wait else 0):
                kernel.compile(types)


@pytest.fixture(autouse=True)
def _gpu_memory(request) -> Iterator[None]:
    """The next test may need the memory of a GPU that this one has taken."""
    yield
    if request.node.get_closest_marker("gpu"):
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _imported_modules() -> Iterator[None]:
    """Collections of garbage do not look at the many modules that this test has imported either."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 50:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _columns(monkeypatch) -> None:
    """The lessons wrap their text to the terminal."""
    monkeypatch.setenv("COLUMNS", "100")


# Fixtures belong to the session: tests of all files take turns, so that those of a module would be
# made again and again.
@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A random checkpoint, and transformers' model of it. Tests change neither."""
    path = tmp_path_factory.mktemp("checkpoint")
    return path, make_checkpoint(path)


@pytest.fixture(scope="session")
def path(checkpoint: tuple[Path, torch.nn.Module]) -> Path:
    return checkpoint[0]


@pytest.fixture(scope="session")
def large(tmp_path_factory) -> Path:
    """A checkpoint of 160 MB in bfloat16, in several files, to measure memory. Weights are 0.01."""
    from huggingface_hub import save_torch_state_dict
    from transformers import Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("large")
    sizes = dict(hidden_size=1024, intermediate_size=3072, vocab_size=20_000, num_hidden_layers=4)
    config = make_config(tie=True, **sizes)
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    weights = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    save_torch_state_dict(weights, path, max_shard_size="40MB")
    return path


@pytest.fixture(scope="session")
def llm(path: Path) -> LLM:
    """Its engine, for at most 128 tokens. Tests leave it without a request."""
    return random_llm(path, max_model_len=128)


@pytest.fixture(scope="session")
def embedded() -> LLM:
    """The embedded model in float32, with a large pool. Tests leave it without a request."""
    return LLM(dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def embedded_bf16() -> LLM:
    """The same in bfloat16. The tests that use it are one group, "grades"."""
    return LLM(dtype="bfloat16", device="cpu")


@pytest.fixture(scope="session")
def wrong_in_bf16(embedded_bf16: LLM) -> dict[str, tuple[list[tuple[data.Sample, str]], int]]:
    return wrong_by_task(embedded_bf16, number=50)


@pytest.fixture(scope="session")
def small_llm(path: Path) -> LLM:
    """An engine with a cache of 10 blocks, or 160 tokens. Tests leave it without a request."""
    return random_llm(path, num_kv_cache_blocks=10)


@pytest.fixture(scope="session")
def larger_tokenizer(tmp_path_factory) -> Path:
    """The embedded model's tokenizer with 40 more tokens: 1042 and 1043 are zebra and <|more|>."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(find_checkpoint("qwen3-nano"))
    tokenizer.add_tokens(["zebra"])
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)
    tokenizer.add_tokens([f"zebra{i}" for i in range(38)])
    tokenizer.save_pretrained(path)
    return path
