"""The first start on a machine: kernels are compiled by another process, and nobody waits."""

import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import fresh
import pytest
import torch

numba = pytest.importorskip("numba")

import nanovllm  # noqa: E402
from nanovllm.backends.cpu import attention, compile, kernel_files  # noqa: E402
from nanovllm.backends.cpu.kernels.units.amx import AMX  # noqa: E402
from nanovllm.loading.checkpoint import Checkpoint  # noqa: E402

ANSWER = """
from nanovllm import LLM
llm = LLM(dtype="float32", device="cpu")
question = [{"role": "user", "content": "What is 34 + 58?"}]
print(llm.chat(question, use_tqdm=False)[0].outputs[0].text)
print(type(llm.engine.runner.attention).__name__)
"""


def start(
    cache: Path, code: str = ANSWER, cwd: Path | None = None, **environment: str
) -> tuple[list[str], str]:
    """The lines that a new process prints, and its log."""
    done = fresh.run(code, cwd, **{"NUMBA_CACHE_DIR": str(cache)} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_first_start_answers_while_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first starts, of which one compiles, and a later one that uses what was compiled.

    One kernel is missing, because to compile all of them would take half a minute more. During the
    first start another process holds the lock, as one that compiles does. No file of the current
    directory is run.
    """
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    for name in ("numba", "torch", "json"):
        (cwd / f"{name}.py").write_text("raise ImportError('a file of the current directory')")
    compile.compile_now(torch.float32)
    source = kernel_files.DIRECTORY
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    directory = kernel_files.make_directory()
    missing = "pointwise.silu_and_mul_rows-"
    assert list(source.glob(f"{missing}*.nbc"))
    for path in source.glob("*.nb[ic]"):
        if not path.name.startswith(missing):
            shutil.copy2(path, directory)
    lock = directory / kernel_files.marker(torch.float32).with_suffix(".lock").name
    for others in (kernel_files.locked(lock), nullcontext()):
        with others:
            lines, log = start(tmp_path, cwd=cwd)
        assert lines == ["34 + 58 = 92", "PlainAttention"]
        assert log.count("compiled in the background") == 1
        assert "could not compile" not in log
        assert len(list(directory.glob("*.log"))) <= isinstance(others, nullcontext)
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("*.compiled")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert list(directory.glob(f"{missing}*.nbc"))
    lines, log = start(tmp_path, cwd=cwd)
    assert lines == ["34 + 58 = 92", "NumbaAttention"]
    assert "compil" not in log


def test_nothing_imports_numba_before_the_kernels_are_compiled(tmp_path: Path) -> None:
    """One of two processes that start at once compiles."""
    code = (
        "import os, sys, types; from nanovllm.backends.cpu import kernel_files\n"
        "calls = []\n"
        "def popen(command, pass_fds, **options):\n"
        "    os.dup(pass_fds[0])  # as a child process inherits it\n"
        "    calls.append(command[-1].splitlines()[-1])\n"
        "kernel_files.subprocess = types.SimpleNamespace(Popen=popen, DEVNULL=-3)\n"
    )
    code += ANSWER + "LLM(dtype='float32')\nprint('numba' in sys.modules, *calls)\n"
    lines, log = start(tmp_path / "cache", code)
    assert lines[:2] == ["34 + 58 = 92", "PlainAttention"]
    assert lines[2].startswith("False import torch; from nanovllm.backends.cpu import compile;")
    assert lines[2].count("compile_marked(torch.float32)") == 1
    assert log.count("compiled in the background") == 2


def test_a_compilation_that_failed_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With its last line, unless it was killed. While it runs, none is reported or started."""
    started: list[subprocess.Popen] = []
    popen, commands = subprocess.Popen, iter(("raise OSError('disk full')", *["input()"] * 2))

    def start_child(command: list[str], **options: object) -> None:
        options |= {"stdin": subprocess.PIPE}  # for which input() waits
        started.append(popen([sys.executable, "-c", next(commands)], **options))

    def reports() -> list[str]:
        caplog.clear()
        assert not kernel_files.is_ready(torch.float32)
        assert "compiled in the background" in caplog.records[-1].getMessage()
        return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    monkeypatch.setattr(kernel_files, "DIRECTORY", tmp_path)
    monkeypatch.setattr(kernel_files.subprocess, "Popen", start_child)
    caplog.set_level("INFO", logger="nanovllm")
    assert reports() == []
    assert started[0].wait() == 1
    [report] = reports()
    assert "(OSError: disk full)" in report
    assert "-m nanovllm.backends.cpu.compile float32" in report
    assert reports() == []
    assert len(started) == 2
    started[1].kill()
    started[1].wait()
    [report] = reports()
    assert "(without a message)" in report
    started[2].kill()
    started[2].wait()
    monkeypatch.setattr(compile, "compile_all", lambda *arguments: None)
    compile.compile_now(torch.float32)
    assert kernel_files.is_ready(torch.float32)
    assert not list(tmp_path.glob("*.log"))


def test_each_processor_and_dtype_has_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    markers = {kernel_files.marker(dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert len(markers - {None}) == 2
    digests = {kernel_files.digest()}
    assert "model name" in kernel_files.processor() or platform.machine() != "x86_64"
    monkeypatch.setattr(kernel_files, "processor", lambda: "flags: amx_bf16")
    digests.add(kernel_files.digest())
    monkeypatch.setenv("NUMBA_CPU_NAME", "x86-64-v3")
    digests.add(kernel_files.digest())
    assert len(digests) == 3


def test_with_amx_every_block_size_is_compiled_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX is emulated: what would be compiled is noted, and nothing runs."""
    compiled: list[tuple[torch.dtype, bool | None]] = []
    monkeypatch.setattr(AMX, "is_available", lambda: True)
    monkeypatch.setattr(kernel_files, "DIRECTORY", tmp_path)
    for module in (attention, compile):
        monkeypatch.setattr(module, "compile_all", lambda *arguments: compiled.append(arguments))
    monkeypatch.setattr(attention, "address_for", lambda *arguments: 0)
    directory = Path(nanovllm.__file__).parent / "loading" / "qwen3-nano"
    config = Checkpoint(directory).model_config
    for dtype in (torch.float32, torch.bfloat16):
        compiled.clear()
        compile.compile_now(dtype)
        background = set(compiled)
        for block_size in (4, 16):
            compiled.clear()
            attention.NumbaAttention(config, 2, block_size, dtype, torch.device("cpu"))
            assert set(compiled) <= background
    assert len(background) == 2


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of another kind")
def test_kernels_compile_for_other_processors(tmp_path: Path) -> None:
    """LLVM accepts the kernels for a processor that this one need not be. They do not run, so that
    they are not optimized.
    """
    code = """
import numpy as np
from numba import int64, typeof
from nanovllm.backends.cpu import int8
from nanovllm.backends.cpu.kernels.units import amx, avx512
int8.amx_tile.compile((int64,) * 6)
for unit in (amx, avx512):
    unit.linear_blocks.compile((int64,) * 9)
qkv, cache = np.empty((0, 1, 32), np.uint16), np.empty((0, 1, 16, 32), np.uint16)
ints, lse = np.empty((0, 1), np.int64), np.empty((0, 1), np.float32)
groups = ints, ints, ints.astype(np.int32)
arguments = (qkv, qkv, lse, cache, cache, *groups, True, 0, 0)
amx.attend_groups.compile(tuple(map(typeof, arguments)))
for kernel in (amx.linear_blocks, amx.attend_groups, avx512.linear_blocks, int8.amx_tile):
    code = kernel.inspect_asm(kernel.signatures[0])
    print(*(name for name in ("tdpbf16ps", "vdpbf16ps", "tdpbsud") if name in code))
"""
    features = "+amx-tile,+amx-bf16,+amx-int8"
    processor = dict(NUMBA_CPU_NAME="sapphirerapids", NUMBA_CPU_FEATURES=features)
    lines, _ = start(tmp_path, code, **processor, NUMBA_OPT="0")
    assert lines == ["tdpbf16ps", "tdpbf16ps", "vdpbf16ps", "tdpbsud"]


def test_directory_of_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no process has used for a week are removed, and nothing else."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    path = kernel_files.make_directory()
    assert path is not None
    assert path.parent == tmp_path
    names = {"kernels-1": 8, "kernels-2": 6, "others": 8, path.name: 8}
    for name, days in names.items():
        directory = path.with_name(name)
        directory.mkdir(exist_ok=True)
        (directory / "code.nbc").touch()
        os.utime(directory, (0, time.time() - days * 24 * 3600))
    assert kernel_files.make_directory() == path
    assert {p.name for p in path.parent.iterdir()} == names.keys() - {"kernels-1"}
    assert path.stat().st_mtime > time.time() - 3600
    # If it cannot be made there, or a file is in the way, it is somewhere else.
    shutil.rmtree(path)
    path.touch()
    for place in (tmp_path, path / "below a file"):
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
        other = kernel_files.make_directory()
        assert other is not None
        assert tmp_path not in other.parents


@pytest.mark.slow
def test_code_follows_the_sources_of_other_kernels(tmp_path: Path) -> None:
    """A kernel of the sampler calls `exp` of cpu/primitives.py, which Numba's cache overlooks. It is
    compiled again if a text has changed, not if a time has.
    """
    package, found = tmp_path / "nanovllm", []
    ignored = shutil.ignore_patterns("__pycache__", "demo", "lessons", "benchmarks")
    shutil.copytree(Path(nanovllm.__file__).parent, package, ignore=ignored)
    source = package / "backends" / "cpu" / "primitives.py"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import numpy as np; from nanovllm.backends.cpu import kernel_files, sampler\n"
        "print(sampler._weight(np.float32(0)), len(sampler._weight.stats.cache_hits))\n"
        "print(kernel_files.DIRECTORY)"
    )
    for change in ("", "", "f32(2) * "):
        text = source.read_text()
        source.write_text(text.replace("return power *", f"return {change}power *"))
        source.with_name("sampler.py").touch()
        # Without NUMBA_CACHE_DIR it is beside the sources.
        found.append(start(Path(), code, NUMBA_CACHE_DIR="")[0])
    values, directories = zip(*found, strict=True)
    assert values == ("1.0 0", "1.0 1", "2.0 0")
    assert directories[0] == directories[1] != directories[2]
    assert {Path(d).parent for d in directories} == {package / "backends" / "cpu" / "__pycache__"}


def test_nowhere_to_keep_kernels(tmp_path: Path) -> None:
    """Neither __pycache__ nor a home that can be written: one line says so and what helps, and the
    answer comes at once. A kernel that is called is compiled all the same, and not kept.
    """
    code = "import errno, tempfile\ndef refuse(dir): raise OSError(errno.EROFS, dir)\n"
    code += f"tempfile.TemporaryFile = refuse\n{ANSWER}"
    code += (
        "import numpy as np; from nanovllm.backends.cpu import kernel_files\n"
        "from nanovllm.backends.cpu.kernels import primitives\n"
        "assert kernel_files.DIRECTORY is None\n"
        "assert primitives.maximum(np.ones(20, np.float32)) == 1\n"
    )
    lines, log = start(tmp_path, code)
    assert lines == ["34 + 58 = 92", "PlainAttention"]
    assert "set NUMBA_CACHE_DIR" in log
