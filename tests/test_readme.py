"""README tells the truth: its code runs, its options exist, its links lead somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig, EngineOptions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_two_lines_stand_at_the_top() -> None:
    lines = [line.strip() for line in README.splitlines()[:20]]
    assert "pip install -e . && python example.py" in lines
    assert "pip install -e '.[test]' && pytest" in lines


def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
    printed = capsys.readouterr().out
    assert "2, 3, 5, 7, 11, 13" in printed
    assert "12 + 30 = 42" in printed


def test_names_exist() -> None:
    for cls in (EngineConfig, SamplingParams):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in README, field.name
    assert set(EngineOptions.__annotations__) == {f.name for f in dataclasses.fields(EngineConfig)}
    for name in re.findall(r"^\| `(\w+)\(", README, re.MULTILINE):
        assert name == "LLM" or hasattr(LLM, name), name


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((\S+?)\)", README):
        assert (ROOT / link).exists(), link
