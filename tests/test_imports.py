"""Imports point one way, the control plane needs no torch, and nothing needs a GPU or Triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# A module may import those further down the line, never back.
LINE = [
    "nanovllm.llm",
    "nanovllm.engine.llm_engine",
    "nanovllm.engine.request",
    "nanovllm.engine.scheduler",
    "nanovllm.engine.block_manager",
    "nanovllm.engine.sequence",
    "nanovllm.engine.interrupt",
    "nanovllm.runner.model_runner",
    "nanovllm.runner.choose",
    "nanovllm.models",
    "nanovllm.attention.triton",
    "nanovllm.attention.numba",
    "nanovllm.attention.sdpa",
    "nanovllm.attention.backend",
    "nanovllm.kernels",
    "nanovllm.runner.sampler",
    "nanovllm.layers",
    "nanovllm.runner",
    "nanovllm.plan",
    "nanovllm.detokenizer",
    "nanovllm.sampling_params",
    "nanovllm.outputs",
    "nanovllm.checkpoint",
    "nanovllm.config",
]


def rank(module: str) -> int:
    homes = [i for i, name in enumerate(LINE) if module == name or module.startswith(name + ".")]
    assert homes, f"{module} has no place in the line of imports"
    return max(homes, key=lambda i: len(LINE[i]))


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
    tools = {"demo", "benchmarks"}  # they stand outside and use the whole
    files = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"]
    paths = [p for p in files if not tools & set(p.parts)]
    return [
        (".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts), p) for p in sorted(paths)
    ]


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_arrows_point_one_way(module: str, path: Path) -> None:
    for target in imported(path):
        assert rank(module) <= rank(target), f"{module} imports {target}, which comes before it"
    if module.startswith(("nanovllm.engine.s", "nanovllm.engine.b")):
        assert not any("runner" in target for target in imported(path))
    if module.startswith("nanovllm.runner"):
        assert not any("engine" in target for target in imported(path))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_plane_loads_no_torch() -> None:
    run(
        "import sys, nanovllm.engine.scheduler, nanovllm.engine.block_manager, nanovllm.plan\n"
        "import nanovllm.sampling_params, nanovllm.outputs, nanovllm.config, nanovllm.demo.data\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


def test_histories_run_without_torch() -> None:
    run(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from oracle import run_history\n"
        "for seed in range(300): run_history(seed)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


def test_works_without_triton_and_without_model_code() -> None:
    """Triton hidden; and of transformers the tokenizers only, never a model's code."""
    run(
        "import sys; sys.modules['triton'] = None\n"
        "from nanovllm import LLM, SamplingParams\n"
        "out = LLM().chat([{'role': 'user', 'content': 'What is 2 + 3?'}], use_tqdm=False)\n"
        "assert out[0].outputs[0].text == '2 + 3 = 5', out\n"
        "loaded = [m for m in sys.modules if m.startswith('transformers.models.') and 'modeling' in m]\n"
        "assert not [m for m in loaded if 'qwen' in m], loaded\n"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )


def test_public_names() -> None:
    import nanovllm

    assert set(nanovllm.__all__) <= set(dir(nanovllm))
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = nanovllm.LLMs
