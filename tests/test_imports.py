"""Imports point one way, the control plane needs no torch, and the device folders are optional."""

import ast
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# A module may import from its own rank and from those above it in this list.
RANKS = [
    {"plan", "batch", "config", "outputs", "sampling_params", "pooling", "scoring", "structured"}
    | {"detokenizer", "chat", "checks", "log", "prompts", "trace_events", "vllm_names"},
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


def modules() -> list[tuple[str, Path]]:
    tools = {"demo", "benchmarks", "lessons"}  # they stand outside and use the whole
    files = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"]
    paths = [p for p in files if not tools & set(p.parts)]
    return [
        (".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts), p) for p in sorted(paths)
    ]


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


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_plane_loads_no_torch() -> None:
    run(
        "import sys, nanovllm.engine.llm_engine, nanovllm.tools.training.data\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
def test_histories_run_without_torch() -> None:
    run(
        "import sys; from nanovllm.tools.oracle.oracle import run_history\n"
        "for seed in range(100): run_history(seed)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["triton", "nanovllm.backends.gpu", "nanovllm.backends.cpu"])
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
