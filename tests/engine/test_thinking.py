"""Thinking: budgets and the separation of the text, against their definitions on tokens and texts."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_llm
from scripted import run_bodies, script

from nanovllm import LLM, GenerationError, SamplingParams, StructuredOutputsParams
from nanovllm.cli.jobs.openai_format import CHAT, COMPLETIONS, parse
from nanovllm.engine.thinking import END, START, Splitter, opened
from nanovllm.loading.checkpoint import find_checkpoint

OPEN, CLOSED = "What is 2 + 3?\n<think>\n", "What is 2 + 3?\n<think>\n\n</think>\n\n"
PROMPTS = ["What is 2 + 3?\n", OPEN, CLOSED, "<think>a</think>b<think>So 2 + 3"]


@pytest.fixture(scope="session")
def thinker() -> LLM:
    return LLM(reasoning_parser="qwen3", device="cpu", dtype="float32", num_kv_cache_blocks=256)


@pytest.fixture(scope="session")
def spelled(tmp_path_factory) -> LLM:
    """The embedded model with a tokenizer in which each marker is several tokens."""
    path = tmp_path_factory.mktemp("spelled") / "model"
    shutil.copytree(find_checkpoint("qwen3-nano"), path)
    rules = json.loads((path / "tokenizer.json").read_text())
    names = "think", "tool_call"
    rules["added_tokens"] = [
        t for t in rules["added_tokens"] if not any(name in t["content"] for name in names)
    ]
    (path / "tokenizer.json").write_text(json.dumps(rules))
    with (path / "chat_template.jinja").open("a") as template:
        template.write("{# <think></think> #}")
    return LLM(str(path), reasoning_parser="deepseek_r1", device="cpu", dtype="float32")


def separated(text: str, is_open: bool) -> tuple[str | None, str]:
    """The thinking and the answer of a whole text, by the definition."""
    begun = re.match(r"\s*<think>", text)
    if not begun and not is_open:
        return None, text
    text = text[begun.end() if begun else 0 :]
    thought, end, answer = text.partition(END)
    if not end and (call := re.search(r"<tool_call>\s*([{\[<]|$)", text)):
        return text[: call.start()], text[call.start() :]
    return thought, answer


def texts(rng: random.Random) -> str:
    parts = [START, END, "a", " ", "\n", "<", "</", "think", ">", "</thin", "Hm", "<tool_call>{"]
    parts += ["<tool_call>", "<tool_", "call>"]
    return "".join(rng.choices(parts, k=rng.randrange(9)))


def test_pieces_of_a_text_equal_the_whole() -> None:
    rng = random.Random(0)
    thinking = 0
    for _ in range(4000):
        text, is_open = texts(rng), rng.random() < 0.5
        wanted = separated(text, is_open)
        splitter, cuts = Splitter(is_open), sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        new = [splitter.add(piece, i == 4) for i, piece in enumerate(pieces)]
        got = tuple("".join(part) for part in zip(*new, strict=True))
        assert got == (wanted[0] or "", wanted[1]), (text, is_open)
        assert splitter.has_thought == (wanted[0] is not None)
        thinking += bool(wanted[0]) and bool(wanted[1])
    assert thinking > 300


def test_no_text_is_held_back_longer_than_needed() -> None:
    splitter = Splitter(is_open=True)
    assert [splitter.add(piece) for piece in ("So", " 5 <", "6 </th", "ink>\n", "5")] == [
        *[("So", ""), (" 5 ", ""), ("<6 ", ""), ("", "\n"), ("", "5")]
    ]


TURNS = "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n{0}<|im_end|>\n"
TURNS += "<|im_start|>user\n<tool_response>{0}</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("quoted", ["What is <think>?", "<think>", "</think>", "<tool_call>{"])
@pytest.mark.parametrize(
    ("begun", "wanted"),
    [
        *[("", None), ("<think>\n", "\n"), ("<think>\nSo 2", "\nSo 2"), (CLOSED[15:], None)],
        *[("The <think>", None), ("<think>\n<tool_call>\n{", None)],
    ],
)
def test_a_quotation_opens_no_thinking(
    thinker: LLM, spelled: LLM, quoted: str, begun: str, wanted: str | None
) -> None:
    """Only what the last turn begins with does."""
    for llm in (thinker, spelled):
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.encode(TURNS.format(quoted) + begun)
        assert opened(tokenizer, prompt) == wanted
        assert opened(tokenizer, prompt[: -len(tokenizer.encode("assistant\n" + begun))]) is None


def test_a_call_ends_the_thinking(thinker: LLM, spelled: LLM) -> None:
    """No budget writes into it. A marker in a sentence is not a call."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    for llm in (thinker, spelled):
        encode = llm.get_tokenizer().encode
        said = encode("So I add\n" + call)
        thought = len(encode("So I add\n"))
        for budget in (None, thought + 2 + (llm is spelled), 100):
            params = SamplingParams(max_tokens=len(said), thinking_token_budget=budget)
            params.logits_processors = [script(said)]
            sample = llm.generate(OPEN, params, use_tqdm=False)[0].outputs[0]
            assert sample.token_ids == said
            assert (sample.reasoning, sample.text) == ("So I add\n", call)
        said = encode("The <tool_call> tag is 2 and 3 and 2")
        params = SamplingParams(max_tokens=len(said), thinking_token_budget=thought + 3)
        params.logits_processors = [script(said)]
        sample = llm.generate(OPEN, params, use_tqdm=False)[0].outputs[0]
        assert sample.reasoning.startswith("The <tool_call> tag")
        assert sample.text


