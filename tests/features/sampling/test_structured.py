"""Structured outputs: what a grammar ended is valid under jsonschema and re."""

import json
import random
import re
import sys
import threading
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, BeamSearchParams, GenerationError, SamplingParams, StructuredOutputsParams
from nanovllm.features.sampling import structured as structured_module
from nanovllm.features.sampling.logit_rules.row_rules import RowRules, RulesBatch, RulesState
from nanovllm.features.sampling.structured import Grammar, GrammarCompiler, Matcher
from nanovllm.plan import LogitRules, NewRow, RowSampling
from nanovllm.utils.errors import GrammarError

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.extra

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "anyOf": [
                {"type": "boolean"},
                {"type": "number"},
                {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
                {"const": {"leaf": None}},
            ]
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
}
SUM = """
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = """
root ::= word ("," word)*
word ::= [a-c]+ | "<" root ">"
"""
CHOICES = ["yes", "no", "not now", 'say "no"\n', "naïve 😀", "\\"]


def is_json(schema: dict) -> Callable[[str], object]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def matches(pattern: str) -> Callable[[str], object]:
    return lambda text: check(re.fullmatch(pattern, text) is not None)


def check(condition: bool) -> None:
    assert condition


def is_nested(text: str) -> None:
    """GBNF's words: remove the innermost brackets until none are left."""
    while (shorter := re.sub(r"<[a-c]+(,[a-c]+)*>", "a", text)) != text:
        text = shorter
    check(re.fullmatch(r"[a-c]+(,[a-c]+)*", text) is not None)


# (fields of StructuredOutputsParams, what raises for a text that is not valid)
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "person": ({"json": PERSON}, is_json(PERSON)),
    "tree": ({"json": json.dumps(TREE)}, is_json(TREE)),
    "object": ({"json_object": True}, is_json({"type": "object"})),
    "date": ({"regex": r"[0-9]{4}-[01][0-9]-[0-3]\d"}, matches(r"[0-9]{4}-[01][0-9]-[0-3].")),
    "words": ({"regex": r"([a-z]{2,5} ?)+[!?]"}, matches(r"([a-z]{2,5} ?)+[!?]")),
    "choice": ({"choice": CHOICES}, lambda text: check(text in CHOICES)),
    "sum": ({"grammar": SUM}, lambda text: check(isinstance(eval(text), int))),
    "gbnf": ({"grammar": GBNF}, is_nested),
}


def structured(kind: str, **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**KINDS[kind][0]), **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(embedded: LLM, kind: str) -> None:
    """Greedy, and at a temperature at which the model alone writes noise."""
    params = [
        structured(kind, temperature=t, seed=s, max_tokens=90, repetition_penalty=1.2, n=2)
        for s, t in enumerate([0, 1.0, 1.5, 3.0])
    ]
    outs = embedded.generate(["Count from 1 to 9\n"] * len(params), params, use_tqdm=False)
    samples = [sample for out in outs for sample in out.outputs]
    ended = [sample.text for sample in samples if sample.finish_reason == "stop"]
    assert ended, outs
    for text in ended:
        KINDS[kind][1](text)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def each_way(embedded: LLM, request, monkeypatch) -> LLM:
    """The embedded model, without and with asynchronous steps."""
    monkeypatch.setattr(embedded.engine, "async_scheduling", request.param)
    return embedded


