"""What a user sees: the forms of prompts and results, the progress bar, Ctrl-C, the manual loop."""

import contextlib
import copy
import dataclasses
import inspect
import os
import pickle
import pydoc
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, random_llm, weights_of
from engines import ctrl_c_interrupts, is_idle  # noqa: F401

import nanovllm
from nanovllm import LLM, GenerationError, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.api.config import EngineConfig
from nanovllm.api.vllm_names import CALL_ARGUMENTS, INSTEAD, CallArguments
from nanovllm.features.structured import OutputComplete
from nanovllm.tools.jobs.openai_format import UnknownModel
from nanovllm.tools.oracle.oracle import InvariantError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="session")
def llm(path: Path) -> LLM:
    return random_llm(path)


def test_forms_of_prompts(embedded: LLM) -> None:
    text = "What is 3 + 4?\n"
    ids = embedded.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outs = embedded.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(o["token_ids"]) for o in outs}) == 1
    assert [o.prompt for o in outs] == [text, None, text, None]
    assert all(o.prompt_token_ids == ids for o in outs)
    for form, out in zip(forms, outs, strict=True):
        assert embedded.generate(form, GREEDY, use_tqdm=False)[0]["token_ids"] == out["token_ids"]
    assert embedded.generate([], use_tqdm=False) == []


