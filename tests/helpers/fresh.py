"""Runs code in new processes, which have imported torch and nothing else.

They are forks of a server, one of each process of pytest, because an import of torch takes two
seconds. It has not used torch, so that OpenMP's threads start in the forks as in any new process.
They have one thread, as conftest.py says, or two, whatever OMP_NUM_THREADS is there: torch reads it
when it is imported.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
# Windows has no forks: there, a new process imports torch by itself.
CAN_FORK = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT: Any = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
if CAN_FORK:
    CONTEXT.set_forkserver_preload(["torch"])


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Process:
    """Runs code with one or two threads, and with additional environment variables."""

    def __init__(
        self, code: str, cwd: Path | None = None, threads: int = 1, **variables: str
    ) -> None:
        self.directory = TemporaryDirectory()
        variables = dict(os.environ) | variables
        arguments = (code, str(cwd or Path.cwd()), threads, variables, self.directory.name)
        self.process = CONTEXT.Process(target=execute, args=arguments)
        if CAN_FORK:
            with patch.dict(os.environ, OMP_NUM_THREADS="2"):
                forkserver.ensure_running()
        self.process.start()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> Done:
        with self.directory as directory:
            self.process.join(300)
            self.process.kill()  # unless it has ended
            self.process.join()
            out, err = (Path(directory, name).read_text() for name in ("stdout", "stderr"))
            assert self.process.exitcode is not None
            return Done(self.process.exitcode, out, err)


def run(code: str, cwd: Path | None = None, threads: int = 1, **variables: str) -> Done:
    return Process(code, cwd, threads, **variables).wait()


def execute(code: str, cwd: str, threads: int, variables: dict[str, str], directory: str) -> None:
    import torch

    if threads == 1:
        torch.set_num_threads(threads)
    paths = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = map(os.path.abspath, paths)  # an entry may be relative to this directory
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT), number)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def module(name: str, *arguments: str) -> str:
    """The code of `python -m name arguments ...`."""
    start = f"import runpy, sys; sys.argv = {['', *arguments]!r}\n"
    return start + f"runpy.run_module({name!r}, None, '__main__')\n"


def dry_run(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Run scenarios of dry_run.py in a new process. Returns what each of them found."""
    command = [sys.executable, "tests/helpers/dry_run.py", str(path), *names]
    return on_model(command)


def on_model(command: list[str]) -> dict[str, Any]:
    """Run a command on the model of a GPU. Returns the JSON that it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)
