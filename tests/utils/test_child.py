"""New processes of Python import what this process does."""

import subprocess
import sys
from pathlib import Path

import nanovllm
from nanovllm.utils import child

PACKAGE = Path(nanovllm.__file__).parent


def test_children_import_what_this_process_does(tmp_path, monkeypatch) -> None:
    """Nothing from the current directory, and what only this process's path has."""
    for name in ("json", "numba", "torch", "nanovllm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the current directory')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "only_here.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own"), tmp_path])  # no string
    command = child.python(
        "import json, numba, only_here, nanovllm.engine.llm_engine\nprint(1 + 1)"
    )
    assert repr(str(PACKAGE.parent)) in command[-1]
    assert repr(str(PACKAGE)) not in command[-1], "its folders would be packages"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")
