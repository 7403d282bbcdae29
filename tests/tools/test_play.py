"""The page docs/play: the same plans in Pyodide and in CPython, and what a reader can do there.

Pyodide comes from npm, and the browser is driven by tests/helpers/chromium.py.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import chromium
import pytest

from tools import play

pytestmark = pytest.mark.slow
SOLUTIONS = play.ROOT / "tests" / "lessons" / "exercises" / "solutions"
FORM = {
    "requests": "You are kind. Add 1 -> 9\nYou are kind. Sort 9, 4 -> 12\n20 -> 6\n@4 You are kind.",
    **{"budget": "16", "rows": "3", "blocks": "14", "size": "4", "policy": "fcfs", "steps": "1000"},
}
CODE = """
def policy_key(seq, block_manager):
    return -seq.num_prompt

def choose_victim(block_manager):
    return next(reversed(block_manager.evictable))
"""
FORMS = [
    FORM,
    FORM | {"policy": "sjf", "rows": "1"},
    FORM | {"policy": "own", "code": CODE},
    FORM | {"policy": "own", "code": CODE.replace("-seq", "1 / 0 - seq")},
    FORM | {"size": "1", "blocks": "40", "budget": "3"},
]
# Runs in both. Without xxhash, which npm does not have, both have the stand-in of play.py.
SCRIPT = f"""
import json, random, re, sys
sys.modules["xxhash"] = None
import play
from lessons.oracle.oracle import run_history
from nanovllm.cli.trace.trace import Trace

results = []
for form in json.loads({json.dumps(json.dumps(FORMS))}):
    found = json.loads(play.run(json.dumps(form)))
    data = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', found.pop("page"), re.DOTALL)
    events = json.loads(data[1])["events"] if data else []
    for event in events:
        event.pop("time", None)
    results.append((found, events))

class Planned(play.History):
    def step(self):
        super().step()
        seqs = [*self.scheduler.running, *self.scheduler.waiting]
        tables = [(s.request_id, s.index, s.row, s.num_computed, s.block_table) for s in seqs]
        plans.append(json.loads(json.dumps((tables, self.runner.memory))))

for seed in range(40):
    plans = []
    history = run_history(seed, Planned)
    results.append((plans, [seq.token_ids for seq in history.seqs]))
"""


@pytest.fixture(scope="session")
def pyodide(tmp_path_factory) -> Path:
    """The folder of the package from npm."""
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("no node or npm on PATH")
    folder = tmp_path_factory.mktemp("npm")
    version = re.search(r"/v([\d.]+)/full", (play.FOLDER / "index.html").read_text())
    assert version is not None
    command = ["npm", "install", "--ignore-scripts", f"pyodide@{version[1]}"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("npm cannot install pyodide")
    return folder / "node_modules" / "pyodide"


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The page and its zip."""
    folder = tmp_path_factory.mktemp("play")
    shutil.copy(play.FOLDER / "index.html", folder)
    play.write_zip(folder / "nanovllm.zip")
    return folder