def random_request(rng: random.Random, llm: LLM) -> tuple[str, SamplingParams]:
    """A kind, and parameters of which some can hide every token that the grammar allows."""
    kind, V = rng.choice(list(KINDS)), llm.engine.input_processor.vocab_size
    fields: dict[str, Any] = dict(
        temperature=rng.choice([0, 0.7, 1.5]),
        max_tokens=rng.choice([4, 30, 60]),
        seed=rng.randrange(2**40),
    )
    fields["min_tokens"] = rng.choice([0, 0, 0, fields["max_tokens"] // 2])
    for name, values in dict(
        top_k=[1, 5, 50],
        top_p=[0.3, 0.9],
        min_p=[0.1],
        n=[2, 3],
        logprobs=[0, 3],
        prompt_logprobs=[1],
        repetition_penalty=[1.3],
        frequency_penalty=[0.7],
        presence_penalty=[-1.0],
        stop=[["e"], ["no", "}"]],
        ignore_eos=[True],
        stop_token_ids=[[3], [5, 40]],
        bad_words=[["a"], ["1", "not now"]],
        logit_bias=[{8: 5.0, 20: -9.0}],
        allowed_token_ids=[list(range(0, V, 2)), list(range(V))],
        logits_processors=[[lambda ids, logits: -logits], [lambda a, b, c: c.mul_(0.5)]],
        include_stop_str_in_output=[True],
    ).items():
        if rng.random() < 0.15:
            fields[name] = rng.choice(values)
    return kind, structured(kind, **fields)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param(
            {"num_kv_cache_blocks": 14, "max_num_batched_tokens": 24}, marks=pytest.mark.slow
        ),
        {"num_kv_cache_blocks": 11, "max_num_seqs": 9, "async_scheduling": True},
    ],
    ids=["plain", "async", "preempted", "async, preempted"],
)
def test_fuzz(options: dict) -> None:
    """Mixed with plain requests, in a stream and with aborts; in small pools, with preemptions."""
    rng = random.Random(str(options))
    llm = LLM(
        dtype="float32",
        device="cpu",
        max_model_len=160,
        attention_backend="sdpa",
        **({"num_kv_cache_blocks": 400} | options),
    )
    kinds, requests = [], []
    for i in range(40):
        kind, params = random_request(rng, llm)
        if i < 4:  # they fill a small pool
            kind, params = "", SamplingParams(seed=i, max_tokens=60, ignore_eos=True)
        kinds.append(kind)
        prompt = rng.choice(["Count from 1 to 9\n", "What is 12 + 30?\n", "Sort 4, 2, 9\n"])
        requests.append(llm.engine.submit(prompt, params, stream=i % 3 == 0))
    texts: dict[tuple[int, int], str] = {}
    ends: dict[tuple[int, int], Any] = {}
    for step, _ in enumerate(llm.engine.run(list(requests))):
        for i, request in enumerate(requests):
            for new in request.task.read_stream(request) if request.stream else ():
                texts[i, new.index] = texts.get((i, new.index), "") + new.text
                ends[i, new.index] = new
        if step in (5, 25):
            llm.engine.abort([requests[step]])
    for i, request in enumerate(requests):
        for sample in request.output.outputs if request.output else ():
            texts[i, sample.index], ends[i, sample.index] = sample.text, sample
            if request.task.params.logprobs is not None:
                assert len(sample.logprobs) == len(sample.token_ids)
    assert len(ends) == sum(len(request.samples) for request in requests)
    assert llm.stats()["preemptions"] > 0 or "num_kv_cache_blocks" not in options
    valid = 0
    for (i, index), end in ends.items():
        params, kind = requests[i].task.params, kinds[i]
        if end.finish_reason == "error":
            # A processor that negates logits makes a hidden end token certain.
            negated = params.min_tokens and params.logits_processors
            assert params.bad_words or params.allowed_token_ids or negated, params
        elif kind and end.finish_reason == "stop" and end.stop_reason is None:
            KINDS[kind][1](texts[i, index])
            valid += 1
    assert valid >= 10
    assert not llm.engine.has_unfinished_requests()


def test_pydantic_models(embedded: LLM) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel, extra="forbid"):
        numbers: list[typing.Annotated[int, pydantic.Field(ge=0, lt=100)]] = pydantic.Field(
            max_length=3
        )
        sure: bool

    for schema in (Answer, Answer.model_json_schema(), json.dumps(Answer.model_json_schema())):
        params = SamplingParams(
            temperature=0, structured_outputs=StructuredOutputsParams(json=schema)
        )
        out = embedded.generate("Sort 42, 7, 99\n", params, use_tqdm=False)[0]
        assert out.outputs[0].finish_reason == "stop"
        Answer.model_validate_json(out["text"])


# ---- masks ----


