"""Systems that are not Linux, as far as this one can imitate them: nothing was run on a Mac or Windows.

A process first imports the libraries, which have files of their own for each system, and then loses
what only Linux has.
"""

import fresh
import pytest

IMITATION = """
import builtins, ctypes, io, os, sys
import filelock, numba, psutil, torch, tqdm, transformers, xxhash
from transformers import AutoTokenizer

memory = psutil.virtual_memory()
psutil.virtual_memory = lambda: memory

def without_linux(function):
    def refuses(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)
    return refuses

def no_library(name, *args, CDLL=ctypes.CDLL, **kwargs):
    if name is None:
        raise TypeError("bad argument type for built-in operation")  # as on Windows
    return CDLL(name, *args, **kwargs)

for place, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
    setattr(place, name, without_linux(getattr(place, name)))
for name in ("fcntl", "resource", "triton", "pwd", "grp", "termios", "readline"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sysconf", "fork", "register_at_fork", "setsid", "killpg"):
    delattr(os, name)
ctypes.CDLL = no_library
sys.platform = PLATFORM
"""
ANSWERS = """
from nanovllm import LLM
question = [{"role": "user", "content": "What is 34 + 58?"}]
for backend in ("sdpa", "numba", "auto"):
    llm = LLM(device="cpu", attention_backend=backend, swap_space=0.01)
    print(llm.chat(question, use_tqdm=False)[0].outputs[0].text, type(llm.engine.runner.attention).__name__)
"""
# The kernels of this processor, which are there already; those of an unknown one would be compiled.
KERNELS = "import nanovllm.backends.cpu.kernel_files\n"
IMPORTS = """
import importlib, pkgutil
# These need Triton, or a file of a learner.
OTHER = ("nanovllm.backends.gpu", "tools.benchmarks.next", "lessons.puzzles", "lessons.tasks.engine")
import bench, example, lessons, nanovllm, tools.benchmarks
for package in (lessons, nanovllm, tools.benchmarks):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(OTHER) and "__main__" not in module.name:
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(module.name, error.name or error.__cause__.name, sep=": ")
"""
# Packages that are not installed with nanovllm.
OPTIONAL = {"llguidance", "gguf", "vllm", "ray", "lm_eval", "pyarrow"}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_answers(platform: str) -> None:
    pytest.importorskip("numba")
    done = fresh.run(KERNELS + IMITATION.replace("PLATFORM", repr(platform)) + ANSWERS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["34 + 58 = 92 PlainAttention", "34 + 58 = 92 NumbaAttention"]
    assert lines[2].startswith("34 + 58 = 92 ")


@pytest.mark.slow
def test_modules_can_be_imported() -> None:
    """Also the command, the lessons, the benchmarks and the example."""
    done = fresh.run(IMITATION.replace("PLATFORM", "'win32'") + IMPORTS)
    assert done.returncode == 0, done.stderr
    failed = dict(line.split(": ") for line in done.stdout.splitlines())
    assert {k: v for k, v in failed.items() if v.partition(".")[0] not in OPTIONAL} == {}


@pytest.mark.slow
def test_kernels_of_a_mac(tmp_path) -> None:
    """Tests of the kernels in float32 without what x86 and Linux have; see helpers/imitate_arm.py.

    Those of weights in int8 and int4 multiply with Arm's instruction SDOT, which is imitated.
    """
    pytest.importorskip("numba")
    code = """
import imitate_arm, sys, pytest, torch
from nanovllm.backends.cpu import compile, jit
from nanovllm.backends.cpu.kernels import product, simd
from nanovllm.backends.cpu.kernels.llvm import dot
assert jit.kernel_lock() is jit.LOCK  # Numba's own threads, without OpenMP
assert dot.HAS_SDOT and product.WEIGHT_OFFSET == 0 and simd.READ_ONCE == simd.HEIGHT
compile.compile_now(torch.float32)
files = ["cpu/test_linear", "cpu/test_fused_step", "cpu/kernels/test_experts", "test_quantized"]
# What is left out needs conftest.py, or is about bfloat16.
names = "not bfloat16 and not are_freed and not do_not_fit and not engine_stores"
options = "-q", "-n", "0", "--noconftest", "-m", "not slow", "-k", names, "-p", "no:cacheprovider"
sys.exit(pytest.main([*options, *(f"tests/backends/{name}.py" for name in files)]))
"""
    done = fresh.run(code, fresh.ROOT, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
