"""Lessons and exercises about how an LLM engine works, run on the engine itself.

python -m lessons                   lists the lessons
python -m lessons 3                 runs lesson 3
python -m lessons 3 --answers 17 b  compares your answers to its questions
python -m lessons 3 --answers       shows the answers
python -m lessons ladder            runs the same requests with one idea after another
python -m lessons puzzle            lists Triton kernels with one line to fill in
python -m lessons break             lists faults of scheduler and block managers to find
python -m lessons build             lists parts of the engine to write yourself
"""

import argparse
import ast
import importlib
import logging
from pathlib import Path
from types import ModuleType

from lessons.show import fill, say, show_answers, show_command

LESSONS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("lesson[0-9]*.py")))
NUMBERS = tuple(str(int(name[6:8])) for name in LESSONS)
MODULES = {
    "ladder": "ladder",
    "puzzle": "lesson10_puzzles",
    "break": "break_it",
    "build": "build_it",
}


def load(what: str) -> ModuleType:
    """Import a lesson by its number, or an exercise by its name."""
    return importlib.import_module(f"lessons.{MODULES.get(what) or LESSONS[NUMBERS.index(what)]}")


def title(number: str) -> str:
    """Return the first line of the lesson's docstring."""
    source = Path(__file__).with_name(f"{LESSONS[NUMBERS.index(number)]}.py").read_text()
    return str(ast.get_docstring(ast.parse(source))).splitlines()[0]


def run_lesson(number: str, answers: list[str] | None) -> None:
    """Run a lesson. With `answers`, compare them to its answers, or show its answers."""
    lesson = load(number)
    if answers is None:
        say(str(lesson.__doc__))
        lesson.run()
        show_command(lesson.QUESTIONS, f"python -m lessons {number} --answers")
    else:
        show_answers(lesson.QUESTIONS, answers)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lessons",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    choices = [*NUMBERS, *MODULES]
    what = parser.add_argument("what", nargs="?", choices=choices)
    what.metavar = f"1 to {NUMBERS[-1]}, {', '.join(choices[len(NUMBERS) :])}"
    parser.add_argument(
        "which", nargs="?", help="the number of a puzzle or a fault, or the name of a task"
    )
    parser.add_argument(
        "--answers", nargs="*", metavar="YOURS", help="show the answers, or compare yours with them"
    )
    parser.add_argument("--check", metavar="FILE", help="check your solution of a task of `build`")
    parser.add_argument(
        "-h", "--help", action="store_true", help="show this text, or the text of a lesson"
    )
    args = parser.parse_args(argv)
    if args.help and args.what is None:
        parser.print_help()
        return
    logging.getLogger("nanovllm").setLevel(logging.WARNING)  # no line for each LLM that is made
    try:
        if args.help:
            say(str(load(args.what).__doc__))
        elif args.what in NUMBERS and args.which is None and args.check is None:
            run_lesson(args.what, args.answers)
        elif args.what == "puzzle":
            load(args.what).run_puzzle(args.which, args.answers)
        elif args.what == "break":
            load(args.what).run(args.which, args.answers)
        elif args.check is not None and args.what != "build":
            raise ValueError("only build takes --check")
        elif args.what == "build" and args.answers is None:
            build = load(args.what)
            build.write(args.which) if args.check is None else build.check(args.which, args.check)
        elif args.what == "ladder" and args.which is None and args.answers is None:
            load(args.what).run()
        elif args.what is None and args.answers is None:
            for number in NUMBERS:
                print(fill(title(number), rest="  "))
            print(f"\n{str(__doc__).partition(chr(10) * 2)[2].strip()}")
        else:
            extra = "--answers" if args.which is None else repr(args.which)
            raise ValueError(f"{args.what or 'the list'} takes no {extra}")
    except BrokenPipeError:  # of stdout; nanovllm/__main__.py handles it
        raise
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