def allowed_by(choices: list[str], text: str, tokens: dict[int, str], ends: set[int]) -> set[int]:
    """What may follow `text` if the whole is one of `choices`, by definition."""
    rests = [choice[len(text) :] for choice in choices if choice.startswith(text)]
    following = {i for i, t in tokens.items() if t and any(rest.startswith(t) for rest in rests)}
    return following | (ends if "" in rests else set())


def is_forced(choices: list[str], text: str) -> bool:
    """Whether one character must follow. llguidance then allows only the tokenizer's own token."""
    return len({choice[len(text) :][:1] for choice in choices if choice.startswith(text)}) == 1


@pytest.mark.parametrize("vocab_size", [1042, 1056, 1061])
def test_masks_by_definition(embedded: LLM, vocab_size: int) -> None:
    """Every mask along random outputs, for vocabularies that do not fill the last byte."""
    tokenizer, rng = embedded.get_tokenizer(), random.Random(0)
    choices = ["one", "only one", "12", "123", "one (1)"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}
    for ends in ([1035], [1033, 1035], [5], []):
        compiler = GrammarCompiler(tokenizer, vocab_size, frozenset({1035}))
        grammar = compiler.compile(StructuredOutputsParams(choice=choices), ends)
        state = RulesState(2, 40, vocab_size, torch.device("cpu"))
        for _ in range(12):
            sampling = RowSampling(0.0, 0, rules=LogitRules(grammar=grammar))
            row = RowRules(sampling.rules, NewRow(1, [], sampling, [1, 2]))
            batch, output = RulesBatch([(1, row)], state), []
            while True:
                logits = torch.randn(2, vocab_size)
                position = torch.tensor([3 + len(output)] * 2)
                changed = batch.apply(logits, position)
                assert torch.equal(changed[0], logits[0])  # a row without rules
                shown = set(changed[1].isfinite().nonzero()[:, 0].tolist())
                text = "".join(texts[i] for i in output)
                allowed = allowed_by(choices, text, texts, set(ends))
                if is_forced(choices, text) and allowed:
                    assert shown
                    assert shown <= allowed, text
                else:
                    assert shown == allowed, text
                assert batch.completed == [1] * (not shown)
                if not shown or (text in choices and rng.random() < 0.3):
                    break
                output.append(rng.choice(sorted(shown)))
                if output[-1] in ends:
                    break
                batch.append(torch.tensor([0, output[-1]]), lambda o=output: [0, o[-1]])


def test_tokens_that_the_model_does_not_have(larger_tokenizer: Path) -> None:
    """What the tokenizer has as one token is spelled by shorter ones; others are refused."""
    options = dict(dtype="float32", device="cpu", num_kv_cache_blocks=64)
    llm = LLM(tokenizer=str(larger_tokenizer), **options)
    fields = dict(structured_outputs=StructuredOutputsParams(choice=["zebra!"]))
    questions = ["What is 12 + 30?\n"] * 2
    params = [SamplingParams(temperature=0, **more) for more in (fields, {})]
    outputs = llm.generate(questions, params, use_tqdm=False)
    assert [output["text"] for output in outputs] == ["zebra!", "12 + 30 = 42"]
    beam = llm.beam_search(questions[0], BeamSearchParams(2, 20, **fields), use_tqdm=False)[0]
    assert beam.sequences[0].text == questions[0] + "zebra!"
    unknown = StructuredOutputsParams(grammar='start: "a" <|more|>')
    with pytest.raises(ValueError, match=r"unknown special token: \"<\|more\|>"):
        llm.generate("x", SamplingParams(structured_outputs=unknown), use_tqdm=False)


def test_a_grammar_overrules_a_logits_processor(embedded: LLM) -> None:
    """+inf makes a token certain, which the grammar hides: both are named."""
    seven = embedded.get_tokenizer().encode("7")[0]

    def certain(output_ids, logits):
        logits[seven] = float("inf")

    params = structured("choice", logits_processors=[certain])
    with pytest.raises(GenerationError, match="structured_outputs and logits_processors hid every"):
        embedded.generate("x", params, use_tqdm=False)


