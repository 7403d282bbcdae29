"""Runs code in new processes, which have imported torch and nothing else.

They are forks of a server, one of each process of pytest, because an import of torch takes two
seconds. It has not used torch, so that OpenMP's threads start in the forks as in any new process.
What depends on variables that torch reads when it is imported (OMP_NUM_THREADS) needs a subprocess.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(code: str, cwd: Path | None = None, **variables: str) -> Done:
    """Run it with these environment variables beside those of this process."""
    with TemporaryDirectory() as directory:
        arguments = (code, str(cwd or Path.cwd()), dict(os.environ) | variables, directory)
        process = CONTEXT.Process(target=execute, args=arguments)
        process.start()
        process.join(300)
        process.kill()  # unless it has ended
        process.join()
        out, err = (Path(directory, name).read_text() for name in ("stdout", "stderr"))
        assert process.exitcode is not None
        return Done(process.exitcode, out, err)


def execute(code: str, cwd: str, variables: dict[str, str], directory: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT), number)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
