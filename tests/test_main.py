"""The program `nanovllm`: its commands."""

import fresh
import pytest

import nanovllm.__main__ as program


@pytest.mark.parametrize("command", ["chat", "lessons", "run-batch"])
def test_each_command_has_a_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        status = program.main([command, "--help"])
        raise SystemExit(status)
    assert not end.value.code
    assert f"nanovllm {command}" in capsys.readouterr().out


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"nanovllm {command}" in shown for command in program.COMMANDS)
    assert program.main(["run_batch"]) == 2
    assert "unknown command 'run_batch'; the commands are chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    ["--help", "chat --help", "convert --help", "lessons", "run-batch --help", "chat --no-option"],
)
def test_help_and_errors_do_not_import_torch(arguments: str) -> None:
    """It takes seconds. A fresh process imports it first, so the module is hidden."""
    done = fresh.run(
        "import sys\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] in ('torch', 'numba')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['torch'] = None\n"
        "from nanovllm.__main__ import main\n"
        "try: main(sys.argv[1:] or " + repr(arguments.split()) + ")\n"
        "except SystemExit as end: assert end.code in (0, 2, None), end.code\n"
    )
    assert done.returncode == 0, done.stderr