def test_no_token_is_left(each_way: LLM) -> None:
    three = each_way.get_tokenizer().encode("3")
    for fields, names in (
        (dict(allowed_token_ids=three), "structured_outputs and allowed_token_ids hid"),
        (dict(bad_words=["y", "n"], n=2), "structured_outputs and bad_words hid"),
    ):
        params = SamplingParams(
            temperature=0,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
            **fields,
        )
        plain = SamplingParams(temperature=0)
        with pytest.raises(GenerationError, match=names) as caught:
            each_way.generate(["What is 12 + 30?\n"] * 2, [params, plain], use_tqdm=False)
        bad, good = caught.value.outputs
        assert {sample.finish_reason for sample in bad.outputs} == {"error"}
        assert good["text"] == "12 + 30 = 42"
    assert not each_way.engine.has_unfinished_requests()


# ---- the end ----


@pytest.mark.parametrize(
    "hiding",
    [
        dict(min_tokens=30),
        dict(min_tokens=30, ignore_eos=True, stop_token_ids=[3]),
        dict(allowed_token_ids=range(1000)),  # without an end-of-sequence token
        dict(bad_words=["<|im_end|>", "<|endoftext|>"]),
    ],
    ids=str,
)
def test_a_complete_grammar_ends_an_output_whose_end_tokens_are_hidden(
    each_way: LLM, hiding: dict
) -> None:
    fives = StructuredOutputsParams(regex="[0-9]{5}")
    params = SamplingParams(structured_outputs=fives, n=3, seed=1, logprobs=0, **hiding)
    plain = SamplingParams(temperature=0)
    out, other = each_way.generate(["What is 12 + 30?\n"] * 2, [params, plain], use_tqdm=False)
    for sample in out.outputs:
        assert re.fullmatch("[0-9]{5}", sample.text)
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
        assert len(sample.logprobs) == len(sample.token_ids)
    assert other["text"] == "12 + 30 = 42"