def run_node(pyodide: Path, package: Path, code: str) -> Any:
    """Run Python code in Pyodide -> its last value, which is JSON."""
    script = f"""
        const {{ loadPyodide }} = require({json.dumps(str(pyodide))});
        const zip = require("fs").readFileSync({json.dumps(str(package / "nanovllm.zip"))});
        loadPyodide().then(python => {{
          python.unpackArchive(new Uint8Array(zip), "zip");
          console.log("\\nRESULT" + python.runPython({json.dumps(code)}));
        }});"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=False)
    assert "\nRESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("\nRESULT")[2])


def test_plans_are_the_same_in_pyodide(pyodide: Path, package: Path, tmp_path) -> None:
    """Events, tokens, memory and errors of the page's requests, and of random histories."""
    code = f"{SCRIPT}\nprint(json.dumps(results))"
    paths = f"import sys; sys.path[:0] = [{str(play.FOLDER)!r}, {str(play.ROOT)!r}]\n"
    command = [sys.executable, "-c", paths + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    here, there = (
        json.loads(done.stdout),
        run_node(pyodide, package, f"{SCRIPT}\njson.dumps(results)"),
    )
    for mine, theirs in zip(here, there, strict=True):
        assert mine == theirs
    (fcfs, events), (_, sjf), _, (failed, _), *_ = here
    assert fcfs["ended"]
    assert any("preempted" in event for event in events)
    assert any("evicted" in event for event in events)
    assert sjf != events
    assert failed["error"] == "line 3 of your code: ZeroDivisionError: division by zero"


def test_checks_pass_in_pyodide(pyodide: Path, package: Path) -> None:
    """Right solutions and stubs of the tasks that need no torch."""
    tasks = ("slots", "step", "prefix", "eviction", "preempt", "policy")
    codes = {task: (SOLUTIONS / f"{task}.py").read_text() for task in tasks}
    code = f"""
import json, play
codes = json.loads({json.dumps(json.dumps(codes))})
json.dumps([(play.check(t, code), play.check(t, play.stub(t))) for t, code in codes.items()])
"""
    found = run_node(pyodide, package, code)
    assert len(found) == len(tasks)
    for right, stub in found:
        assert re.search(r"^\d+ passed", right, re.MULTILINE), right
        assert "is to be written; see the top of this file" in stub
        assert "1 failed" in stub


@pytest.fixture
def site(pyodide: Path, package: Path) -> Iterator[str]:
    """The address of a server of the page, with a local copy of Pyodide."""
    if not chromium.PATH:
        pytest.skip("no chromium on PATH")
    shutil.copytree(pyodide, package / "pyodide", dirs_exist_ok=True)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(package))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def test_a_reader(site: str, tmp_path) -> None:
    """Presses "Step" ten times, changes the policy, writes code with an error, stops a loop."""

    def text(name: str) -> str:
        return str(page.evaluate(f"document.getElementById({name!r}).textContent"))

    def put(name: str, value: str) -> None:
        """Write into a field, as a reader does."""
        code = f"field = document.querySelector({name!r}); field.value = {json.dumps(value)}; "
        page.evaluate(f"{code} field.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def click(name: str) -> None:
        page.evaluate(f"document.getElementById({name!r}).click()")

    def words() -> str:
        frame = "document.getElementById('trace').contentDocument"
        return str(page.evaluate(f"{frame}.getElementById('facts').textContent"))

    with chromium.open_page(site) as page:
        page.wait("document.body?.dataset.drawn == '1'")
        for step in range(2, 11):
            click("step")
            page.wait(f"document.body.dataset.drawn == '{step}'")
        assert words().startswith("10 steps of 5 sequences, first come first served.")
        rows = page.evaluate("document.getElementById('memory').rows.length")
        assert rows > 10
        put("[name=policy]", "sjf")
        page.wait(
            "$('trace').contentDocument.getElementById('facts')?.textContent.includes('shortest')"
        )
        put("[name=policy]", "own")
        put("#code", "def policy_key(seq, blocks):\n    return seq.nothing")
        page.wait("$('error').textContent.startsWith('line 2 of your code: AttributeError: ')")
        put("#code", "def policy_key(seq, blocks):\n    while True: pass")
        page.wait("!$('stop').hidden")
        put("[name=policy]", "fcfs")
        click("stop")
        page.wait("$('status').textContent == 'step 10' && $('stop').hidden")
        click("run")
        page.wait("$('status').textContent.endsWith(', the end')")
        put("[name=blocks]", "3")
        page.wait("$('error').textContent.startsWith('request 0, ')")
        click("break")
        page.wait(
            "$('output').textContent.includes('Question 2: Which function of block_manager.py')"
        )
        for width in (400, 1200):
            page.screenshot(tmp_path / "page.png", width, 1200)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
