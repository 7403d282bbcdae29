"""Imports point one way, the control plane needs no torch, and the device folders are optional."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import fresh
import pytest

PACKAGE = Path(__file__).parents[1] / "nanovllm"

# A place imports from itself and from those before it. Places between "|" do not know each other.
RULE = (
    "utils < config, sampling_params, inputs, outputs | plan < models < backends < engine | runner "
    "< features < loading < llm < cli"
)
GROUPS = [[set(group.split(", ")) for group in rank.split(" | ")] for rank in RULE.split(" < ")]
OPTIONAL = {"backends", "features", "cli"}


def place(module: str) -> str:
    """Return the folder or file at the top of the package: "models" of nanovllm.models.qwen3."""
    return module.split(".")[1] if module.startswith("nanovllm.") else module


def position(module: str) -> tuple[int, int]:
    """Return the rank of a module's place, and the number of its group in this rank."""
    for rank, groups in enumerate(GROUPS):
        for number, places in enumerate(groups):
            if place(module) in places:
                return rank, number
    raise AssertionError(f"{module} has no rank")


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the modules of the package that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {n for n in found if n.split(".")[0] in ("nanovllm", "lessons", "tools") and "." in n}


def modules(package: Path = PACKAGE) -> list[tuple[str, Path]]:
    files = [path for path in sorted(package.rglob("*.py")) if not path.name.startswith("__")]
    named = [(path.relative_to(package.parent).with_suffix("").parts, path) for path in files]
    return [(".".join(parts), path) for parts, path in named]


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    package = tmp_path / "tools" / "lessons" / "nanovllm"
    for name in ("engine/core.py", "engine/tools.py", "llm.py", "backends/cpu/__init__.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    found = [name.removeprefix("nanovllm.") for name, _ in modules(package)]
    assert found == ["engine.core", "engine.tools", "llm"]
    assert len(modules()) > 50


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_imports_point_one_way(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text())
    for target in imported(ast.walk(tree)):
        (rank, group), (their_rank, their_group) = position(module), position(target)
        assert their_rank <= rank, f"{module} imports {target}; the order is {RULE}"
        knows = rank != their_rank or group == their_group
        assert knows, f"{module} and {target} must not know each other: {RULE}"
        if place(module) == "engine":
            assert place(target) not in {"models", "backends"}, f"{module} imports {target}"
    if place(module) not in OPTIONAL:  # loading and llm import optional places in functions only
        optional = {name for name in imported(tree.body) if place(name) in OPTIONAL}
        assert not optional, f"{module} imports {optional}, which can be deleted"


def test_the_documents_state_the_rule() -> None:
    for page in ("README.md", "docs/contributing.md"):
        assert f"`{RULE}`" in (PACKAGE.parent / page).read_text(), page


def test_the_package_has_fifteen_places() -> None:
    hidden = ("__pycache__", "__main__.py", "py.typed")
    assert len([path for path in PACKAGE.iterdir() if path.name not in hidden]) == 15


def test_one_file_starts_python() -> None:
    """With the path of this process."""
    files = [p.name for p in PACKAGE.rglob("*.py") if "sys.executable" in p.read_text()]
    assert sorted(files) == ["child.py", "kernel_files.py"]  # the second in a message


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_plane_loads_no_torch() -> None:
    run(
        "import sys, nanovllm.engine.llm_engine, tools.training.data\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
def test_histories_run_without_torch() -> None:
    run(
        "import sys; from lessons.oracle.oracle import run_history\n"
        "for seed in range(100): run_history(seed)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["triton", "nanovllm.backends.gpu", "nanovllm.backends.cpu"])
def test_works_without(missing: str) -> None:
    """Without Triton or a device folder, and with no model's code of transformers."""
    done = fresh.run(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from nanovllm import LLM, SamplingParams\n"
        "out = LLM().chat([{'role': 'user', 'content': 'What is 2 + 3?'}], use_tqdm=False)\n"
        "assert out[0].outputs[0].text == '2 + 3 = 5', out\n"
        "loaded = [m for m in sys.modules if m.startswith('transformers.models.')]\n"
        "loaded = [m for m in loaded if 'modeling' in m]\n"
        "assert not [m for m in loaded if 'qwen' in m], loaded\n"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "deleted",
    ["backends features cli", "backends/gpu features/requests/structured.py", "features"],
)
def test_optional_places_can_be_deleted(deleted: str, tmp_path: Path) -> None:
    """A copy of the package without them answers, and says what it cannot do."""
    copy = tmp_path / "nanovllm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted.split():
        if (copy / name).is_dir():
            shutil.rmtree(copy / name)
        else:
            (copy / name).unlink()
    config = {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        # The finder of `pip install -e` would find what is deleted in this repository.
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import nanovllm; from nanovllm import LLM\n"
        f"assert nanovllm.__file__.startswith({str(tmp_path)!r}), nanovllm.__file__\n"
        "llm = LLM(attention_backend='sdpa', max_num_batched_tokens=64)\n"
        "out = llm.chat([{'role': 'user', 'content': 'What is 2 + 3?'}], use_tqdm=False)\n"
        "assert out[0].outputs[0].text == '2 + 3 = 5', out\n"
    )
    if "backends" in deleted.split():
        code += (
            "text = None\n"
            "try: LLM(quantization='int8')\n"
            "except ValueError as error: text = str(error)\n"
            "assert text.startswith(\"quantization='int8' needs nanovllm/backends/int8.py\"), text\n"
        )
    if "features" in deleted.split():
        code += (
            "text = None\n"
            "try: llm.embed('2 + 3')\n"
            "except ValueError as error: text = str(error)\n"
            "assert text == 'embed needs nanovllm/features/requests/embeddings/pooling.py, '"
            " 'which this copy of nanovllm does not have', text\n"
            "text = None\n"
            "params = nanovllm.SamplingParams(min_tokens=3)\n"
            "try: llm.generate('2 + 3', params)\n"
            "except ValueError as error: text = str(error)\n"
            "assert text.startswith('min_tokens needs nanovllm/features/requests/logit_rules, which'), text\n"
            f"try: LLM({str(tmp_path)!r})\n"
            "except ValueError as error: text = str(error)\n"
            "assert 'needs nanovllm/features/models/hybrid/config.py, which' in text, text\n"
        )
    if "cli" in deleted.split():
        example = PACKAGE.with_name("example.py")
        code += (
            "from nanovllm.__main__ import main\n"
            "assert main(['chat']) == 1\n"
            "text = None\n"
            "try: LLM('smollm2-135m')\n"
            "except ValueError as error: text = str(error)\n"
            "assert text.endswith('which needs nanovllm/features/formats/gguf/named.py'), text\n"
            "import runpy\n"
            f"runpy.run_path({str(example)!r})\n"
        )
    done = fresh.run(code, PYTHONPATH=str(tmp_path))
    if "cli" in deleted.split():
        assert "nanovllm chat: needs nanovllm.cli, which this copy" in done.stderr
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import nanovllm

    assert set(nanovllm.__all__) <= set(dir(nanovllm))
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = nanovllm.LLMs
    with pytest.raises(ImportError, match="cannot import name 'EngineArgs'"):
        exec("from nanovllm import EngineArgs")
    exec("from nanovllm import llm, plan")  # submodules
