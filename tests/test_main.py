"""The program `nanovllm`: its commands."""

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
