"""The first start on a machine: kernels are compiled by another process, and nobody waits."""

import os
import platform
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import fresh
import pytest
import torch
from filelock import FileLock

numba = pytest.importorskip("numba")

import nanovllm  # noqa: E402
from nanovllm.backends.cpu import compile, jit, kernel_files  # noqa: E402
from nanovllm.loading.select_backend import pick_backend  # noqa: E402
from nanovllm.models.backend import Backend  # noqa: E402

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
def test_a_later_start_computes_the_same_bits(tmp_path) -> None:
    """The process that compiled a kernel called another copy of a function than later ones."""
    code = """
import hashlib
import torch
from nanovllm.backends.cpu.kernels.sampler import token_logprobs
logits = torch.randn(400, 20_000, generator=torch.Generator().manual_seed(0)).bfloat16()
print(hashlib.sha256(token_logprobs(logits, torch.arange(400), 3).numpy()).hexdigest())
"""
    assert start(tmp_path, code)[0] == start(tmp_path, code)[0]


@pytest.mark.slow
def test_first_start_answers_while_kernels_are_compiled(tmp_path, monkeypatch) -> None:
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
    marker = directory / kernel_files.marker(torch.float32).name
    for others in (FileLock(marker.with_suffix(".lock")), nullcontext()):
        with others:
            lines, log = start(tmp_path, cwd=cwd)
        assert lines == ["34 + 58 = 92", "PlainAttention"]
        assert log.count("compiled in the background") == 1
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("*.compiled")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert list(directory.glob(f"{missing}*.nbc"))
    lines, log = start(tmp_path, cwd=cwd)
    assert lines == ["34 + 58 = 92", "NumbaAttention"]
    assert "compil" not in log


def test_nothing_imports_numba_before_the_kernels_are_compiled(tmp_path) -> None:
    code = (
        "import sys, types; from nanovllm.backends.cpu import kernel_files\n"
        "calls = []\n"
        "def popen(command, **options): calls.append(command[-1].splitlines()[-1])\n"
        "kernel_files.subprocess = types.SimpleNamespace(Popen=popen, DEVNULL=-3)\n"
    )
    code += ANSWER + "print('numba' in sys.modules, *calls)\n"
    lines, log = start(tmp_path / "cache", code)
    assert lines[:2] == ["34 + 58 = 92", "PlainAttention"]
    assert lines[2].startswith("False import torch; ")
    assert lines[2].endswith("compile_now(torch.float32)")
    assert log.count("compiled in the background") == 1


def test_plain_torch_where_kernels_cannot_be_compiled(tmp_path, monkeypatch, caplog) -> None:
    """Of a model that is large enough to wait for the kernels."""

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(kernel_files, "DIRECTORY", tmp_path)
    monkeypatch.setattr(compile, "compile_all", fail)
    caplog.set_level("WARNING", logger="nanovllm")
    cpu = torch.device("cpu")
    backend = pick_backend("auto", cpu, torch.float32, num_weights=lambda: 10**9)
    assert type(backend) is Backend
    [record] = caplog.records
    assert "plain torch" in record.getMessage()
    assert "disk full" in record.getMessage()
    with pytest.raises(ValueError, match="Numba cannot compile its kernels.*disk full"):
        pick_backend("numba", cpu, torch.float32, num_weights=lambda: 10**9)
    monkeypatch.setattr(compile, "get_host_cpu_features", lambda: {"f16c": False})
    with pytest.raises(ValueError, match="no F16C"):
        pick_backend("numba", cpu, torch.float32, num_weights=lambda: 10**9)


