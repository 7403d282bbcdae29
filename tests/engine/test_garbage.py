"""Full collections do not visit the requests of a large call."""

import gc
import itertools
from collections.abc import Iterator

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.api.config import EngineConfig
from nanovllm.engine.garbage import FREEZE_EVERY, frozen_requests
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.tools.benchmarks.modes import NoModel


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