def test_token_ids_of_tokenizers_numpy_and_torch(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    texts = ["What is 3 + 4?\n", "Spell cat\n"]
    one, two = rows = [tokenizer.encode(text) for text in texts]
    brief = SamplingParams(temperature=0, max_tokens=1)
    tokenizer.padding_side = "left"
    padded = tokenizer(texts, padding=True, return_tensors="pt")
    assert 0 in padded["attention_mask"]
    first = tokenizer(texts[0], return_tensors="pt")
    for prompts, want in (
        (np.array(one), [one]),
        (torch.tensor(one), [one]),
        (list(torch.tensor(one)), [one]),
        (torch.tensor([one, one], dtype=torch.int32), [one, one]),
        (list(map(np.array, rows)), [one, two]),
        (tokenizer(texts[0]), [one]),
        (first, [one]),
        (first["input_ids"], [one]),
        ([first, tokenizer(texts[1])], [one, two]),
        (tokenizer(texts), [one, two]),
        (padded, [one, two]),
        ({"prompt_token_ids": np.array(one)}, [one]),
    ):
        outs = embedded.generate(prompts, brief, use_tqdm=False)
        assert [o.prompt_token_ids for o in outs] == want
        assert all(type(token) is int for token in outs[0].prompt_token_ids)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert embedded.generate(chat, brief, use_tqdm=False)[0].prompt_token_ids == chat["input_ids"]
    embedded.engine.add_request(first, brief)
    assert embedded.engine.step()[0].prompt_token_ids == one


def test_vllms_dicts_of_prompts(embedded: LLM) -> None:
    ids = embedded.get_tokenizer().encode("Spell cat\n")
    prompts = [TextPrompt(prompt="Spell cat\n"), TokensPrompt(prompt_token_ids=ids, prompt="x")]
    outs = embedded.generate(prompts, GREEDY, use_tqdm=False)
    assert prompts == [{"prompt": "Spell cat\n"}, {"prompt_token_ids": ids, "prompt": "x"}]
    assert [out.prompt for out in outs] == ["Spell cat\n", "x"]
    assert [out["text"] for out in outs] == ["c-a-t"] * 2


def test_attention_masks(embedded: LLM) -> None:
    rows, mask = [[5, 6, 7], [8, 9, 10]], [[1, 1, 0], [0, 1, 1]]
    for ids in (rows, np.array(rows), torch.tensor(rows), [np.array(row) for row in rows]):
        for m in (mask, np.array(mask), torch.tensor(mask).bool(), np.array(mask, np.float32)):
            outs = embedded.generate(
                {"input_ids": ids, "attention_mask": m}, GREEDY, use_tqdm=False
            )
            assert [out.prompt_token_ids for out in outs] == [[5, 6], [9, 10]]
    ragged = {"input_ids": [[5, 6, 7], [8]], "attention_mask": [[1, 0, 0], [1]]}
    outs = embedded.generate(ragged, GREEDY, use_tqdm=False)
    assert [out.prompt_token_ids for out in outs] == [[5], [8]]


def test_decoded_tokens_of_split_characters(embedded: LLM) -> None:
    """As in vLLM: the last part of a character has all of it, the other parts have ""."""
    text = "naïve 🙂√ “x”\n"
    ids = embedded.get_tokenizer().encode(text)
    parts = ["n", "a", "", "ï", "v", "e", " ", *[""] * 3, "🙂", "", "", "√", " "]
    parts += ["", "", "“", "x", "", "", "”", "\n"]

    def forced(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[ids[len(output_ids)]] = float("inf")
        return logits

    params = SamplingParams(
        logprobs=5, prompt_logprobs=3, max_tokens=len(ids), logits_processors=[forced]
    )
    for budget in (embedded.engine.scheduler.token_budget, 4):  # 4: the prompt in chunks
        embedded.engine.scheduler.token_budget, before = (
            budget,
            embedded.engine.scheduler.token_budget,
        )
        out = embedded.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        embedded.engine.scheduler.token_budget = before
        sample = out.outputs[0]
        assert sample.text == text
        assert [e[t].decoded_token for e, t in zip(sample.logprobs, ids, strict=True)] == parts
        shown = [e[t].decoded_token for e, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
        assert shown == parts[1:]
        for entry in (*sample.logprobs, *out.prompt_logprobs[1:]):
            assert not any(one.decoded_token.endswith("\ufffd") for one in entry.values())


def test_forms_of_results(embedded: LLM) -> None:
    out = embedded.chat([{"role": "user", "content": "Spell cat"}], use_tqdm=False)[0]
    assert out.outputs[0].text == out["text"] == "c-a-t"
    assert out.outputs[0].token_ids == out["token_ids"]
    assert (
        out["token_ids"][-1] in embedded.engine.inputs.eos_token_ids
    )  # vLLM keeps the stop token too
    assert out.finished
    assert (out.outputs[0].index, out.outputs[0].finish_reason) == (0, "stop")
    assert out.outputs[0].stop_reason is None
    m = out.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert m.time_in_queue >= 0
    with pytest.raises(KeyError, match="'text' and 'token_ids'"):
        out["txt"]
    # The same as of nano-vllm's dict.
    assert "text" in out
    assert "txt" not in out
    assert list(out) == ["text", "token_ids"]
    assert dict(out) == {**out} == {"text": "c-a-t", "token_ids": out["token_ids"]}
    assert out.get("logprobs") is None
    assert out


def test_chat_forms(embedded: LLM) -> None:
    one = [{"role": "user", "content": "Reverse cab"}]
    many = embedded.chat([one, [{"role": "user", "content": "Uppercase dog"}]], use_tqdm=False)
    assert [o["text"] for o in many] == ["bac", "DOG"]
    assert embedded.chat(one, use_tqdm=False)[0]["text"] == "bac"
    quiet = embedded.chat(one, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
    assert quiet["text"] == "bac"
    assert len(quiet.prompt_token_ids) > len(many[0].prompt_token_ids)


def test_chat_template_kwargs_overrule_the_arguments(embedded: LLM) -> None:
    """As in vLLM, where they are joined with a dict of the arguments."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    template = "{{ tools | length }}{{ messages[0].content }}{{ tokenizer }}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    def prompt(more: dict[str, object], **arguments: object) -> str | None:
        [out] = embedded.chat(chat, GREEDY, use_tqdm=False, chat_template_kwargs=more, **arguments)
        return out.prompt

    asked = "<|im_start|>assistant\n"
    assert prompt({}).endswith("<|im_end|>\n" + asked)
    assert prompt({"add_generation_prompt": False}).endswith("Well<|im_end|>\n")
    assert prompt({"add_generation_prompt": True}, add_generation_prompt=False).endswith(asked)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(more).endswith("Well")
    more = {"tools": [tool, tool], "chat_template": template, "tokenizer": "!"}
    assert prompt(more, tools=[tool], chat_template="{{ 1 }}") == "2Hi!"
    for name in ("conversation", "messages", "tokenize", "self", 5):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has {name!r}.*remove it"):
            prompt({name: True})
    with pytest.raises(TypeError, match="chat_template_kwargs must be an object, not 5"):
        prompt(5)


PARTS = [{"type": "text", "text": "Reverse"}, {"type": "text", "text": "cab"}]
USES = "<{{ messages[0].content }}>"
ITERATES = "<{% for part in messages[0].content %}{{ part.text }};{% endfor %}>"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (USES, "<Reverse\ncab>"),
        ("<{{ '' + messages[0].content }}>", "<Reverse\ncab>"),  # TypeError for a list
        ("<{{ messages[0].content | tojson }}>", '<"Reverse\\ncab">'),
        ("{% if messages[0].content is string %}" + USES + "{% endif %}", "<Reverse\ncab>"),
        (ITERATES, "<Reverse;cab;>"),
        (None, "<|im_start|>user\nReversecab<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_content_parts(embedded: LLM, template: str | None, shown: str) -> None:
    """A template that takes strings only gets a string, and one that iterates gets the parts."""
    for content in (PARTS, ["Reverse", "cab"]):
        chat = [{"role": "user", "content": content}]
        out = embedded.chat(chat, GREEDY, use_tqdm=False, chat_template=template)[0]
        assert out.prompt == shown


def test_names_of_vllm_say_what_to_use(embedded: LLM) -> None:
    for name, sentence in INSTEAD.items():
        assert not hasattr(embedded, name)
        assert not hasattr(nanovllm, name)
        assert getattr(nanovllm, name, None) is None
        with pytest.raises(AttributeError) as attribute:
            getattr(embedded, name)
        with pytest.raises(AttributeError) as of_module:
            getattr(nanovllm, name)
        with pytest.raises(ImportError) as imported:
            exec(f"from nanovllm import LLM, {name}")
        for error in (attribute, of_module, imported):
            assert str(error.value).endswith(f"has no attribute {name!r}; {sentence}")
    assert not INSTEAD.keys() & {*dir(LLM), *nanovllm.__all__}
    assert embedded.llm_engine is embedded.engine


def test_other_names_have_the_nearest_one(embedded: LLM) -> None:
    for name, near in (("generat", "generate"), ("engin", "engine"), ("llm_engines", "llm_engine")):
        with pytest.raises(AttributeError) as error:
            getattr(embedded, name)
        shown = traceback.format_exception(error.value)[-1]
        assert shown.count(f"'{name}'; did you mean '{near}'?") == 1
        assert shown.lower().count("did you mean") == 1  # Python adds none of its own
    with pytest.raises(AttributeError, match="LLM has no attribute 'zzz'$"):
        _ = embedded.zzz
    with pytest.raises(AttributeError, match="'SamplingParam'; did you mean 'SamplingParams'"):
        _ = nanovllm.SamplingParam
    with pytest.raises(ImportError, match="cannot import name 'zzz'"):
        exec("from nanovllm import zzz")
    exec("from nanovllm import llm, plan")  # submodules


def test_arguments_of_vllm_that_change_nothing(embedded: LLM) -> None:
    def generate(**arguments: object) -> str:
        return embedded.generate("Spell cat\n", GREEDY, use_tqdm=False, **arguments)[0]["text"]

    def chat(**arguments: object) -> str:
        chat = [{"role": "user", "content": "Spell cat"}]
        return embedded.chat(chat, GREEDY, use_tqdm=False, **arguments)[0]["text"]

    for call in (generate, chat):
        assert call(**dict.fromkeys(CALL_ARGUMENTS)) == "c-a-t"
        for name, (harmless, reason) in CALL_ARGUMENTS.items():
            assert all(call(**{name: value}) == "c-a-t" for value in harmless)
            for value in (7, "some", [1, 2], np.array([0, 0]), False):
                with pytest.raises(ValueError, match=re.escape(reason)):
                    call(**{name: value})
        with pytest.raises(TypeError, match=f"of {call.__name__} 'use_tqmd'.*'use_tqdm'"):
            call(use_tqmd=False)
        with pytest.raises(TypeError, match=r"'lora'; known: \w+, sampling_params, use_tqdm"):
            call(lora=None)
        for zeros in ([0, 0], (0,), []):
            assert call(priority=zeros, lora_request=[None] * len(zeros)) == "c-a-t"
        for name, value in (("priority", [0, 1]), ("priority", [[0]]), ("lora_request", [None, 1])):
            with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
                call(**{name: value})
    with pytest.raises(ValueError, match="pass the token ids as `prompts`"):
        embedded.generate(prompt_token_ids=[[1, 2]], sampling_params=GREEDY)
    with pytest.raises(TypeError, match="prompts must be a string"):
        embedded.generate()
    assert CallArguments.__annotations__.keys() == CALL_ARGUMENTS.keys()


@pytest.mark.slow
@pytest.mark.extra
def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    """mypy --strict accepts what exists and refuses every other name."""
    pytest.importorskip("mypy")
    good = """from pathlib import Path
from nanovllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.engine.llm_engine import LLMEngine
llm = LLM()
other = LLM(model=Path("a"), max_num_seqs=4, async_scheduling=None)
engine: LLMEngine = llm.llm_engine
prompts = [TokensPrompt(prompt_token_ids=[1, 2])]
text: str = llm.generate(prompts, SamplingParams(), lora_request=None, priority=0)[0].outputs[0].text
llm.generate(prompts, priority=[0], lora_request=[None])
llm.generate([TextPrompt(prompt="a")], use_tqdm=False)
llm.chat([{"role": "user", "content": "a"}], chat_template_content_format="auto")
params: SamplingParams = SamplingParams.from_optional(n=None).clone()
engine.abort_request(["0"])
"""
    bad = """from nanovllm import LLM, EngineArgs
llm = LLM()
llm.encode
llm.generate("a", use_tqmd=False)
llm.generate("a", priority=3)
LLM(max_num_seq=4)
LLM("a", "cpu")
LLM(max_num_seqs="4")
"""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,numpy.*,numba.*,tqdm.*]\nfollow_imports = skip\n"
    )
    for name, code in (("good.py", good), ("bad.py", bad)):
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "mypy", "good.py", "bad.py"]
    environment = os.environ | {"MYPYPATH": str(Path(nanovllm.__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\S+):(\d+): error", done.stdout, re.MULTILINE)
    assert found == [("bad.py", line) for line in "1345678"], done.stdout
    assert done.returncode == 1, done.stdout


def test_clone_and_from_optional() -> None:
    def first(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    params = SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, allowed_token_ids=[3], logits_processors=[first], seed=4
    )
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[5] = 1.0
    clone.allowed_token_ids.append(6)
    assert (params.stop, params.logit_bias, params.allowed_token_ids) == (["a"], {1: 2.0}, [3])
    assert clone.logits_processors[0] is first

    fields = SamplingParams.__dataclass_fields__
    none = SamplingParams.from_optional(**dict.fromkeys(fields))
    assert none == SamplingParams(max_tokens=None)
    given = dict(n=2, temperature=0.5, stop="a", max_tokens=5, logit_bias={1: 1.0})
    assert SamplingParams.from_optional(**given, top_p=None) == SamplingParams(**given)
    for value in (None, 1.0):
        with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
            SamplingParams.from_optional(temprature=value)


def test_signatures_list_every_field() -> None:
    for thing, fields in ((SamplingParams, SamplingParams), (LLM, EngineConfig)):
        shown = inspect.signature(thing).parameters
        for field in dataclasses.fields(fields):
            assert shown[field.name].default == field.default
            assert f"{field.name}: " in pydoc.render_doc(thing, renderer=pydoc.plaintext)
    assert inspect.signature(LLM).parameters == inspect.signature(EngineConfig).parameters
    assert next(iter(inspect.signature(LLM).parameters)) == "model"


def test_defaults(embedded: LLM, llm: LLM) -> None:
    assert embedded.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=256)
    assert SamplingParams() == SamplingParams(temperature=1.0, max_tokens=64)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.get_tokenizer()


def test_order_and_per_prompt_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3)]
    outs = llm.generate([[n] for n in (4, 3, 2, 1)], params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outs] == [9, 1, 5, 3]
    assert [o.prompt_token_ids for o in outs] == [[4], [3], [2], [1]]
    assert all(o.outputs[0].finish_reason == "length" and o["text"] == "" for o in outs)


def test_stops(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = llm.generate([7, 7], free, use_tqdm=False)[0]["token_ids"]
    stop = tokens[4]
    at = tokens.index(stop)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    out = llm.generate([7, 7], params, use_tqdm=False)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens[: at + 1], "stop", stop)
    engine, before = llm.engine, llm.engine.inputs.eos_token_ids
    both = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop])
    engine.inputs.eos_token_ids = engine.outputs.eos_token_ids = frozenset({stop, VOCAB - 1})
    try:
        own = SamplingParams(temperature=0, max_tokens=30)
        short, full, given, ignored = llm.generate(
            [[7, 7]] * 4, [own, free, both, params], use_tqdm=False
        )
        *_, last = llm.stream([7, 7], params)
    finally:
        engine.inputs.eos_token_ids = engine.outputs.eos_token_ids = before
    assert (short["token_ids"], short.outputs[0].stop_reason) == (tokens[: at + 1], None)
    assert full["token_ids"] == tokens
    assert given.outputs[0].stop_reason is None
    assert ignored.outputs[0].stop_reason == last.stop_reason == stop


def test_length_is_capped_by_max_model_len(path: Path) -> None:
    llm = random_llm(path, max_model_len=20)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outs = llm.generate([[1] * 19, [1] * 12], params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outs] == [1, 8]


def test_progress_bar(embedded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    embedded.generate(["1 + 1\n", "2 + 2\n"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "prompt" in shown
    assert "tok/s" in shown
    embedded.generate("1 + 1\n", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_manual_loop_and_abort(path: Path, asynchronous: bool) -> None:
    engine = random_llm(path, async_scheduling=asynchronous, max_num_seqs=2).engine
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add_request([i, i + 1], long, request_id=f"r{i}") for i in range(1, 6)]
    assert ids == ["r1", "r2", "r3", "r4", "r5"]
    with pytest.raises(ValueError, match="'r1' is in use"):
        engine.add_request([1], long, request_id="r1")
    engine.step()
    engine.abort_request("r1")  # running
    engine.abort_request("r4")  # waiting
    engine.abort_request("r1")
    engine.abort_request("never was")
    engine.abort_request([])
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step()
    assert sorted(o.request_id for o in finished) == ["r2", "r3", "r5"]
    assert all(len(o["token_ids"]) == 40 for o in finished)
    assert is_idle(engine)
    assert engine.step() == []


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
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.generate([[i] for i in range(1, 3)], params, use_tqdm=False)
    assert is_idle(llm.engine)


def test_generate_in_another_thread(llm: LLM) -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(llm.generate([1, 2], GREEDY, use_tqdm=False))
    )
    thread.start()
    thread.join()
    assert results[0]["token_ids"] == llm.generate([1, 2], GREEDY, use_tqdm=False)[0]["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["run", "_sample"])
def test_engine_survives_a_failing_step(path: Path, asynchronous: bool, where: str) -> None:
    """What the failed step promised is taken back; the same requests then finish, unchanged."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[i] * 17 for i in range(1, 5)]
    llm = random_llm(path, async_scheduling=asynchronous)
    want = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
    for failing in range(1, 8):
        llm = random_llm(path, async_scheduling=asynchronous)
        llm.engine.runner.attention.cache.fill_(float("nan"))
        inner, calls = getattr(llm.engine.runner, where), 0

        def broken(*args, inner=inner, failing=failing):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise RuntimeError("out of memory")
            return inner(*args)

        setattr(llm.engine.runner, where, broken)
        ids = [llm.engine.add_request(p, params) for p in prompts]
        outs = {}
        failures = 0
        while llm.engine.has_unfinished_requests():
            try:
                outs |= {o.request_id: o["token_ids"] for o in llm.engine.step()}
            except RuntimeError:
                failures += 1
        assert failures == 1
        assert [outs[i] for i in ids] == want
        assert is_idle(llm.engine)


def test_failure_in_generate_leaves_no_request(path: Path) -> None:
    llm = random_llm(path)
    run = llm.engine.runner.run

    def broken(plan):
        raise RuntimeError("device lost")

    llm.engine.runner.run = broken
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert is_idle(llm.engine)
    llm.engine.runner.run = run
    assert len(llm.generate([[1], [2]], GREEDY, use_tqdm=False)) == 2


def test_two_engines_and_deletion(path: Path) -> None:
    import gc
    import weakref

    first, second = random_llm(path), random_llm(path)
    a = first.generate([1, 2, 3], GREEDY, use_tqdm=False)
    cache = weakref.ref(first.engine.runner.attention.cache)
    del first
    gc.collect()
    assert cache() is None
    assert a[0]["token_ids"] == second.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["token_ids"]


def test_torch_defaults_are_left_alone(path: Path) -> None:
    random_llm(path, dtype="bfloat16")
    assert torch.get_default_dtype() is torch.float32
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.slow
def test_n_samples(path: Path) -> None:
    """Distinct, in order of index, each what its seed gives; one greedy answer n times."""
    llm = random_llm(path, num_kvcache_blocks=200)
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    out = llm.generate([[1] * 21, [2] * 40], params, use_tqdm=False)
    for o in out:
        assert [c.index for c in o.outputs] == list(range(5))
        assert len({tuple(c.token_ids) for c in o.outputs}) == 5
    first = llm.generate(
        [1] * 21,
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
        use_tqdm=False,
    )
    assert first[0]["token_ids"] == out[0]["token_ids"]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = llm.generate([1] * 21, greedy, use_tqdm=False)[0]["token_ids"]
    for options in (
        {},
        {"max_num_seqs": 2},
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"num_kvcache_blocks": 4},
    ):
        other = random_llm(path, **options)
        many = SamplingParams(n=4, temperature=0, max_tokens=12, ignore_eos=True)
        got = other.generate([1] * 21, many, use_tqdm=False)[0]
        assert [c.token_ids for c in got.outputs] == [want] * 4
        again = other.generate([1] * 21, params, use_tqdm=False)[0]
        assert [c.token_ids for c in again.outputs] == [c.token_ids for c in out[0].outputs]
        assert is_idle(other.engine)


def test_stats_and_reset(path: Path) -> None:
    llm = random_llm(path, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i in range(3):
        llm.engine.add_request([7] * 40 + [i], params)
    llm.engine.step()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (2, 1)
    assert stats["blocks_in_use"] == 3 + 1  # two full blocks in common
    assert stats["blocks_in_use"] + stats["blocks_cached"] + stats["blocks_free"] == 64
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
    assert stats["prefix_hit_rate"] == 2 * 32 / (3 * 41)
    assert stats["blocks_cached"] > 0
    llm.reset_prefix_cache()
    assert llm.stats()["blocks_free"] == 64
    assert llm.generate([7] * 40, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_results_do_not_leak_into_the_next_call(path: Path) -> None:
    llm = random_llm(path, async_scheduling=True)
    engine = llm.engine
    engine.add_request([9, 9], GREEDY, request_id="mine")
    outs = llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outs] == [[1], [2]]
    assert len(llm.generate([[3]], GREEDY, use_tqdm=False)) == 1
    assert engine.has_unfinished_requests()  # "mine" is done, and waits to be asked for
    assert [o.request_id for o in engine.step()] == ["mine"]
    assert is_idle(engine)


def test_ids_of_a_user_and_of_generate_do_not_meet(path: Path) -> None:
    llm = random_llm(path)
    llm.engine.add_request([9, 9], GREEDY, request_id="1")
    first = llm.generate([1], GREEDY, use_tqdm=False)[0]
    second = llm.generate([2], GREEDY, use_tqdm=False)[0]  # "1" is done, and not asked for yet
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([1], [2])
    with pytest.raises(ValueError, match="'1' is in use"):
        llm.engine.add_request([1], GREEDY, request_id="1")
    with pytest.raises(TypeError, match="request_id"):
        llm.engine.add_request([1], GREEDY, request_id=["1"])
    assert [o.prompt_token_ids for o in llm.engine.step()] == [[9, 9]]
    assert is_idle(llm.engine)


def test_ctrl_c_in_a_manual_loop_loses_nothing(path: Path) -> None:
    """Pressed in the scheduler, in the runner, between commit and result: the step is finished first."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want = [o["token_ids"] for o in random_llm(path).generate([[1], [2]], params, use_tqdm=False)]
    for owner, name in (
        ("blocks", "append_block"),
        ("scheduler", "_plan_chunk"),
        ("scheduler", "commit"),
    ):
        for press_at in range(1, 8):
            engine = random_llm(path).engine
            target = engine.scheduler if owner == "scheduler" else engine.scheduler.blocks
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_without_a_token_to_sample_ends_with_an_error(
    path: Path, asynchronous: bool
) -> None:
    """Its token is not in the output, the others go on, and the engine remains usable."""
    llm = random_llm(path, num_kvcache_blocks=64, async_scheduling=asynchronous)

    def fails(value: float) -> Callable:
        def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits.fill_(value) if len(ids) == 3 else logits

        return processor

    greedy = dict(temperature=0, max_tokens=8, ignore_eos=True)
    plain = SamplingParams(**greedy)
    hidden = SamplingParams(**greedy, logits_processors=[fails(float("-inf"))])
    broken = SamplingParams(**greedy, n=2, logits_processors=[fails(float("nan"))])
    prompts, params = [[1, 2], [3, 4], [5, 6]], [plain, hidden, broken]
    want = llm.generate(prompts, plain, use_tqdm=False)
    with pytest.raises(GenerationError, match=r"prompts\[1\].*prompts\[2\].*`outputs`") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    outputs = caught.value.outputs
    assert outputs[0].outputs[0].token_ids == want[0].outputs[0].token_ids
    for i in (1, 2):
        for sample in outputs[i].outputs:
            assert sample.finish_reason == "error"
            assert sample.token_ids == want[i].outputs[0].token_ids[:3]
    assert [out.finish_reason for out in llm.stream([3, 4], hidden)][-1] == "error"
    llm.reset_prefix_cache()
    again = llm.generate(prompts, plain, use_tqdm=False)
    assert [o["token_ids"] for o in again] == [o["token_ids"] for o in want]


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_errors_travel_between_processes(path: Path) -> None:
    """Python copies an exception by calling its class with `args`."""
    llm = random_llm(path)
    hidden = SamplingParams(allowed_token_ids=[1], logits_processors=[lambda ids, x: x - np.inf])
    with pytest.raises(GenerationError) as caught:
        llm.generate([[1, 2], [3]], [hidden, GREEDY], use_tqdm=False)
    caught.value.note = "of the caller"
    errors = [caught.value, UnknownModel("x"), OutputComplete("y"), InvariantError("host")]
    errors.append(InvariantError("host", "a detail"))
    known = {kind for kind in subclasses(Exception) if kind.__module__.startswith("nanovllm")}
    assert known == {type(error) for error in errors}, "a new class is to be tested here"
    for error in errors:
        copies = [copy.copy(error), copy.deepcopy(error)]
        copies += [pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
        for one in copies:
            assert type(one) is type(error)
            assert (str(one), one.args, vars(one)) == (str(error), error.args, vars(error))
    assert len(caught.value.outputs) == 2
    assert "prompts[0]" in str(caught.value)


def test_a_model_that_computes_nan(path: Path) -> None:
    """NaN in the weights of a step ends its requests; later steps are right again."""
    llm = random_llm(path, num_kvcache_blocks=64, attention_backend="sdpa")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True)
    model = llm.engine.runner.model
    logits, model.logits = model.logits, lambda hidden: logits(hidden) * float("nan")
    with pytest.raises(GenerationError, match="the model computed NaN"):
        llm.generate([[1, 2], [3]], params, use_tqdm=False)
    model.logits = logits
    assert len(llm.generate([1, 2], params, use_tqdm=False)[0]["token_ids"]) == 4


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("length", "n"), [(8, 1), (21, 2), (32, 2), (40, 1)])  # blocks of 16
@pytest.mark.parametrize("swap", [{}, dict(swap_space=0.01, swap_min_blocks=1)], ids=["", "swap"])
def test_a_reset_while_requests_run(
    path: Path, length: int, n: int, steps: int, swap: dict
) -> None:
    """After the weights have changed, no later request shares what was computed with the old ones."""
    options = dict(num_kvcache_blocks=12, kvcache_block_size=16, attention_backend="sdpa")
    llm = random_llm(path, **options, **swap)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=n)
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    request = llm.engine.submit([i % 90 + 1 for i in range(length)], params)
    for _ in range(steps):
        llm.engine.run_step()
    with torch.inference_mode():
        for weight in weights_of(llm).values():
            weight.mul_(1.1)
    llm.reset_prefix_cache()
    for _ in llm.engine.run([request]):
        pass
    output = request.output
    later = [[*output.prompt_token_ids, *sample.token_ids, 5] for sample in output.outputs]
    got = llm.generate(later, short, use_tqdm=False)
    assert got[0].num_cached_tokens == 0
    llm.reset_prefix_cache()
    want = llm.generate(later, short, use_tqdm=False)
    assert [out["token_ids"] for out in got] == [out["token_ids"] for out in want]
