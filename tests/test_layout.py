"""The tests of nanovllm/PLACE/NAME.py, or of the folder NAME/, are in tests/PLACE/test_NAME.py.

The tests of lessons/ and tools/ are in tests/lessons/ and tests/tools/ in the same way.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOTS = TESTS.parent / "nanovllm", TESTS.parent  # lessons/ and tools/ are in the second
# Folders without tests of a module: code that tests share, scripts that they run, and checks that a
# learner runs on a solution.
OTHER = {"helpers", "scripts", "lessons/exercises"}
# Files about more than one module, and their subjects.
SEVERAL = {
    "test_batch_invariance.py": "whole engines on the CPU's kernels",
    "test_idioms.py": "scripts in the idioms of vLLM and nano-vllm",
    "test_imports.py": "the order of imports",
    "test_layout.py": "the folder tests/",
    "test_other_systems.py": "systems that are not Linux",
    "test_real_model.py": "the whole engine with a trained model",
    "backends/cpu/kernels/test_kernels.py": "all kernels of the CPU",
    "backends/gpu/test_delta_rule.py": "the kernels of features/models/hybrid/delta_rule.py",
    "backends/gpu/test_dry_run.py": "whole engines on a model of a GPU",
    "backends/gpu/test_gpu_engines.py": "whole engines on a GPU",
    "backends/gpu/test_gpu_kernels.py": "all kernels on a GPU",
    "backends/gpu/test_gpu_models.py": "trained and large models on a GPU",
    "backends/test_quantized.py": "weights in int8 and int4",
    "engine/test_any_line.py": "an error or Ctrl-C at any line of a step",
    "engine/test_failures.py": "errors in one request's own data",
    "engine/test_large_batches.py": "the work of a step with many requests",
    "features/tasks/test_beam_histories.py": "beams with the scheduler and the host cache",
    "lessons/test_lesson_pages.py": "the pages of the lessons",
    "lessons/test_lessons.py": "the command, and what lessons share",
    "lessons/test_lessons_course.py": "lessons 2 and 11c and electives",
    "lessons/test_lessons_kernels.py": "lessons 10 and 11 and electives",
    "lessons/test_lessons_ladder.py": "lesson 3, and the ladder",
    "lessons/test_lessons_schedule.py": "lessons 4 to 9 and beams",
    "cli/jobs/test_server.py": "the server in docs/jobs.md",
}


def files() -> list[str]:
    """Return the Python files below tests/ that are outside the folders in OTHER."""
    names = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    return sorted(str(name) for name in names if not OTHER & {str(p) for p in name.parents})


def has_subject(name: str) -> bool:
    """Return whether a root has a module or a folder of this name."""
    for path in (root / name.replace("test_", "") for root in ROOTS):
        if (
            path.exists()
            or path.with_suffix("").exists()
            or path.with_stem(f"__{path.stem}__").exists()
        ):
            return True
    return False


def test_each_file_is_where_its_module_is() -> None:
    stray = [name for name in files() if name != "conftest.py" and not has_subject(name)]
    assert stray == sorted(SEVERAL), "move a file without a module, or say what it is about"


def test_groups_have_tests(pytestconfig: pytest.Config) -> None:
    """Each pattern of conftest.py matches a test, also after tests have moved."""
    groups = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py")).GROUPS
    ids = []
    for name in files():
        tree = ast.parse((TESTS / name).read_text())
        ids += [f"tests/{name}::{n.name}" for n in tree.body if isinstance(n, ast.FunctionDef)]
    for group, pattern in groups.items():
        assert any(re.search(pattern, each) for each in ids), group


@pytest.mark.parametrize("folder", ["cpu", "gpu"])
def test_reading_order(folder: str) -> None:
    """A backend's docstring names all its files, each after those that it imports."""
    package = ROOTS[0] / "backends" / folder
    order = re.findall(r"^(\S+\.py) +", (package / "__init__.py").read_text(), re.MULTILINE)
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert sorted(order) == sorted(name for name in files if not name.endswith("__init__.py"))
    for place, name in enumerate(order):
        for node in ast.parse((package / name).read_text()).body:
            if isinstance(node, ast.ImportFrom):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                prefix = f"nanovllm.backends.{folder}."
                found = {f"{m.removeprefix(prefix).replace('.', '/')}.py" for m in modules if m}
                assert not found & set(order[place:]), name


@pytest.mark.parametrize("place", ["features", "cli", "utils"])
def test_folders_name_their_files(place: str) -> None:
    """The docstring of each folder names what is in it, and nothing else."""
    for init in (ROOTS[0] / place).rglob("__init__.py"):
        named = re.findall(r"^(\w+) {2,}\S", init.read_text(), re.MULTILINE)
        there = [path.stem for path in init.parent.iterdir() if not path.name.startswith("__")]
        assert sorted(named) == sorted(there), init
