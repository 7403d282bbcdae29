"""README and docs/ tell the truth: their code runs, the options exist, the links lead somewhere."""

import dataclasses
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.api import outputs
from nanovllm.api.config import EngineConfig
from nanovllm.api.vllm_names import VLLM_OPTIONS
from nanovllm.features import beam_search
from nanovllm.features import loglikelihood as scoring
from nanovllm.features.embeddings import pooling

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Words of the code that needs packages.
NEEDS = {"StructuredOutputsParams": "llguidance", "fastapi": "fastapi"}


def pages(with_code: bool = False) -> list[Path]:
    return [page for page in PAGES if not with_code or "```python" in page.read_text()]


def test_the_two_lines_stand_at_the_top() -> None:
    lines = [line.strip() for line in README.read_text().splitlines()[:20]]
    assert "pip install -e . && python example.py" in lines
    assert "pip install -e '.[test]' && pytest" in lines


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def needs_more(page: Path) -> bool:
    return any(word in block for block in blocks(page) for word in NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.extra] * needs_more(page))
        for page in pages(with_code=True)
    ],
)
def test_code_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    values += [pooling.PoolingParams, pooling.EmbeddingOutput, pooling.EmbeddingRequestOutput]
    values += [scoring.LoglikelihoodOutput, beam_search.BeamSearchParams]
    values += [beam_search.BeamSearchSequence, beam_search.BeamSearchOutput]
    params = SamplingParams, StructuredOutputsParams
    for cls in (EngineConfig, *params, outputs.Logprob, outputs.RequestMetrics, *values):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in text, (cls.__name__, field.name)
    for name in VLLM_OPTIONS:
        assert f"`{name}`" in text, name
    for name in re.findall(r"^\| `(\w+)\(", README.read_text(), re.MULTILINE):
        assert hasattr(nanovllm, name) or hasattr(LLM, name), name
    for cls in params:  # help() shows the docstring
        for field in dataclasses.fields(cls):
            assert f"\n{field.name}: " in (inspect.getdoc(cls) or ""), field.name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((\S+?)\)", page.read_text()):
        if not link.startswith(("http", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


def test_readme_names_every_file_of_the_core() -> None:
    named = {(ROOT / link).resolve() for link in re.findall(r"\]\((\S+?)\)", README.read_text())}
    parts = ("engine", "models", "runner")
    files = [path for part in ("", *parts) for path in (ROOT / "nanovllm" / part).glob("*.py")]
    assert not [path for path in files if path.name != "__init__.py" and path not in named]


def test_readme_and_the_reading_path_are_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    table = text[text.index("Read it in this order") : text.index("The other files")]
    lines = [
        len((README.parent / link).read_text().splitlines())
        for link in re.findall(r"\]\((\S+?)\)", table)
    ]
    assert sum(lines) <= 2000
    assert f"({sum(lines) // 100 * 100:,} lines" in table


def test_the_workflow_runs_the_versions_of_the_readme() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = next(line for line in workflow.splitlines() if "python: [" in line)
    versions = re.findall(r'"(3\.\d+)"', matrix)
    assert f"Python {' or '.join(versions)}." in README.read_text()
