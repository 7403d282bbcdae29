"""Short scripts in the idioms of vLLM and nano-vllm, run whole: only the import is ours."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_script(script: Path) -> None:
    runpy.run_path(str(script))