def test_min_tokens_holds_while_a_grammar_can_continue(embedded: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{2,40}")
    params = SamplingParams(structured_outputs=digits, min_tokens=12, temperature=0.5, seed=1, n=4)
    for sample in embedded.generate("What is 3 + 4?\n", params, use_tqdm=False)[0].outputs:
        assert len(sample.token_ids) >= 12
        assert re.fullmatch("[0-9]{2,40}", sample.text)


def test_an_output_ends_with_its_grammar(each_way: LLM) -> None:
    """By an end token if there is one; if not, as soon as nothing can follow."""
    comma = each_way.get_tokenizer().encode(",")[0]
    for fields, end in (
        (dict(), each_way.engine.input_processor.eos_token_ids),
        (dict(ignore_eos=True, stop_token_ids=[comma]), [comma]),
        (dict(ignore_eos=True), []),
    ):
        params = SamplingParams(
            temperature=0.9,
            seed=4,
            n=3,
            structured_outputs=StructuredOutputsParams(regex="[0-9]{5}"),
            logprobs=1,
            **fields,
        )
        out = each_way.generate("Count from 1 to 9\n", params, use_tqdm=False)[0]
        texts = ["", "", ""]
        for new in each_way.stream("Count from 1 to 9\n", params):
            texts[new.index] += new.text
            last = new
        assert (last.finish_reason, last.stop_reason) == ("stop", comma if end == [comma] else None)
        for sample, text in zip(out.outputs, texts, strict=True):
            assert re.fullmatch("[0-9]{5}", sample.text), sample
            assert (sample.finish_reason, text) == ("stop", sample.text)
            assert len(sample.token_ids) == 5 + bool(end)
            assert set(sample.token_ids[5:]) <= set(end)
            assert len(sample.logprobs) == len(sample.token_ids)
    # It may end, and continues: there is no token that ends it.
    params = structured("words", temperature=0, ignore_eos=True, max_tokens=9)
    assert each_way.generate("x", params, use_tqdm=False)[0].outputs[0].finish_reason != "error"
    assert not each_way.engine.has_unfinished_requests()


# ---- refusals ----

# llguidance compiles them, and then outputs end where no token may follow.
PATTERNS = {"properties": {"x": {}}, "patternProperties": {"^a": {"type": "integer"}}}
REFUSED = [
    ({"json": PATTERNS}, "structured_outputs has patternProperties, which is not"),
    ({"grammar": f"start: %json {json.dumps(PATTERNS)}"}, "has patternProperties, which is not"),
    ({"json": {"type": "strnig"}}, "refuses the json of structured_outputs: Invalid type: strnig"),
    ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
    ({"regex": "a("}, "refuses the regex of .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: word"}, 'refuses the grammar of .*unknown name: "word"'),
    ({"grammar": "hello"}, "refuses the grammar of .*Expected ::="),
    ({"json": {"properties": {f"a{i}": {"type": "null"} for i in range(9999)}}}, "131072"),
    ({"choice": [f"choice {i}" for i in range(10**5)]}, "the limit is 131072"),
    ({"json": "{"}, "json='{' is not JSON: Expecting"),
    ({"json": {"a": {1}}}, "is not JSON: .*not JSON serializable"),
    ({"json": "[1]"}, "json must be a JSON schema"),
    ({"json": 3}, "json must be a JSON schema, .* not 3"),
    ({"choice": "ab"}, "choice must be a list of strings, not 'ab'"),
    ({"choice": ["a", 3]}, "choice must be a list of strings"),
    ({"choice": []}, "choice is empty"),
    (
        {"regex": "a*" * 20000},
        "the regex of structured_outputs has 40000 bytes; the limit is 16384",
    ),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_when_it_is_added(embedded: LLM, fields: dict, word: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    with pytest.raises((TypeError, ValueError), match=f"(?s){word}"):
        embedded.engine.add_request("x", params)
    assert not embedded.engine.has_unfinished_requests()


def test_a_schema_that_is_nested_deeply() -> None:
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"items": deep}
    for schema in (deep, '{"items":' * 20_000):
        with pytest.raises(ValueError, match="json is nested too deeply"):
            structured_module.source(StructuredOutputsParams(json=schema))


REFERENCES = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}}
GROUPS = [f"r{i}: " + "(" * 25 + f"r{i + 1}" + ")" * 25 for i in range(250)]
DEEP = {
    "references": {"json": {"$defs": REFERENCES, "$ref": "#/$defs/a0"}},
    "groups": {"grammar": "\n".join(["start: r0", *GROUPS, 'r250: "a"'])},
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_grammar_does_not_end_the_process(embedded: LLM, kind: str) -> None:
    """llguidance calls itself for each level, and a stack of 8 MB ends the process."""
    params = SamplingParams(
        temperature=0, max_tokens=3, structured_outputs=StructuredOutputsParams(**DEEP[kind])
    )
    before = threading.stack_size()
    [out] = embedded.generate("x", params, use_tqdm=False)
    assert len(out["token_ids"]) <= 3
    assert threading.stack_size() == before


def test_compilations_that_still_run_are_few(embedded: LLM, monkeypatch) -> None:
    """Nothing can stop them. Compiled grammars are used meanwhile, and others when they have ended."""
    inputs, go_on = embedded.engine.input_processor, threading.Event()
    compiler = inputs.grammars()
    real, calls = GrammarCompiler._call_with_limit, 0

    def slow(self: GrammarCompiler, function: Callable[[], Any], stack: int) -> Any:
        nonlocal calls
        calls += 1

        def wait() -> Any:
            go_on.wait(300)
            return function()

        return real(self, wait, stack)

    def add(regex: str) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        inputs.make_task(inputs, params)

    add("before")
    monkeypatch.setattr(GrammarCompiler, "_call_with_limit", slow)
    monkeypatch.setattr(structured_module, "MAX_SECONDS", 0)
    for i in range(4):
        with pytest.raises(
            ValueError, match="more than 0 seconds" + ", or that Ctrl-C left, are" * (i > 1)
        ):
            add(f"slow {i}")
    assert calls == 2
    add("before")
    go_on.set()
    for thread in compiler.abandoned:
        thread.join(100)
    monkeypatch.undo()
    add("after")


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ["<tool_call>x"]},
        {"choice": ["<|im_end|>x"]},
        {"regex": r"<tool_call>x"},
        {"regex": re.escape("<|im_end|>x")},
        {"json": {"const": "<tool_call>x"}},
        {"grammar": 'start: "<tool_call>" /x/'},
        {"grammar": 'root ::= "<tool_call>x"'},
    ],
)
def test_the_text_of_an_added_token(embedded: LLM, fields: dict[str, Any]) -> None:
    """It matches other tokens. The added token, which would end some outputs, has no text."""
    outputs = StructuredOutputsParams(**fields)
    params = SamplingParams(temperature=0, structured_outputs=outputs, skip_special_tokens=False)
    text = embedded.generate("x", params, use_tqdm=False)[0].outputs[0].text
    assert text.strip('"') in ("<tool_call>x", "<|im_end|>x")


