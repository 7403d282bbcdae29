"""Ctrl-C during a call and in a manual loop: the engine stays usable, and no request is lost."""

import contextlib
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import random_llm
from engines import ctrl_c_interrupts, is_idle  # noqa: F401

import nanovllm
from nanovllm import SamplingParams


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c(path: Path, asynchronous: bool) -> None:
    """One press ends after the step, whenever it comes; a second one ends within it."""
    llm = random_llm(path, async_scheduling=asynchronous)
    run, calls = llm.engine.runner.run, 0
    presses = 1

    def pressed(plan):
        nonlocal calls
        calls += 1
        if calls == 3:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return run(plan)

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    want = llm.generate([[5, 6], [7]], params, use_tqdm=False)
    for presses in (1, 2):
        calls = 0
        llm.engine.runner.run = pressed
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i] * 9 for i in range(1, 9)], params, use_tqdm=False)
        assert calls == 3
        assert is_idle(llm.engine)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        llm.engine.runner.run = run
        again = llm.generate([[5, 6], [7]], params, use_tqdm=False)
        assert [o["token_ids"] for o in again] == [o["token_ids"] for o in want]


@pytest.mark.slow
def test_ctrl_c_from_outside(path: Path) -> None:
    llm = random_llm(path)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(1000):
            llm.generate([[i] for i in range(1, 3)], params, use_tqdm=False)
    assert is_idle(llm.engine)


def test_ctrl_c_in_a_manual_loop_loses_nothing(path: Path) -> None:
    """In the scheduler, in the runner, between commit and result: the step is finished first."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want = [o["token_ids"] for o in random_llm(path).generate([[1], [2]], params, use_tqdm=False)]
    for owner, name in (
        ("blocks", "append_block"),
        ("scheduler", "_plan_chunk"),
        ("scheduler", "commit"),
    ):
        for press_at in range(1, 8):
            engine = random_llm(path).engine
            target = engine.scheduler if owner == "scheduler" else engine.scheduler.block_manager
            inner, calls = getattr(target, name), 0

            def pressed(*args, inner=inner, press_at=press_at):
                nonlocal calls
                calls += 1
                if calls == press_at:
                    signal.raise_signal(signal.SIGINT)
                return inner(*args)

            setattr(target, name, pressed)
            ids = [engine.add_request(p, params) for p in ([1], [2])]
            outs = {}
            for _ in range(40):
                with contextlib.suppress(KeyboardInterrupt):
                    outs |= {o.request_id: o["token_ids"] for o in engine.step()}
            assert [outs[i] for i in ids] == want
            assert is_idle(engine)


PACKAGE = Path(nanovllm.__file__).parent
TRACED = f"{PACKAGE}/engine/", f"{PACKAGE}/llm.py"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def press(action: Callable[[], object], at: set[int]) -> int:
    """Run `action` and press Ctrl-C at these of the lines that the engine and llm.py run.

    Returns how many lines were run. KeyboardInterrupt ends the action.
    """
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        name = frame.f_code.co_filename
        if not name.startswith(TRACED):
            return None
        # A signal is handled between calls, so never where a block is left.
        if event == "line" and not linecache.getline(name, frame.f_lineno).strip().startswith(
            "with"
        ):
            lines += 1
            if lines in at:
                signal.raise_signal(signal.SIGINT)
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return lines


# A stream is closed by a `finally`, of which Python cannot protect the first lines: a second Ctrl-C
# one to three lines after one at the end of a step may come there.
SECOND = {"generate": (0, 1, 40), "loop": (0, 1, 40), "stream": (0, 40, 200)}


@pytest.mark.parametrize(("how", "second"), [(how, n) for how in SECOND for n in SECOND[how]])
def test_ctrl_c_at_any_line(path: Path, how: str, second: int) -> None:
    """Nothing is left behind, also if a second Ctrl-C comes so many lines later."""
    llm = random_llm(path, num_kv_cache_blocks=4, block_size=4, enable_prefix_caching=False)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8]]
    want = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    def loop() -> None:
        for prompt in prompts:
            llm.engine.add_request(prompt, GREEDY)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()

    actions = {
        "generate": lambda: llm.generate(prompts, GREEDY, use_tqdm=False),
        "stream": lambda: list(llm.stream(prompts, GREEDY)),
        "loop": loop,
    }
    lines = press(actions[how], set())
    assert lines > 500
    # Sixty lines, and others of them for each `second`.
    step = max(1, lines // 60)
    for at in range(1 + SECOND[how].index(second) * step // 3, lines, step):
        press(actions[how], {at, at + second})
        if how == "loop":
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
        assert is_idle(llm.engine), at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
