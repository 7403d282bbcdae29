"""Imports point one way, and the control plane needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
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
# The functions of the core that import backends, features or commands, by module. They do so for
# some models, devices, options or calls only; what always runs is imported at the head of a file.
IMPORTING = {
    "": " __getattr__",
    "llm": " load_prefix_cache load_weights loglikelihood save_prefix_cache score sleep wake_up",
    "loading.checkpoint": "__init__ as_listed config_class find_checkpoint read_config",
    "loading.make_engine": "find_files grammars load_engine make_engine make_task pooling task_maker",
    "loading.make_runner": "load_model make_backend make_cache make_eager_runner make_fast_steps make_rules make_runner",
    "loading.memory": "plan_memory",
    "loading.select_backend": "pick_backend",
}


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


def without_type_hints(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes that are not inside `if TYPE_CHECKING:`."""
    body: list[ast.AST] = [tree]
    while body:
        node = body.pop()
        yield node
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            body += ast.iter_child_nodes(node)


def functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the name and the nodes of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, [*ast.walk(node)]


def modules() -> list[tuple[str, Path]]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("__")]
    named = [(path.relative_to(PACKAGE.parent).with_suffix("").parts, path) for path in files]
    return [(".".join(parts), path) for parts, path in named]


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_imports_point_one_way(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text())
    for target in imported(without_type_hints(tree)):
        (rank, group), (their_rank, their_group) = position(module), position(target)
        assert their_rank <= rank, f"{module} imports {target}; the order is {RULE}"
        knows = rank != their_rank or group == their_group
        assert knows, f"{module} and {target} must not know each other: {RULE}"
        if place(module) == "engine":
            assert place(target) not in {"models", "backends"}, f"{module} imports {target}"


def test_functions_that_import_features() -> None:
    """The core imports features and backends in these functions only."""
    found: dict[str, list[str]] = {}
    for module, path in [("nanovllm.", PACKAGE / "__init__.py"), *modules()]:
        if place(module) in {"backends", "features", "cli"}:
            continue
        tree = ast.parse(path.read_text())
        for name, nodes in [("", tree.body), *functions(tree)]:
            places = {place(target) for target in imported(nodes)}
            if places & {"backends", "features", "cli"}:
                found.setdefault(module.removeprefix("nanovllm."), []).append(name)
    assert {module: " ".join(sorted(names)) for module, names in found.items()} == IMPORTING


def test_a_document_states_the_rule() -> None:
    assert f"`{RULE}`" in (PACKAGE.parent / "docs" / "contributing.md").read_text()


def test_the_package_has_fifteen_places() -> None:
    hidden = ("__pycache__", "__main__.py", "py.typed")
    assert len([path for path in PACKAGE.iterdir() if path.name not in hidden]) == 15


def test_one_file_starts_python() -> None:
    """With the path of this process."""
    files = [p.name for p in PACKAGE.rglob("*.py") if "sys.executable" in p.read_text()]
    assert files == ["child.py"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_plane_loads_no_torch() -> None:
    run(
        "import sys, nanovllm.engine.llm_engine, tools.training.data\n"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)"
    )


@pytest.mark.slow
def test_histories_run_without_torch() -> None:
    run(
        "import sys; from lessons.oracle.oracle import run_history\n"
        "for seed in range(5): run_history(seed)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


def test_a_plain_prompt_needs_no_feature() -> None:
    """It imports the classes of results alone, which the methods of LLM name."""
    done = fresh.run(
        "import sys; from nanovllm import LLM\n"
        "llm = LLM(device='cpu', attention_backend='sdpa')\n"
        "llm.generate('What is 2 + 3?\\n', use_tqdm=False)\n"
        "places = ('nanovllm.features.', 'nanovllm.cli.')\n"
        "print(*sorted(name for name in sys.modules if name.startswith(places)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["nanovllm.features.tasks", "nanovllm.features.tasks.results"]


@pytest.mark.slow
def test_works_without_triton() -> None:
    """And with no model's code of transformers."""
    done = fresh.run(
        "import sys; sys.modules['triton'] = None\n"
        "from nanovllm import LLM, SamplingParams\n"
        "out = LLM().chat([{'role': 'user', 'content': 'What is 2 + 3?'}], use_tqdm=False)\n"
        "assert out[0].outputs[0].text == '2 + 3 = 5', out\n"
        "loaded = [m for m in sys.modules if m.startswith('transformers.models.')]\n"
        "loaded = [m for m in loaded if 'modeling' in m]\n"
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
    with pytest.raises(ImportError, match="cannot import name 'EngineArgs'"):
        exec("from nanovllm import EngineArgs")
    exec("from nanovllm import llm, plan")  # submodules