def test_markers_that_are_special_tokens(tmp_path) -> None:
    """The parsers see them, and texts have none of them."""
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path / "model")
    rules = (tmp_path / "model" / "tokenizer.json").read_text()
    (tmp_path / "model" / "tokenizer.json").write_text(
        rules.replace('"special": false', '"special": true')
    )
    llm = LLM(str(tmp_path / "model"), reasoning_parser="qwen3", device="cpu", dtype="float32")
    text = 'Yes. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call></think>'
    said = llm.get_tokenizer().encode("<think>So <think></think>" + text)
    fields = dict(max_tokens=len(said), ignore_eos=True, logits_processors=[script(said)])
    for skips, stop in ((False, None), (True, None), (True, ["never said"])):
        params = SamplingParams(skip_special_tokens=skips, stop=stop, **fields)
        whole = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
        parts = list(llm.stream("a", params))
        wanted = "So <think>", text
        wanted = tuple(re.sub("<.*?>", "", part) for part in wanted) if skips else wanted
        assert (whole.reasoning, whole.text) == wanted
        assert (
            tuple("".join(getattr(part, name) for part in parts) for name in ("reasoning", "text"))
            == wanted
        )
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    for choice, content in (("auto", "Yes."), ("none", re.sub("<.*?>", "", text))):
        job = parse(llm, CHAT, body | {"tool_choice": choice}, "model")
        requests = replace(job, params=SamplingParams(**fields)).submit(llm)
        while not requests[0].ended:
            llm.engine.run_step()
        message = job.response("b", requests)["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("So ", content)
        assert len(message.get("tool_calls", [])) == (choice == "auto")


def counted(llm: LLM, prompt: str, said: list[int], limit: int) -> list[int]:
    """What is said of `said` with a budget, by its definition on tokens that are whole markers."""
    start, end = (llm.get_tokenizer().convert_tokens_to_ids(marker) for marker in (START, END))
    ids = llm.get_tokenizer().encode(prompt)
    at = [i for i, token in enumerate(ids) if token in (start, end)]
    inside = bool(at) and ids[at[-1]] == start
    thought = len(ids) - at[-1] - 1 if inside else 0
    output: list[int] = []
    for token in said:
        output.append(end if inside and thought >= limit else token)
        thought += inside
        begins = not llm.get_tokenizer().decode(output[:-1]).strip()
        inside = (inside or (begins and output[-1] == start)) and output[-1] != end
        if end in output:
            inside = False
    return output


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_budget_ends_the_thinking(thinker: LLM, prompt: str) -> None:
    """Whatever the model says, the output is what the definition makes of it."""
    tokenizer, rng = thinker.get_tokenizer(), random.Random(prompt)
    start, end = (tokenizer.convert_tokens_to_ids(marker) for marker in (START, END))
    newline, *words = tokenizer.encode("\n So we add 2 and 3, 5")
    params, wanted, num_forced = [], [], 0
    for _ in range(40):
        said = rng.choice([[], [start], [newline, start], [newline]])
        said += rng.choices([*words, newline, end, start], [3] * len(words) + [3, 1, 1], k=12)
        limit = rng.choice([0, 1, 2, 3, 5, 8, 100])
        params.append(
            SamplingParams(
                max_tokens=len(said),
                ignore_eos=True,
                logits_processors=[script(said)],
                thinking_token_budget=limit,
            )
        )
        wanted.append(counted(thinker, prompt, said, limit))
        num_forced += wanted[-1] != said
    outputs = thinker.generate([prompt] * len(params), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert num_forced > 5
    for output, ids in zip(outputs, wanted, strict=True):
        reasoning, text = separated(tokenizer.decode(ids), prompt in (OPEN, PROMPTS[3]))
        assert (output.outputs[0].reasoning, output.outputs[0].text) == (reasoning, text)


def samples(llm: LLM, prompts: list[str], **fields: Any) -> list[list[Any]]:
    settings = dict(n=3, temperature=1.3, seed=5, max_tokens=24, ignore_eos=True)
    params = SamplingParams(**(settings | fields))
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def test_samples_do_not_depend_on_the_engine(thinker: LLM) -> None:
    """Forks, preemptions, asynchronous steps, drafts and prefix hits change no thinking."""
    fields = dict(thinking_token_budget=6, stop=["7"])
    prompts = ["word " * 20 + prompt for prompt in PROMPTS]
    wanted = samples(thinker, prompts, **fields)
    assert samples(thinker, prompts, **fields) == wanted  # from the prefix cache
    flat = [sample for output in wanted for sample in output]
    assert any(sample.reasoning and sample.text for sample in flat)
    assert {sample.finish_reason for sample in flat} == {"stop", "length"}
    options: list[dict[str, Any]] = [
        dict(num_kv_cache_blocks=9, max_num_batched_tokens=16, max_model_len=128),
        dict(async_scheduling=True, max_num_seqs=3),
        dict(speculative_config={"prompt_lookup_min": 1}),
    ]
    for more in options:
        settings = dict(reasoning_parser="qwen3", device="cpu", dtype="float32") | more
        other = LLM(**settings)
        assert samples(other, prompts, **fields) == wanted, more
        if "num_kv_cache_blocks" in more:
            assert other.stats()["preemptions"] > 0


def test_markers_of_several_tokens(spelled: LLM) -> None:
    """Also if a token has a part of a marker and more, such as '>' with the newline after it."""
    encode = spelled.get_tokenizer().encode
    assert min(len(encode(marker)) for marker in (START, END)) > 1
    said = encode("<think>\nSo we add 2 and 3</think>\n5 </think>")
    params = SamplingParams(max_tokens=len(said), ignore_eos=True, logits_processors=[script(said)])
    for limit in (None, 100, len(said)):
        params.thinking_token_budget = limit
        sample = spelled.generate("Hi\n", params, use_tqdm=False)[0].outputs[0]
        assert (sample.reasoning, sample.text) == ("\nSo we add 2 and 3", "\n5 </think>")
    params.thinking_token_budget = 4
    sample = spelled.generate("Hi\n", params, use_tqdm=False)[0].outputs[0]
    first = len(encode(START)) + 4
    forced = encode(END)
    assert sample.token_ids == [*said[:first], *forced, *said[first + len(forced) :]]
    assert spelled.get_tokenizer().decode(said[len(encode(START)) : first]) == sample.reasoning


def test_no_text_no_thinking(thinker: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False, thinking_token_budget=2)
    sample = thinker.generate(OPEN, params, use_tqdm=False)[0].outputs[0]
    assert (sample.reasoning, sample.text) == (None, "")
    assert thinker.get_tokenizer().convert_tokens_to_ids(END) == sample.token_ids[1]


def test_what_is_refused(path: Path, embedded: LLM) -> None:
    tokens_only = random_llm(path)
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of qwen3, deepseek_r1"):
        LLM(reasoning_parser="gpt")
    with pytest.raises(ValueError, match=r"reasoning_parser='qwen3' needs a tokenizer"):
        random_llm(path, reasoning_parser="qwen3")
    for value, error in ((-2, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"thinking_token_budget must be"):
            SamplingParams(thinking_token_budget=value)
    with pytest.raises(ValueError, match=r"thinking_token_budget needs a tokenizer"):
        tokens_only.generate([[1, 2]], SamplingParams(thinking_token_budget=3), use_tqdm=False)
    assert SamplingParams(thinking_token_budget=-1).clone().thinking_token_budget == -1


def test_a_model_without_markers(spelled: LLM, tmp_path) -> None:
    source = Path(spelled.engine.checkpoint.directory)
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match=r"reasoning_parser='qwen3' needs a model that thinks"):
        LLM(str(tmp_path / "model"), reasoning_parser="qwen3")
    llm = LLM(str(tmp_path / "model"), device="cpu", dtype="float32")
    with pytest.raises(ValueError, match=r"thinking_token_budget needs a model .* has <think>"):
        llm.generate("a", SamplingParams(thinking_token_budget=3), use_tqdm=False)


def test_a_file_of_requests(thinker: LLM, tmp_path) -> None:
    """The text of a completion is whole, as in vLLM, and so are the offsets of its tokens."""
    chat = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    thinks = {"logit_bias": {"1036": 100}, "thinking_token_budget": 2}
    completion = thinks | {"prompt": "What is 2 + 3?\n", "max_tokens": 8, "logprobs": 0}
    bodies = [(CHAT, chat | thinks), (CHAT, chat), (COMPLETIONS, completion)]
    results = run_bodies(thinker, tmp_path, bodies)
    choices = [result["response"]["body"]["choices"][0] for result in results]
    messages = [choice["message"] for choice in choices[:2]]
    assert messages[0]["reasoning"] == "<think><think>"
    assert messages[0]["content"].startswith("<think>")
    assert "reasoning" not in messages[1]
    assert messages[1]["content"] == "2 + 3 = 5"
    text, shown = choices[2]["text"], choices[2]["logprobs"]
    assert text.startswith("<think><think><think></think><think>")
    for token, start in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert text[start:].startswith(token)


@pytest.mark.extra
def test_a_grammar_is_of_the_answer(thinker: LLM) -> None:
    """The model may think before it, also within a budget, and after a preemption."""
    pytest.importorskip("llguidance")
    grammar = StructuredOutputsParams(regex="(ab|c){2,9}d")
    start = thinker.get_tokenizer().convert_tokens_to_ids(START)
    tight = LLM(
        reasoning_parser="qwen3",
        device="cpu",
        dtype="float32",
        **dict(num_kv_cache_blocks=9, max_model_len=128, max_num_batched_tokens=16),
    )
    for limit in (None, 0, 5):
        fields = dict(temperature=1.0, n=4, seed=3, max_tokens=40, logit_bias={start: 6})
        params = SamplingParams(structured_outputs=grammar, thinking_token_budget=limit, **fields)
        outputs = [
            [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            for llm in (thinker, tight)
        ]
        assert outputs[0] == outputs[1]
        flat = [sample for samples in outputs[0] for sample in samples]
        for sample in flat:
            if sample.finish_reason == "stop":  # an end-of-sequence token does not end the thinking
                assert re.fullmatch("(ab|c){2,9}d", sample.text)
            else:
                assert sample.finish_reason == "length"
        closed = outputs[0][PROMPTS.index(CLOSED)]
        assert [sample.reasoning for sample in closed] == [None] * 4
        done = [sample for sample in flat if sample.text]
        assert {sample.reasoning is None for sample in done} >= {True, limit is None}
    assert tight.stats()["preemptions"] > 0


@pytest.mark.extra
def test_a_grammar_forbids_the_end_in_the_thinking_and_a_second_thinking(thinker: LLM) -> None:
    pytest.importorskip("llguidance")
    start, end = (thinker.get_tokenizer().convert_tokens_to_ids(marker) for marker in (START, END))
    eos = thinker.get_tokenizer().eos_token_id
    fields = dict(temperature=0, max_tokens=30, logit_bias={eos: 60, end: 50, start: 40})
    grammar = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(structured_outputs=grammar, **fields)
    outputs = [
        output.outputs[0] for output in thinker.generate(PROMPTS[:3], params, use_tqdm=False)
    ]
    assert [bool(output.reasoning is None) for output in outputs] == [False, False, True]
    assert all(output.text in ("yes", "no") for output in outputs)
    with pytest.raises(ValueError, match=r"thinking_token_budget=3 .* reasoning_parser"):
        params.thinking_token_budget = 3
        LLM(device="cpu", num_kv_cache_blocks=64).generate(OPEN, params, use_tqdm=False)


@pytest.mark.extra
def test_a_token_that_ends_the_thinking_and_goes_on(tmp_path) -> None:
    """The grammar reads the rest of its text, and forbids the token if it forbids the rest."""
    pytest.importorskip("llguidance")
    path = Path(shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path / "model"))
    rules = (path / "tokenizer.json").read_text().replace(f'"{END}"', f'"{END}ab"')
    (path / "tokenizer.json").write_text(rules)
    with (path / "chat_template.jinja").open("a") as template:
        template.write("{# </think> #}")
    llm = LLM(str(path), reasoning_parser="qwen3", device="cpu", dtype="float32")
    said = llm.get_tokenizer().encode("So</think>abbd<|im_end|>")
    params = SamplingParams(max_tokens=9, logits_processors=[script(said)])
    params.structured_outputs = StructuredOutputsParams(regex="ab+d")
    assert llm.generate(OPEN, params, use_tqdm=False)[0].outputs[0].text == "abbd"
    params.structured_outputs = StructuredOutputsParams(regex="b+d")
    with pytest.raises(GenerationError) as error:
        llm.generate(OPEN, params, use_tqdm=False)
    assert error.value.outputs[0].outputs[0].token_ids == said[:1]
