"""Full collections do not visit modules and the requests of a large call."""

import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features import garbage
from nanovllm.features.garbage import FREEZE_EVERY, frozen_imports, frozen_requests
from tools.benchmarks.modes import NoModel


@pytest.fixture
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def generate(count: int) -> int:
    """Call `LLM.generate` without a model. Returns the most objects that were frozen meanwhile.

    They are counted at some of the steps: the collector visits all of them to count them.
    """
    llm = LLM.__new__(LLM)
    llm._config = EngineConfig(max_num_seqs=8)
    inputs = InputProcessor(None, 1000, 128, frozenset(), SamplingParams(), 0)
    llm.engine = LLMEngine(llm._config, NoModel(), inputs)
    step, steps, found = llm.engine.run_step, itertools.count(), [0]

    def watched() -> None:
        if next(steps) % 200 == 199:
            found.append(gc.get_freeze_count())
        step()

    llm.engine.run_step = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = llm.generate([[i % 999, 7] for i in range(count)], params, use_tqdm=False)
    assert len(outputs) == count
    assert len(found) > 1
    return max(found)


@pytest.mark.parametrize(("count", "is_frozen"), [(FREEZE_EVERY // 2 - 1, False), (2500, True)])
def test_a_large_call_freezes_its_requests(unfrozen: None, count: int, is_frozen: bool) -> None:
    assert (generate(count) > 5 * count) == is_frozen
    assert gc.get_freeze_count() == 0


def test_an_error_unfreezes(unfrozen: None) -> None:
    with pytest.raises(ZeroDivisionError), frozen_requests() as count:
        count(FREEZE_EVERY)
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_what_the_program_has_frozen_stays(unfrozen: None) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    generate(2500)
    assert gc.get_freeze_count() >= frozen - 1000  # some of the objects are freed


@pytest.fixture
def no_torch(unfrozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(garbage, "num_imported", 0)


def test_imports_are_frozen_and_large_calls_too(no_torch: None) -> None:
    with pytest.raises(ZeroDivisionError), frozen_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(50_000)]
        raise ZeroDivisionError
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    assert len(made) < frozen <= garbage.num_imported < frozen + len(made) // 2
    assert generate(2500) > frozen + 5 * 2500
    assert gc.get_freeze_count() == 0


def test_what_the_program_freezes_after_the_imports_stays(no_torch: None) -> None:
    with frozen_imports():
        pass
    made = [[] for _ in range(50_000)]
    gc.freeze()
    generate(2500)
    assert gc.get_freeze_count() > garbage.num_imported
    del made


def test_imports_of_a_program_with_torch_freeze_nothing(unfrozen: None) -> None:
    with frozen_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_new_process_freezes_modules_and_no_engine() -> None:
    code = (
        "import gc, weakref\n"
        "from nanovllm import LLM\n"
        "def first():\n"
        "    llm = LLM()\n"
        "    return [weakref.ref(x) for x in (llm.engine, llm.engine.runner.model)]\n"
        "objects = first()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "gc.collect()\n"
        "assert [x() for x in objects] == [None, None]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
