"""Imports point one way, the control plane needs no torch, and the device folders are optional."""

import ast
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

from nanovllm import child

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# A module may import from its own rank and from those above it in this list.
RANKS = [
    {"plan", "batch", "config", "outputs", "sampling_params", "pooling", "scoring", "structured"}
    | {"detokenizer", "chat", "checks", "child", "log", "prompts", "time_limit", "trace_events"}
    | {"vllm_names"},
    {"models"},
    {"cpu", "gpu"},
    {"engine", "runner"},
    {"loading", "trace_show"},
    {"beam_search"},
    {"llm"},
    {"openai_format", "trace"},
    {"run_batch", "integrations"},
]


def home(module: str) -> str:
    """The folder or top-level file of a module: "models" of nanovllm.models.qwen3."""
    return module.split(".")[1]


def rank(module: str) -> int:
    ranks = [i for i, homes in enumerate(RANKS) if home(module) in homes]
    assert ranks, f"{module} has no rank"
    return ranks[0]


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("nanovllm.")}


def modules(package: Path = PACKAGE) -> list[tuple[str, Path]]:
    tools = {"demo", "benchmarks", "lessons"}  # they stand outside and use the whole
    files = [p for p in package.rglob("*.py") if p.name != "__init__.py"]
    named = [(p.relative_to(package.parent).with_suffix("").parts, p) for p in sorted(files)]
    return [(".".join(parts), p) for parts, p in named if parts[1] not in tools]


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    package = tmp_path / "demo" / "lessons" / "nanovllm"
    for name in ("engine/core.py", "engine/demo.py", "llm.py", "demo/data.py", "cpu/__init__.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    found = [name.removeprefix("nanovllm.") for name, _ in modules(package)]
    assert found == ["engine.core", "engine.demo", "llm"]
    assert len(modules()) > 50


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_imports_point_one_way(module: str, path: Path) -> None:
    for target in imported(path):
        beside = rank(module) == rank(target) and home(module) != home(target) and rank(module) > 0
        assert rank(target) <= rank(module), f"{module} imports {target}"
        assert not beside, f"{module} and {target} must not know each other"
        if home(module) == "engine":
            assert rank(target) == 0 or home(target) == "engine", f"{module} imports {target}"
            assert home(target) != "batch", f"{module} imports {target}, which needs torch"


def test_one_file_starts_python() -> None:
    """With the path of this process. The report of a GPU is about the repository, in its root."""
    files = [p.name for p in PACKAGE.rglob("*.py") if "sys.executable" in p.read_text()]
    assert sorted(files) == ["child.py", "compile.py", "modes.py"]  # the second in a message


def test_children_import_what_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing from the current directory, and what only this process's path has."""
    for name in ("json", "numba", "torch", "nanovllm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the current directory')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "only_here.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own"), tmp_path])  # no string
    command = child.python("import json, numba, only_here, nanovllm.engine.core\nprint(1 + 1)")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_plane_loads_no_torch() -> None:
    run(
        "import sys, nanovllm.engine.llm_engine, nanovllm.demo.data\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
def test_histories_run_without_torch() -> None:
    run(
        "import sys; from nanovllm.lessons.oracle import run_history\n"
        "for seed in range(100): run_history(seed)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["triton", "nanovllm.gpu", "nanovllm.cpu"])
def test_works_without(missing: str) -> None:
    """Without Triton or a device folder; and of transformers the tokenizers, never a model's code."""
    done = fresh.run(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from nanovllm import LLM, SamplingParams\n"
        "out = LLM().chat([{'role': 'user', 'content': 'What is 2 + 3?'}], use_tqdm=False)\n"
        "assert out[0].outputs[0].text == '2 + 3 = 5', out\n"
        "loaded = [m for m in sys.modules if m.startswith('transformers.models.') and 'modeling' in m]\n"
        "assert not [m for m in loaded if 'qwen' in m], loaded\n"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import nanovllm

    assert set(nanovllm.__all__) <= set(dir(nanovllm))
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = nanovllm.LLMs
