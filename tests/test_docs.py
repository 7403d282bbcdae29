"""README and docs/ tell the truth: their code runs, the options exist, the links lead somewhere."""

import dataclasses
import inspect
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from lessons import command
from nanovllm import (
    LLM,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    outputs,
)
from nanovllm.__main__ import COMMANDS
from nanovllm.config import RENAMED, WITHOUT_EFFECT, EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.tasks import results

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
DESIGN = ROOT / "docs" / "design.md"
LESSONS = ROOT / "docs" / "lessons.md"
README = ROOT / "README.md"
PAGES = [README, ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
# Places outside the core, as README counts it.
OPTIONAL = {"backends", "features", "cli"}
MAX_READING_PATH = 3_091
# Words of the code that needs packages.
NEEDS = {"StructuredOutputsParams": "llguidance", "fastapi": "fastapi"}


def pages(with_code: bool = False) -> list[Path]:
    return [page for page in PAGES if not with_code or "```python" in page.read_text()]


def test_the_two_lines_stand_in_readme() -> None:
    lines = [line.strip() for line in README.read_text().splitlines()]
    assert "pip install -e . && python example.py" in lines
    assert "pip install -e '.[test]' && pytest" in lines


def test_the_chinese_readme_says_the_same() -> None:
    """It has the same files in the same order, and no command or number that README does not."""
    chinese = ROOT / "README.zh.md"
    text, english = chinese.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    commands = r"(?m)^    [^\n]*$|(?s:```.*?```)"
    assert set(re.findall(commands, text)) <= set(re.findall(commands, english))
    assert code_links(text)[-18:] == code_links(section("Read it"))
    assert set(re.findall(r"\d[\d.,]*\d", text)) <= set(re.findall(r"\d[\d.,]*\d", english))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def needs_more(page: Path) -> bool:
    return any(word in block for block in blocks(page) for word in NEEDS)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.name,
            marks=[pytest.mark.extra] * needs_more(page) + [pytest.mark.slow] * (page != README),
        )
        for page in pages(with_code=True)
    ],
)
def test_code_runs(page: Path, capsys) -> None:
    for block in blocks(page):
        if all(word not in block or find_spec(package) for word, package in NEEDS.items()):
            exec(block, {})
    printed = capsys.readouterr().out
    if page == README:
        assert "2, 3, 5, 7, 11, 13" in printed
        assert "12 + 30 = 42" in printed


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    values = [outputs.CompletionOutput, outputs.RequestOutput, outputs.StreamOutput]
    values += [PoolingParams, results.EmbeddingOutput, results.EmbeddingRequestOutput]
    values += [results.LoglikelihoodOutput, BeamSearchParams]
    values += [results.BeamSearchSequence, results.BeamSearchOutput]
    params = SamplingParams, StructuredOutputsParams
    for cls in (EngineConfig, *params, outputs.Logprob, outputs.RequestMetrics, *values):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in text, (cls.__name__, field.name)
    for name in (*RENAMED, *WITHOUT_EFFECT):
        assert f"`{name}" in text, name
    for name in re.findall(r"^\| `(\w+)\(", text, re.MULTILINE):
        assert hasattr(LLM, name) or hasattr(LLMEngine, name), name
    for cls in params:  # help() shows the docstring
        for field in dataclasses.fields(cls):
            assert f"\n{field.name}: " in (inspect.getdoc(cls) or ""), field.name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((\S+?)\)", page.read_text()):
        if not link.startswith(("http", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


def section(title: str) -> str:
    """Return a section of README, which begins with "## " and `title`."""
    return README.read_text().split(f"\n## {title}")[1].split("\n## ")[0]


def code_links(text: str) -> list[Path]:
    """Return the files of the repository, documents excepted, that `text` links to."""
    links = re.findall(r"\]\((\S+?)\)", text)
    return [ROOT / link for link in links if not link.startswith(("http", "#", "docs/"))]


def num_lines(place: Path) -> int:
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return sum(len(path.read_text().splitlines()) for path in files)


def test_the_reading_path_is_as_short_as_readme_says() -> None:
    path = section("Read it")
    total = sum(map(num_lines, code_links(path)))
    assert f"({round(total, -2):,} lines in all)" in path
    assert total <= MAX_READING_PATH


def test_the_length_of_the_lessons() -> None:
    stated = re.search(r"(\d+) lines on average, and at most (\d+)", LESSONS.read_text())
    assert stated
    lengths = [num_lines(ROOT / "lessons" / f"{name}.py") for name in command.LESSONS.values()]
    assert float(stated[1]) == pytest.approx(sum(lengths) / len(lengths), rel=0.05)
    assert max(lengths) <= int(stated[2]) < 1.1 * max(lengths)


def test_the_design_says_where_functions_are() -> None:
    """The file of each row of "Where to find what" defines the functions that the row names."""
    text = DESIGN.read_text().split("## Where to find what")[1].split("\n## ")[0]
    rows = re.findall(r"^(.+) \| (\S+) \| (`.+`)$", text, re.MULTILINE)
    assert len(rows) >= 19
    for question, file, functions in rows:
        path = re.sub(r"\[(\S+)\]\(../nanovllm/\1\)", r"\1", file)
        names = set(re.findall(r"(?:def|class) (\w+)", (PACKAGE / path).read_text()))
        assert set(re.findall(r"\w+", functions)) <= names, question


def test_readme_has_the_tree_of_places() -> None:
    rows = re.findall(r"^(\S+)  +([\d,]+)   (\S.*)$", section("Places"), re.MULTILINE)
    hidden = ("__pycache__", "__main__.py", "py.typed")
    places = [path for path in PACKAGE.iterdir() if path.name not in hidden]
    assert sorted(name.rstrip("/") for name, *_ in rows) == sorted(path.name for path in places)
    lines = {path.name: num_lines(path) for path in places}
    for name, stated, sentence in rows:
        true = lines[name.rstrip("/")]
        assert abs(int(stated.replace(",", "")) - true) <= max(20, true / 20), (name, true)
        assert "import" in sentence, name
    stated = re.search(r"core: .* \(([\d,]+) lines\)", section("Places"))
    core = sum(lines[name] for name in lines if name not in OPTIONAL)
    assert stated is not None
    assert abs(int(stated[1].replace(",", "")) - core) <= core / 50, core


def test_every_command_is_documented() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("## The program nanovllm")[1]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(COMMANDS)


def test_the_map_names_files_of_this_engine() -> None:
    text = (ROOT / "docs" / "vllm-map.md").read_text()
    tables = [part.split("\n\n")[0] for part in text.split("\n| idea | here |")[1:]]
    cells = [line.split(" | ")[1] for table in tables for line in table.splitlines()[1:]]
    files = {file for cell in cells for file in re.findall(r"[\w/]+\.py", cell)}
    assert len(files) > 20
    assert not [file for file in files if not ((PACKAGE / file).exists() or (ROOT / file).exists())]
    sources = [
        path
        for place in (PACKAGE, ROOT / "lessons", ROOT / "tools")
        for path in [ROOT / "bench.py", *place.rglob("*.py")]
    ]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    named = {
        word
        for cell in cells
        for code in re.findall("`([^`]+)`", cell)
        for word in re.findall(r"\w+", code)
    }
    assert len(named) > 80
    assert not named - words


def test_anchors_exist() -> None:
    """A link to a section of a document names a heading of it, as GitHub makes its anchor."""
    for page in pages():
        for link in re.findall(r"\]\((\S*?#\S+?)\)", page.read_text()):
            name, anchor = link.split("#")
            target = page.parent / name if name else page
            if target.suffix == ".md" and not link.startswith("http"):
                titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in titles]
                assert anchor in anchors, (page.name, link)


def test_the_workflow_runs_the_versions_of_the_readme() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = next(line for line in workflow.splitlines() if "python: [" in line)
    first, *_, last = re.findall(r'"(3\.\d+)"', matrix)
    assert f"Python {first} to {last}" in README.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"]]
    assert [v for v in versions if "." in v] == re.findall(r'"(3\.\d+)"', matrix)


def test_one_answer_for_the_versions_of_python() -> None:
    """The oldest version that CI runs is the one that pip, ruff and mypy are told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    oldest = re.findall(r'"(3\.\d+)"', workflow)[0]
    assert project["project"]["requires-python"] == f">={oldest}"
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert f"Python {oldest}" in (ROOT / "docs" / "contributing.md").read_text()
