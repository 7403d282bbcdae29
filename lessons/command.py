"""Lessons and exercises about how an LLM engine works, run on the engine itself.

python -m lessons                   lists the lessons
python -m lessons 5                 runs lesson 5
python -m lessons 6b                runs the second part of lesson 6
python -m lessons beams             runs an elective
python -m lessons 5 --answers 17 b  compares your answers to its questions
python -m lessons 5 --answers       shows the answers
python -m lessons ladder            runs the same requests with one idea after another
python -m lessons ladder 6          measures what lesson 6 adds
python -m lessons puzzle            lists Triton kernels to complete
python -m lessons break             lists faults of scheduler and block managers to find
python -m lessons build             lists parts of the engine to write yourself, and the engine
python -m lessons --score           shows what you have solved, from its first call on
"""

import argparse
import ast
import importlib
import inspect
import logging
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lessons import score
from lessons.show import fill, say, show_answers, show_command
from tools.benchmarks import machine

BUSY = 0.1  # share of the CPU time of other programs, above which timings mean little
ROAD = sorted(path.stem for path in Path(__file__).parent.glob("lesson[0-9]*.py"))
ELECTIVES = [
    "samples",
    "beams",
    "int8",
    "fp8_cache",
    "host_cache",
    "tensor_parallel",
    "states",
    "state_cache",
    "experts",
    "structured_outputs",
    "drafts",
    "order",
    "window",
    "errors",
]
# The name of each lesson, such as "6b" or "beams", in the order of the list, and its module.
LESSONS = {
    **{name[6:].partition("_")[0].lstrip("0"): name for name in ROAD},
    **{name: f"elective_{name}" for name in ELECTIVES},
}
EXERCISES = {"ladder": "ladder", "puzzle": "puzzle_it", "break": "break_it", "build": "build_it"}


def load(what: str) -> ModuleType:
    """Import a lesson or an exercise by its name. Raises ValueError."""
    if what not in LESSONS | EXERCISES:
        raise ValueError(f"there is no lesson {what}; `python -m lessons` lists them")
    return importlib.import_module(f"lessons.{(LESSONS | EXERCISES)[what]}")


def parts(what: str) -> list[str]:
    """Return the names of the parts of a lesson: "6" has 6a and 6b, and "6a" is one."""
    return [name for name in LESSONS if what in (name, name.rstrip("abcd"))]


def title(name: str) -> str:
    """Return the first line of the lesson's docstring."""
    source = Path(__file__).with_name(f"{(LESSONS | EXERCISES)[name]}.py").read_text()
    return str(ast.get_docstring(ast.parse(source))).splitlines()[0]


def in_vllm(lesson: ModuleType) -> str:
    """Return where vLLM does what a lesson is about, and what differs there."""
    return f"In vLLM 0.32: {inspect.cleandoc(lesson.IN_VLLM)}"


def run_lesson(what: str, answers: list[str] | None = None) -> None:
    """Run a lesson. With `answers`, compare them to its answers, or show its answers."""
    lessons = [load(name) for name in parts(what)]
    questions = [question for lesson in lessons for question in lesson.QUESTIONS]
    if answers is not None:
        show_answers(questions, answers)
        return
    for lesson in lessons:
        say(str(lesson.__doc__))
        lesson.run()
        say(in_vllm(lesson))
    show_command(questions, f"python -m lessons {what} --answers")


def shows_times(what: str, given: dict[str, Any]) -> bool:
    """Return whether a command shows times: a lesson says so, and milestones end with a ladder."""
    if what == "build":
        is_milestone = given.get("which") in load("build").PARTS
        return is_milestone and "check" in given and "json" not in given
    lessons = map(load, parts(what) or [what])
    return "answers" not in given and any(getattr(m, "SHOWS_TIMES", False) for m in lessons)


def run(what: str, given: dict[str, Any]) -> None:
    """Run a lesson or an exercise with the arguments that are given. Raises ValueError."""
    function = partial(run_lesson, what) if parts(what) else load(what).run
    for name in given.keys() - inspect.signature(function).parameters:
        raise ValueError(f"{what} takes no {given[name] if name == 'which' else '--' + name}")
    since = machine.cpu_seconds()
    function(**given)
    if shows_times(what, given) and (others := machine.other_load(since)) > BUSY:
        print(f"The machine is busy: the times mean little. Others took {others:.0%} of the CPU.")


def main() -> None:
    parser = argparse.ArgumentParser("python -m lessons", argument_default=argparse.SUPPRESS)
    parser.description = __doc__
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("what", nargs="?", metavar="LESSON")
    parser.add_argument("which", nargs="?", help="a puzzle or a fault, or the name of a task")
    parser.add_argument("--answers", nargs="*", metavar="YOURS", help="show or compare answers")
    parser.add_argument("--check", metavar="FILE", help="check your solution of a task or a puzzle")
    parser.add_argument("--json", action="store_true", help="print the result of a check as JSON")
    parser.add_argument("--score", action="store_true", help="show what you have solved")
    given = vars(parser.parse_args())
    logging.getLogger("nanovllm").setLevel(logging.WARNING)  # no line for each LLM that is made
    if given.pop("score", False):
        score.show()
    elif what := given.pop("what", None):
        try:
            run(what, given)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    else:
        for name in LESSONS:
            print(fill(title(name), rest="  "))
        print(f"\n{str(__doc__).partition(chr(10) * 2)[2].strip()}")