def test_each_processor_and_dtype_has_its_marker(monkeypatch) -> None:
    markers = {kernel_files.marker(dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert len(markers - {None}) == 2
    digests, read = {kernel_files.digest()}, Path.read_bytes
    for name in ("backends/int4.py", "backends/int8.py", "backends/cpu/kernels/words.py"):
        edited = nanovllm.__path__[0] / Path(name)
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, to=edited: read(path) + b"#" * (path == to)
        )
        digests.add(kernel_files.digest())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX0")
    assert len({*digests, kernel_files.digest()}) == 5


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of another kind")
def test_kernels_compile_for_other_processors(tmp_path) -> None:
    """LLVM accepts the kernels for a processor that this one need not be. They do not run, so that
    they are not optimized.
    """
    code = """
import numpy as np
from numba import int32, int64, typeof, uint16
from nanovllm.backends.cpu.kernels import amx, attention, int8, simd
from nanovllm.backends.cpu.kernels.llvm import dot
dot.HAS_BF16 = dot.HAS_VNNI = dot.HAS_AVX512 = True
int8.amx_tile.compile((int32, *[int64] * 6))
for unit in (amx, simd):
    unit.linear_blocks.compile((*[int64] * 8, uint16, int64, int64))
qkv, cache = np.empty((0, 1, 32), np.uint16), np.empty((0, 1, 16, 32), np.uint16)
ints, partial = np.empty((0, 1), np.int64), np.empty((0, 0, 0), np.float32)
groups = ints, ints, ints.ravel(), ints.astype(np.int32)
arguments = (qkv, qkv, partial, cache, cache, ints.ravel(), *groups, True, 0, 1.0, 0, 0)
attention.attend_groups.compile(tuple(map(typeof, arguments)))
for kernel in (amx.linear_blocks, attention.attend_groups, simd.linear_blocks, int8.amx_tile):
    code = kernel.inspect_asm(kernel.signatures[0])
    print(*(name for name in ("tdpbf16ps", "vdpbf16ps", "tdpbsud", "vpdpbusd") if name in code))
"""
    features = "+amx-tile,+amx-bf16,+amx-int8"
    processor = dict(NUMBA_CPU_NAME="sapphirerapids", NUMBA_CPU_FEATURES=features)
    lines, _ = start(tmp_path, code, **processor, NUMBA_OPT="0")
    assert lines == ["tdpbf16ps", "vdpbf16ps", "vdpbf16ps", "tdpbsud vpdpbusd"]


ASSEMBLY = """
import re
import llvmlite.binding as llvm

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

def assembly(code, cpu):
    triple = "arm64-apple-macosx" if "apple" in cpu else "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    text = re.sub('target triple = ".*"', f'target triple = "{triple}"', code)
    text = re.sub('target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', text)
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module)
"""
CROSS_COMPILE = """
import torch
from nanovllm.backends.cpu import compile
from nanovllm.backends.cpu.kernels.attention import attend_groups
from nanovllm.models.fp8 import FP8

calls = [*compile.calls(torch.bfloat16, torch.bfloat16)]
known = {kernel for kernel, _ in calls}
calls += [(k, t) for k, t in compile.calls(torch.float32, torch.float32) if k not in known]
calls += [(k, t) for k, t in compile.calls(torch.float32, FP8) if k is attend_groups]
names = [k.__name__ for k, _ in calls]
calls = [call for i, call in enumerate(calls) if names[i] != "in_parts" or "in_parts" not in names[:i]]
for kernel, types in calls:
    kernel.compile(types)
    code = kernel.inspect_llvm(types)
    for cpu in ("generic", "apple-m1"):
        called = set(re.findall(r"\\bbl\\t_?([a-z]\\w*)", assembly(code, cpu)))
        print(kernel.__name__, cpu, *sorted(called))
"""
# Functions of Numba, of its threads and of the C library, which exist wherever Numba runs.
RUNTIME = (
    r"(numba_|NRT_|[gs]et_(num_threads|parallel_chunksize|sched_size)$|do_schedul|allocate_sched|"
)
RUNTIME += r"deallocate_sched|(memset|memcpy|bzero|printf|logf?|log10|expf?|powf?|floorf?|rintf?)$)"

# Numba's own compilation for x86 needs F16C, which the code for Arm does not see.
FEATURES = "+f16c" * (platform.machine() == "x86_64")
FOR_ARM = dict(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=FEATURES, NUMBA_OPT="0")


@pytest.mark.slow
def test_kernels_compile_for_arm(tmp_path) -> None:
    """For Linux and for Apple's cores, from code that has no instruction of this processor.

    A call of a function that Numba does not have there would end the process.
    """
    lines, _ = start(tmp_path, ASSEMBLY + CROSS_COMPILE, PYTHONWARNINGS="ignore", **FOR_ARM)
    found: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        kernel, cpu, *called = line.split()
        found[kernel, cpu] = {name for name in called if not re.match(RUNTIME, name)}
    assert {kernel for kernel, _ in found} >= {"attend_groups", "linear_blocks", "compute_layers"}
    assert len(found) == 2 * len({kernel for kernel, _ in found})
    assert set().union(*found.values()) == set()


SDOT = """
from llvmlite import ir
from numba import int32, int64
from nanovllm.backends.cpu.kernels import int4, simd
from nanovllm.backends.cpu.kernels.llvm import dot

def call_later(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    llvm.add_symbol(f"later.{name}", 1)
    function = dot.cgutils.get_or_insert_function(builder.module, kind, f"later.{name}")
    return builder.call(function, arguments)

# Numba compiles for a processor that cannot know SDOT.
dot.HAS_SDOT, dot.call = True, call_later
for kernel, types in ((simd.add_block, (int32, *[int64] * 6)), (int4.multiply_block, (int64,) * 7)):
    kernel.compile(types)
    code = kernel.inspect_llvm(types).replace("@later.", "@llvm.")
    for cpu in ("neoverse-n1", "neoverse-v1", "apple-m1"):
        lines = [re.split("//|;", line)[0].rstrip() for line in assembly(code, cpu).splitlines()]
        # Blocks of instructions that nothing jumps into or out of.
        lines = [line for line in lines if line.endswith(":") or re.match(r"\\t[a-z]", line)]
        parts = re.split(r"\\S+:\\n|\\t(?:b|b\\.\\w+|t?cbn?z|tbn?z|ret)\\b.*\\n", "\\n".join(lines))
        for part in parts:
            if "sdot" in part:
                print(kernel.__name__, cpu, part.count("sdot"), len(part.splitlines()))
"""
# The most instructions of a step that has so many SDOT, on a Neoverse N1, a Neoverse V1 and an Apple
# M1, without the branch at its end. In int8 16 SDOT can be a row with 256 bytes of weights, and 24
# are 6 rows with 64 bytes. In int4 8 SDOT are a row with 64 bytes, and 64 are 8 rows. Without SDOT, a
# row with 128 bytes takes 127 to 151 instructions in int8, and 185 to 193 in int4.
INSTRUCTIONS = {
    "add_block": {16: (46, 47, 46), 24: (49, 50, 46)},
    "multiply_block": {
        8: (54, 54, 54),
        16: (84, 84, 84),
        32: (136, 135, 135),
        64: (323, 236, 228),
    },
}


@pytest.mark.slow
def test_arms_dot_product(tmp_path) -> None:
    """It is in the inner loops of int8 and int4, which do not become longer."""
    lines, _ = start(tmp_path, ASSEMBLY + SDOT, PYTHONWARNINGS="ignore", **FOR_ARM)
    cpus = "neoverse-n1", "neoverse-v1", "apple-m1"
    found = {kernel: {n: [0, 0, 0] for n in counts} for kernel, counts in INSTRUCTIONS.items()}
    for line in lines:
        kernel, cpu, sdot, length = line.split()
        longest = found[kernel][int(sdot)]
        longest[cpus.index(cpu)] = max(longest[cpus.index(cpu)], int(length))
    for kernel, counts in INSTRUCTIONS.items():
        for sdot, limits in counts.items():
            pairs = [*zip(found[kernel][sdot], limits, strict=True)]
            assert all(0 < length <= limit for length, limit in pairs), (kernel, sdot, pairs)


@pytest.mark.parametrize(
    ("name", "flags", "has_sdot"),
    [
        ("neoverse-n1", "Features : fp asimd asimddp", True),
        ("neoverse-n1", "Features : fp asimd", False),
        ("neoverse-n1", None, False),  # the file cannot be read
        ("cortex-a72", "Features : fp asimd", False),
        ("generic", "Features : fp asimd asimddp", False),  # LLVM does not know the processor
        ("apple-m1", None, True),
        ("apple-a12", None, False),  # before SDOT
        ("znver5", "flags : fpu avx512f avx512_vnni", False),
    ],
)
def test_sdot_is_for_processors_that_have_it(
    name: str, flags: str | None, has_sdot: bool, monkeypatch
) -> None:
    monkeypatch.setattr(jit, "get_host_cpu_name", lambda: name)
    read = Mock(return_value=flags) if flags else Mock(side_effect=OSError)
    monkeypatch.setattr(Path, "read_text", read)
    assert jit.has_sdot.__wrapped__() is has_sdot
    for variable in ("CPU_NAME", "CPU_FEATURES"):  # Numba compiles for another processor
        with monkeypatch.context() as patch:
            patch.setattr(jit.config, variable, "something")
            assert not jit.has_sdot.__wrapped__()


def test_directory_of_compiled_code(tmp_path, monkeypatch) -> None:
    """It is somewhere else if it cannot be made where it should be. Nothing is removed."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    old = tmp_path / "kernels-of-somebody-else" / "code.nbc"
    old.parent.mkdir()
    old.touch()
    for path in (old, old.parent):
        os.utime(path, (0, 0))
    path = kernel_files.make_directory()
    assert path is not None
    assert path.parent == tmp_path
    assert kernel_files.make_directory() == path
    assert old.exists()
    path.rmdir()
    path.touch()
    for place in (tmp_path, path / "below a file"):
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
        other = kernel_files.make_directory()
        assert other is not None
        assert tmp_path not in other.parents


@pytest.mark.slow
def test_code_follows_the_sources_of_other_kernels(tmp_path) -> None:
    """A kernel of the sampler calls `exp` of cpu/primitives.py, which Numba's cache overlooks. It is
    compiled again if a text has changed, not if a time has.
    """
    package, found = tmp_path / "nanovllm", []
    ignored = shutil.ignore_patterns("__pycache__", "demo", "lessons", "benchmarks")
    shutil.copytree(Path(nanovllm.__file__).parent, package, ignore=ignored)
    source = package / "backends" / "cpu" / "kernels" / "primitives.py"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import numpy as np; from nanovllm.backends.cpu import kernel_files\n"
        "from nanovllm.backends.cpu.kernels import sampler\n"
        "weigh, one = sampler._exp_weights, np.ones(1, np.float32)\n"
        "print(weigh(one, one[0], one[0], np.empty_like(one)), len(weigh.stats.cache_hits))\n"
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


def test_nowhere_to_keep_kernels(tmp_path) -> None:
    """Neither __pycache__ nor a home that can be written: one line says so and what helps, and the
    answer comes at once.
    """
    code = "import errno, tempfile\ndef refuse(dir): raise OSError(errno.EROFS, dir)\n"
    lines, log = start(tmp_path, f"{code}tempfile.TemporaryFile = refuse\n{ANSWER}")
    assert lines == ["34 + 58 = 92", "PlainAttention"]
    assert "plain torch" in log
    assert log.count("set NUMBA_CACHE_DIR") == 1