def test_a_choice_of_many_strings(embedded: LLM) -> None:
    """llguidance refuses a position at which more than 2,000 rules begin."""
    choice = [f"choice {i}" for i in range(5000)]
    structured_outputs = StructuredOutputsParams(choice=choice)
    params = SamplingParams(temperature=0, structured_outputs=structured_outputs)
    assert embedded.generate("x", params, use_tqdm=False)[0]["text"] in choice


def test_without_the_library(embedded: LLM, monkeypatch) -> None:
    compiler = embedded.engine.input_processor.grammars()
    monkeypatch.delitem(vars(compiler), "vocabulary", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[structured\]'"):
        embedded.generate("x", structured("date"), use_tqdm=False)
    assert embedded.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_limit_of_the_library(each_way: LLM, monkeypatch) -> None:
    """It ends its own request, and the call raises its reason when the others have ended."""
    mask = Matcher.mask

    def limited(self: Matcher, output: list[int]) -> bytes | None:
        if len(output) == 4:
            self.state.consume_token(0)  # which the grammar does not allow
        return mask(self, output)

    monkeypatch.setattr(Matcher, "mask", limited)
    prompts = ["x", "What is 12 + 30?\n"]
    params = [structured("words", n=2, temperature=0), SamplingParams(temperature=0)]
    words = (
        r"for prompts\[0\] .*: llguidance cannot continue the output after 4 tokens with the gram"
    )
    with pytest.raises(GenerationError, match=words) as caught:
        each_way.generate(prompts, params, use_tqdm=False)
    failed, plain = caught.value.outputs
    assert [len(sample.token_ids) for sample in failed.outputs] == [4, 4]
    assert {sample.finish_reason for sample in failed.outputs} == {"error"}
    assert plain["text"] == "12 + 30 = 42"
    ends = {new.request_index: new.finish_reason for new in each_way.stream(prompts, params)}
    assert ends == {0: "error", 1: "stop"}
    beams = BeamSearchParams(
        beam_width=2, max_tokens=9, structured_outputs=params[0].structured_outputs
    )
    with pytest.raises(GrammarError, match="cannot continue the output"):
        each_way.beam_search("x", beams, use_tqdm=False)


# ---- what it costs ----


def test_other_requests_pay_nothing(embedded: LLM, monkeypatch) -> None:
    """No rules, no vocabulary and no waits for a batch without structured outputs."""
    compiler = GrammarCompiler(embedded.get_tokenizer(), 1056, frozenset({1035}))
    monkeypatch.setattr(embedded.engine.input_processor, "grammars", lambda: compiler)
    monkeypatch.setattr(RulesBatch, "_apply_on_host", None)
    params = SamplingParams(temperature=0, repetition_penalty=1.1)
    embedded.generate("What is 12 + 30?\n", params, use_tqdm=False)
    assert "vocabulary" not in vars(compiler)
    inputs = embedded.engine.input_processor
    assert inputs.make_task(inputs, SamplingParams()).rules is None


def test_requests_share_a_compiled_grammar(embedded: LLM) -> None:
    compiler = GrammarCompiler(embedded.get_tokenizer(), 1056, frozenset({1035}))
    grammars: list[Grammar] = [
        compiler.compile(StructuredOutputsParams(regex=f"a{{{i % 70}}}"), [1035]) for i in range(71)
    ]
    assert compiler.compiled.cache_info().currsize == 64
    assert grammars[0].start is not grammars[70].start  # the oldest was dropped
    again = compiler.compile(StructuredOutputsParams(regex="a{69}"), [1033])
    assert again.start is grammars[69].start
    assert again.end_tokens == (1033,)
