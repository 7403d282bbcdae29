"""The program `nanovllm`: its commands."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import fresh
import pytest

import nanovllm
import nanovllm.__main__ as program


@pytest.mark.parametrize("command", ["chat", "check", "convert", "run-batch"])
def test_each_command_has_a_help_with_an_example(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        status = program.main([command, "--help"])
        raise SystemExit(status)
    assert not end.value.code
    assert f"nanovllm {command}" in capsys.readouterr().out


def test_the_program_lists_its_commands(capsys) -> None:
    assert program.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"nanovllm {command}" in shown for command in program.COMMANDS)
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nanovllm {nanovllm.__version__}\n"
    assert program.main(["run_batch"]) == 2
    assert "unknown command 'run_batch'; did you mean 'run-batch'?" in capsys.readouterr().err
    assert program.main(["serve"]) == 2
    assert "unknown command 'serve'; known: chat, check, convert" in capsys.readouterr().err


def test_one_version() -> None:
    """The package, pip and the changelog name the same version."""
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == nanovllm.__version__
    assert f"\n## [{nanovllm.__version__}] - " in (root / "CHANGELOG.md").read_text()


def test_a_command_whose_package_is_missing() -> None:
    code = "import sys; sys.modules['lm_eval'] = None\n" + fresh.module("nanovllm", "lm-eval")
    done = fresh.run(code)
    assert done.returncode == 1
    assert done.stderr.startswith("nanovllm lm-eval: ")
    assert "pip install -e '.[eval]'" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another error")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_ended(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nanovllm", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, cwd=fresh.ROOT, env=environment, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# They take seconds. A fresh process has imported torch, so it is hidden.
HIDDEN = """
import sys
hidden = ("torch", "transformers", "numba")
for name in [n for n in sys.modules if n.partition(".")[0] in hidden]:
    del sys.modules[name]
sys.modules |= dict.fromkeys(hidden)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        *("-m --help", "-m chat --help", "-m convert --help", "-m lessons", "-m run-batch --help"),
        *("-m chat --no-option", "-m chat --set max_num_seq=8", "-m run-batch -i - -o - --set a=1"),
        *("example.py --help", "bench.py --help", "bench.py --memory --json /no/run"),
    ],
)
def test_help_and_errors_do_not_import_torch(arguments: str) -> None:
    run = (
        f"sys.argv = {arguments.split()}\n"
        "import runpy\n"
        "try:\n"
        "    if sys.argv[0] == '-m': runpy.run_module('nanovllm', run_name='__main__')\n"
        f"    else: runpy.run_path({str(fresh.ROOT)!r} + '/' + sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code in (0, 1, 2, None), end.code\n"
    )
    done = fresh.run(HIDDEN + run)
    assert done.returncode == 0, done.stderr


def test_names_and_errors_in_options_do_not_import_torch() -> None:
    done = fresh.run(
        HIDDEN + "from nanovllm import LLM, SamplingParams, Trace\n"
        "SamplingParams(temperature=0)\n"
        "for options in ({'max_num_seq': 8}, {'max_num_seqs': 0}, {'dtype': 'int3'}):\n"
        "    try: LLM(**options)\n"
        "    except (TypeError, ValueError): continue\n"
        "    raise AssertionError(options)\n"
    )
    assert done.returncode == 0, done.stderr
