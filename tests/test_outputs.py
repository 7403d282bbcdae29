"""What a call returns and raises: the forms of results, and errors that can be copied."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_llm

from lessons.oracle.oracle import InvariantError
from nanovllm import LLM, GenerationError, SamplingParams
from nanovllm.utils.errors import GrammarError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_forms_of_results(embedded: LLM) -> None:
    out = embedded.chat([{"role": "user", "content": "Spell cat"}], use_tqdm=False)[0]
    assert out.outputs[0].text == out["text"] == "c-a-t"
    assert out.outputs[0].token_ids == out["token_ids"]
    assert (
        out["token_ids"][-1] in embedded.engine.input_processor.eos_token_ids
    )  # vLLM keeps the stop token too
    assert out.finished
    assert (out.outputs[0].index, out.outputs[0].finish_reason) == (0, "stop")
    assert out.outputs[0].stop_reason is None
    m = out.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    with pytest.raises(KeyError, match="'text' and 'token_ids'"):
        out["txt"]
    # The same as of nano-vllm's dict.
    assert "text" in out
    assert "txt" not in out
    assert list(out) == ["text", "token_ids"]
    assert dict(out) == {**out} == {"text": "c-a-t", "token_ids": out["token_ids"]}
    assert out.get("logprobs") is None
    assert out


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_errors_travel_between_processes(path: Path) -> None:
    """Python copies an exception by calling its class with `args`."""
    llm = random_llm(path)
    hidden = SamplingParams(allowed_token_ids=[1], logits_processors=[lambda ids, x: x - np.inf])
    with pytest.raises(GenerationError) as caught:
        llm.generate([[1, 2], [3]], [hidden, GREEDY], use_tqdm=False)
    caught.value.note = "of the caller"
    errors = [caught.value, GrammarError("y"), InvariantError("host")]
    errors.append(InvariantError("host", "a detail"))
    known = {
        kind
        for kind in subclasses(Exception)
        if kind.__module__.startswith(("nanovllm", "lessons"))
    }
    assert known == {type(error) for error in errors}, "a new class is to be tested here"
    for error in errors:
        copies = [copy.copy(error), copy.deepcopy(error)]
        copies += [
            pickle.loads(pickle.dumps(error, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)
        ]
        for one in copies:
            assert type(one) is type(error)
            assert (str(one), one.args, vars(one)) == (str(error), error.args, vars(error))
    assert len(caught.value.outputs) == 2
    assert "prompts[0]" in str(caught.value)
