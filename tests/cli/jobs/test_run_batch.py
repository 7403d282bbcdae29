"""Files of requests: results are the library's, wrong lines stop nothing, a stop loses nothing."""

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fresh
import numpy as np
import pytest
from engines import until

from nanovllm import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from nanovllm.cli.jobs.openai_format import CHAT, COMPLETIONS, EMBEDDINGS, parse
from nanovllm.cli.jobs.run_batch import BatchFiles, main, make_result, only_writer, run_batch

NAME = "qwen3-nano"


def line(custom_id: Any, url: Any, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def ask(question: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], **body}


def save(path: Path, lines: list[Any]) -> Path:
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def run(llm: LLM, source: Path, target: Path, trust_chat_templates: bool = False) -> int:
    files = BatchFiles(source, target)
    num_errors = len(files.errors())
    run_batch(llm, files, NAME, trust_chat_templates)
    assert len(files.done) == files.num_requests
    assert not llm.engine.has_unfinished_requests()
    return len(files.errors()) - num_errors


def results(target: Path) -> dict[str, dict[str, Any]]:
    """The results by custom_id. Every line is complete, and none is there twice."""
    text = target.read_bytes() if target.exists() else b""  # removed after an early error
    assert text.endswith(b"\n") or not text
    read = [json.loads(one) for one in text.splitlines()]
    assert len({one["id"] for one in read}) == len(read)
    by_id = {one["custom_id"]: one for one in read}
    assert len(by_id) == len(read)
    return by_id


def body(result: dict[str, Any]) -> dict[str, Any]:
    assert result["error"] is None, result
    assert result["response"]["status_code"] == 200
    return result["response"]["body"]


def few(count: int = 6) -> list[dict[str, Any]]:
    """Requests whose results are short, and one wrong line."""
    lines = [
        line(f"q{i}", CHAT, **ask(f"What is {10 + i} + 30?", max_tokens=9)) for i in range(count)
    ]
    return [*lines, line("wrong", CHAT)]


# ---- results ----


def test_results_equal_the_library(embedded: LLM, tmp_path) -> None:
    prompts = ["Spell garden\n", "What is 12 + 30?\n"]
    sampled = {"n": 2, "seed": 5, "temperature": 1.5, "max_tokens": 8, "top_k": 20}
    lines = [
        line("chat", CHAT, model=NAME, user="me", stop=None, **ask("Sort 42, 7, 99")),
        line("top", CHAT, **ask("Spell garden", logprobs=True, top_logprobs=3, max_tokens=4)),
        line("many", COMPLETIONS, prompt=prompts, logprobs=2, prompt_logprobs=0, **sampled),
        line("ids", COMPLETIONS, prompt=embedded.get_tokenizer().encode(prompts[0])),
        b"",
        line("embed", EMBEDDINGS, input=prompts, dimensions=8),
        line("base64", EMBEDDINGS, input=prompts[0], encoding_format="base64"),
    ]
    target = tmp_path / "out.jsonl"
    assert run(embedded, save(tmp_path / "in.jsonl", lines), target) == 0
    got = {custom_id: body(result) for custom_id, result in results(target).items()}
    assert len(got) == 6

    [want] = embedded.chat(lines[0]["body"]["messages"], use_tqdm=False)
    [choice] = got["chat"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": want["text"], "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    prompt, new = len(want.prompt_token_ids), len(want["token_ids"])
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    assert got["chat"]["usage"] == usage
    assert got["chat"]["model"] == NAME

    params = SamplingParams(temperature=0, logprobs=3, max_tokens=4)
    [want] = embedded.chat(lines[1]["body"]["messages"], params, use_tqdm=False)
    [choice] = got["top"]["choices"]
    assert choice["finish_reason"] == "length"
    for shown, entry in zip(choice["logprobs"]["content"], want.outputs[0].logprobs, strict=True):
        sampled_entry = next(iter(entry.values()))
        assert shown["token"] == sampled_entry.decoded_token
        assert shown["bytes"] == list(shown["token"].encode())
        assert shown["logprob"] == sampled_entry.logprob
        best = sorted(entry.values(), key=lambda e: e.rank)[:3]
        assert [t["token"] for t in shown["top_logprobs"]] == [e.decoded_token for e in best]

    params = SamplingParams(**sampled, logprobs=2, prompt_logprobs=0)
    want_many = embedded.generate(prompts, params, use_tqdm=False)
    samples = [sample for out in want_many for sample in out.outputs]
    assert [c["index"] for c in got["many"]["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in got["many"]["choices"]] == [sample.text for sample in samples]
    for choice, sample in zip(got["many"]["choices"], samples, strict=True):
        shown = choice["logprobs"]
        entries = [next(iter(e.values())) for e in sample.logprobs]
        assert shown["tokens"] == [e.decoded_token for e in entries]
        assert shown["token_logprobs"] == [e.logprob for e in entries]
        assert shown["text_offset"] == [
            len("".join(shown["tokens"][:i])) for i in range(len(entries))
        ]
        assert [len(top) for top in shown["top_logprobs"]] == [len(e) for e in sample.logprobs]
    with_prompt = [c for c in got["many"]["choices"] if "prompt_logprobs" in c]
    assert [c["index"] for c in with_prompt] == [0, 2]
    for choice, out in zip(with_prompt, want_many, strict=True):
        shown_ids = [int(t) for entry in choice["prompt_logprobs"][1:] for t in entry]
        assert choice["prompt_logprobs"][0] is None
        assert shown_ids == out.prompt_token_ids[1:]
    [want] = embedded.generate(prompts[0], SamplingParams(temperature=0, max_tokens=16), False)
    assert got["ids"]["choices"][0]["text"] == want["text"]

    vectors = [d["embedding"] for d in got["embed"]["data"]]
    want_vectors = embedded.embed(prompts, dimensions=8, use_tqdm=False)
    for vector, want_vector in zip(vectors, want_vectors, strict=True):
        assert vector == want_vector.outputs.embedding
    raw = np.frombuffer(base64.b64decode(got["base64"]["data"][0]["embedding"]), "<f4")
    [want] = embedded.embed(prompts[0], use_tqdm=False)
    assert np.array_equal(raw, np.float32(want.outputs.embedding))


def test_fields_become_parameters(embedded: LLM) -> None:
    same = dict(n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=["a", "b"])
    same |= dict(presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.2)
    same |= dict(stop_token_ids=[5], min_tokens=2, ignore_eos=True, bad_words=["bad"])
    same |= dict(include_stop_str_in_output=True, skip_special_tokens=False)
    same |= dict(allowed_token_ids=[1, 2, 5], prompt_logprobs=1)
    given = {
        **same,
        "logit_bias": {"5": -3, "7": 1.5},
        "max_completion_tokens": 11,
        "max_tokens": 3,
    }
    given |= {"logprobs": True, "top_logprobs": 4, "structured_outputs": {"choice": ["a", "b"]}}
    want = SamplingParams(
        **same,
        logit_bias={5: -3, 7: 1.5},
        max_tokens=11,
        logprobs=4,
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )
    assert parse(embedded, CHAT, ask("Hi", **given), NAME).params == want

    defaults = embedded.get_default_sampling_params()
    defaults.max_tokens = None
    job = parse(embedded, CHAT, ask("Hi"), NAME)
    assert (job.params, job.model) == (defaults, NAME)
    defaults.max_tokens = 16
    assert parse(embedded, COMPLETIONS, {"prompt": "Hi"}, NAME).params == defaults
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for response_format, structured in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        (form, StructuredOutputsParams(json=schema)),
    ):
        job = parse(embedded, CHAT, ask("Hi", response_format=response_format), NAME)
        assert job.params.structured_outputs == structured
    fields = {"dimensions": 4, "normalize": False}
    job = parse(embedded, EMBEDDINGS, {"input": [[1, 2], [3]], **fields}, NAME)
    assert (job.params, job.prompts) == (PoolingParams(4, False), [[1, 2], [3]])

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    [prompt] = parse(embedded, CHAT, {"messages": messages, **more}, NAME).prompts
    assert prompt["prompt"].endswith("Well")
    more = {"add_generation_prompt": False, "chat_template": None}
    [prompt] = parse(embedded, CHAT, ask("Hi", chat_template_kwargs=more), NAME).prompts
    assert prompt["prompt"].endswith("Hi<|im_end|>\n")


@pytest.mark.extra
def test_results_have_the_types_of_openai(embedded: LLM, tmp_path) -> None:
    types = pytest.importorskip("openai.types")
    chat_types = pytest.importorskip("openai.types.chat")
    more = {"n": 2, "max_tokens": 2}
    lines = [
        line("chat", CHAT, **ask("Hi", logprobs=True, top_logprobs=1, **more)),
        line("text", COMPLETIONS, prompt=["Hi", "Ho"], logprobs=1, prompt_logprobs=1, **more),
        line("embed", EMBEDDINGS, input=["Hi", "Ho"]),
    ]
    target = tmp_path / "out.jsonl"
    assert run(embedded, save(tmp_path / "in.jsonl", lines), target) == 0
    got = {custom_id: body(result) for custom_id, result in results(target).items()}
    assert len(chat_types.ChatCompletion.model_validate(got["chat"], strict=True).choices) == 2
    assert len(types.Completion.model_validate(got["text"], strict=True).choices) == 4
    assert len(types.CreateEmbeddingResponse.model_validate(got["embed"], strict=True).data) == 2


# ---- wrong lines ----

WRONG: list[tuple[Any, str]] = [
    (b"nonsense", "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    (b"[" * 100_000, "recursion"),
    (b"[1, 2]", "must be an object"),
    ({"method": "POST", "url": CHAT, "body": ask("Hi")}, "custom_id must be a string, not None"),
    (line("x", "/v1/rank"), "url must be one of /v1/chat/completions"),
    ({**line("x", CHAT, **ask("Hi")), "method": "GET"}, "method must be one of POST, not 'GET'"),
    ({**line("x", CHAT), "method": 7}, "method must be a string, not 7"),
    ({**line("x", CHAT), "body": "Hi"}, "body must be an object, not 'Hi'"),
    (line("x", CHAT, model="gpt", **ask("Hi")), "model 'gpt' does not exist"),
    (line("x", CHAT), "messages must be a list"),
    (line("x", CHAT, **ask("Hi " * 20_000)), "max_model_len"),
    (line("x", CHAT, **ask("Hi", tempratur=1)), "did you mean 'temperature'"),
    (line("x", CHAT, **ask("Hi", stream=True)), "stream=True is not supported"),
    (line("x", CHAT, **ask("Hi", guided_json={})), f"unknown field of {CHAT} 'guided_json'"),
    (line("x", CHAT, **ask("Hi", detokenize=False)), f"unknown field of {CHAT} 'detokenize'"),
    (line("x", COMPLETIONS, prompt="Hi", logits_processors=[]), "'logits_processors'; known: all"),
    (line("x", CHAT, **ask("Hi", logprobs=True, top_logprobs=21)), "more than max_logprobs=20"),
    (line("x", CHAT, **ask("Hi", tools=[{"type": "function"}])), "tools[0] must have the form"),
    (line("x", CHAT, **ask("Hi", logprobs=3)), "logprobs must be True or False"),
    (line("x", CHAT, **ask("Hi", top_logprobs=3)), "needs logprobs=true"),
    (line("x", CHAT, **ask("Hi", logit_bias={"five": 1})), "a token id of logit_bias must be an"),
    (line("x", CHAT, **ask("Hi", response_format="json")), "response_format must be an object"),
    (line("x", CHAT, **ask("Hi", response_format={"type": "json_schema"})), "json_schema.schema"),
    (line("x", CHAT, **ask("Hi", chat_template_kwargs=[1])), "chat_template_kwargs must be an obj"),
    (line("x", CHAT, **ask("Hi", chat_template_kwargs={"tokenize": True})), "TypeError"),
    (line("x", COMPLETIONS), "prompt must be a string"),
    (line("x", COMPLETIONS, prompt=["good", ""]), "the prompt is empty"),
    (line("x", COMPLETIONS, prompt="Hi", echo=True), "echo=True is not supported"),
    (
        line("x", COMPLETIONS, prompt="Hi", messages=[]),
        f"unknown field of {COMPLETIONS} 'messages'",
    ),
    (line("x", EMBEDDINGS), "input must be a string"),
    (line("x", EMBEDDINGS, input="a", dimensions=10**6), "dimensions=1000000 is more"),
    (line("x", EMBEDDINGS, input="a", temperature=0), "known: dimensions, encoding_format, input,"),
]


def test_wrong_lines_stop_nothing(embedded: LLM, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(embedded.engine.scheduler, "max_num_seqs", 1)
    lines: list[Any] = []
    for i, (wrong, _) in enumerate(WRONG):
        if isinstance(wrong, dict) and wrong.get("custom_id") == "x":
            wrong = {**wrong, "custom_id": f"x{i}"}
        lines.append(wrong)
    lines.insert(20, line("good", CHAT, **ask("What is 12 + 30?")))
    source, target = save(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(embedded, source, target) == len(WRONG)
    read = [json.loads(text) for text in target.read_text().splitlines()]
    by_number = {int(one["id"].rpartition("-")[2]): one for one in read}
    assert sorted(by_number) == list(range(1, len(lines) + 1))
    good = by_number.pop(21)
    assert body(good)["choices"][0]["message"]["content"] == "12 + 30 = 42"
    for (wrong, message), number in zip(WRONG, sorted(by_number), strict=True):
        one = by_number[number]
        code = 500 if message == "recursion" else 400
        assert message in one["error"]["error"]["message"], (wrong, one)
        assert one["error"]["error"]["code"] == one["response"]["status_code"] == code, one
        assert one["response"]["body"] is None
        given = lines[number - 1]
        custom_id = given.get("custom_id") if isinstance(given, dict) else None
        assert one["custom_id"] == (custom_id if isinstance(custom_id, str) else None)


def test_chat_templates_of_lines(embedded: LLM, tmp_path) -> None:
    """A template may never end, so a line may have one only if the option says so."""
    template = "{{ messages[0].content }}"
    fields = [{"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}]
    lines = [line(f"x{i}", CHAT, **ask("Hi", **more)) for i, more in enumerate(fields)]
    source = save(tmp_path / "in.jsonl", lines)
    for trusted in (False, True):
        target = tmp_path / f"{trusted}.jsonl"
        failed = run(embedded, source, target, trusted)
        assert failed == (0 if trusted else 2)
        for one in results(target).values():
            assert trusted or "--trust-chat-templates" in one["error"]["error"]["message"]


def test_a_request_that_fails_while_it_runs(embedded: LLM, tmp_path) -> None:
    eos = sorted(embedded.engine.input_processor.eos_token_ids)
    hidden = ask("Hi", min_tokens=3, allowed_token_ids=eos)
    lines = [line("hidden", CHAT, **hidden), *few(2)]
    target = tmp_path / "out.jsonl"
    assert run(embedded, save(tmp_path / "in.jsonl", lines), target) == 2
    got = results(target)
    error = got["hidden"]["error"]["error"]
    assert error["code"] == 500
    assert "allowed_token_ids and min_tokens hid every token" in error["message"]
    assert body(got["q0"])["choices"][0]["message"]["content"]


# ---- going on ----


def finish(source: Path, target: Path) -> int:
    """Write the results that are missing. Returns how many were there."""
    files = BatchFiles(source, target)
    num_done = len(files.done)
    with target.open("ab") as output:
        for number, custom_id, _ in files.requests():
            if number not in files.done:
                result = make_result(number, custom_id, ValueError("wrong " * 9), [])
                output.write(json.dumps(result).encode() + b"\n")
                files.mark_done(result)
    assert len(files.done) == files.num_requests
    return num_done


def test_a_kill_after_every_byte(tmp_path) -> None:
    """A kill leaves a prefix of the output. From each, a start goes on to the same results."""
    source, target = save(tmp_path / "in.jsonl", few(2)), tmp_path / "out.jsonl"
    assert finish(source, target) == 0
    whole = target.read_bytes()
    for size in range(len(whole) + 1):
        target.write_bytes(whole[:size])
        assert finish(source, target) == whole[:size].count(b"\n")
        assert target.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has other signals")
def test_ctrl_c_and_kill_9(embedded: LLM, tmp_path, capsys) -> None:
    lines = [line(f"q{i}", CHAT, **ask(f"Count from {i + 1} to {i + 21}")) for i in range(30)]
    source, target = save(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["-i", str(source), "-o", str(target)]
    for option in ("max_num_seqs=1", "dtype=float32", "device=cpu"):
        arguments += ["--set", option]
    for number, done in ((signal.SIGINT, 2), (signal.SIGKILL, 6), (signal.SIGKILL, 12)):
        process = fresh.Process(fresh.module("nanovllm", "run-batch", *arguments))
        until(lambda least=done: target.exists() and target.read_bytes().count(b"\n") >= least)
        assert main(arguments) == 1
        assert f"process {process.process.pid} writes to {target}" in capsys.readouterr().err
        process.send_signal(number)
        ended = process.wait()
        if number == signal.SIGINT:
            assert ended.returncode == 130
            said = "interrupted: start the same command again to resume"
            assert ended.stderr.splitlines()[-1] == said
        assert target.read_bytes().count(b"\n") < 30
    run(embedded, source, target)
    got = results(target)
    assert sorted(got) == sorted(one["custom_id"] for one in lines)
    for i in range(30):
        want = ", ".join(map(str, range(i + 1, i + 22)))
        assert body(got[f"q{i}"])["choices"][0]["message"]["content"] == want


def test_errors_and_another_try(embedded: LLM, tmp_path, monkeypatch, capsys) -> None:
    """The status says whether a line has an error, also of an earlier run."""
    monkeypatch.setattr("nanovllm.cli.jobs.run_batch.LLM", lambda *_, **__: embedded)
    lines = [line("a", CHAT, model="other", **ask("What is 12 + 30?")), *few(2)]
    source, target = save(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["-i", str(source), "-o", str(target)]
    first = "the first error is of 'a': the model 'other' does not exist; the name is 'qwen3-nano'"
    for new in (2, 0):
        assert main(command) == 1
        shown = capsys.readouterr()
        assert f"4 results in {target}, 2 with an error ({new} new)" in shown.out
        assert f"{first}; --retry-errors computes" in shown.err
    assert main([*command, "--retry-errors", "--served-model-name", "other"]) == 1
    assert "4 results in" in (shown := capsys.readouterr()).out
    assert "1 with an error (1 new)" in shown.out
    assert "the first error is of 'wrong': messages must be" in shown.err
    got = results(target)
    assert body(got["a"])["choices"][0]["message"]["content"] == "12 + 30 = 42"
    save(source, lines[:3])
    text = "".join(json.dumps(got[name]) + "\n" for name in ("a", "q0", "q1"))
    target.write_text(text)
    assert main([*command, "--retry-errors"]) == 0
    assert capsys.readouterr().err == ""
    assert target.read_text() == text


# ---- one clear error ----


def test_files_that_cannot_be_used(tmp_path) -> None:
    source, target = save(tmp_path / "in.jsonl", few(2)), tmp_path / "out.jsonl"
    finish(source, target)
    whole = target.read_bytes()

    def refused(source: Path, target: Path, message: str) -> None:
        kept = target.read_bytes() if target.is_file() else None
        for retry_errors in (False, True):
            with pytest.raises((ValueError, OSError), match=message):
                BatchFiles(source, target, retry_errors)
        assert (target.read_bytes() if target.is_file() else None) == kept

    refused(tmp_path / "nothing.jsonl", target, "No such file")
    refused(source, tmp_path / "nowhere" / "out.jsonl", "No such file")
    refused(source, source, "run-batch did not write")
    refused(source, Path(os.devnull), "is not a regular file; name another output")
    for text in (b"notes", b"notes\n", b'{"id": "vllm-1"}\n', b"[]\n", whole + b"notes", b"\0" * 9):
        target.write_bytes(text)
        refused(source, target, "has a line that run-batch did not write: .*name another output")
    target.write_bytes(whole)
    save(source, few(2)[:2])
    refused(source, target, "the result of 'wrong' for line 3 of .*in.jsonl, which is another")
    save(source, few(3))  # with another line 3
    refused(source, target, "the result of 'wrong' for line 3 of .*in.jsonl, which is another")
    # As two processes without a lock leave it.
    save(source, few(2))
    target.write_bytes(whole * 2 + whole[:20])
    every = r"two results of each of 3 lines, such as batch-1 \('q0'\), batch-2 \('q1'\), batch-3"
    refused(source, target, every)


def test_one_process_writes(tmp_path, monkeypatch, capsys) -> None:
    source, target = save(tmp_path / "in.jsonl", few(2)), tmp_path / "out.jsonl"
    finish(source, target)
    whole = target.read_bytes()
    (tmp_path / "other.jsonl").symlink_to(target)
    refused = f"error: process {os.getpid()} writes to {target}; wait for it, or name another"
    for name in (target, tmp_path / "other.jsonl"):
        command = ["-i", str(source), "-o", str(name)]
        with only_writer(target):
            assert main([*command, "--retry-errors"]) == 1
            assert refused in capsys.readouterr().err
            assert target.read_bytes() == whole
        assert main(command) == 1  # because its results are errors
        assert "3 results" in capsys.readouterr().out
    # A permission that is missing, and a file system without locks.
    for error in (PermissionError("not permitted"), NotImplementedError("no flock")):
        monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=error))
        assert main(command) == 1
        shown = capsys.readouterr()
        assert "3 results" in shown.out
        assert f"lock cannot be locked ({error}); start no other run-batch" in shown.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "max_num_seq=1"], "did you mean 'max_num_seqs'"),
        (["--set", "dtype=float5"], "dtype must be one of"),
        (["--set", "tensor_parallel_size=2"], "one process writes the output; use 1"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options(tmp_path, capsys, more: list[str], message: str) -> None:
    """The same command would fail again, so the message does not propose it."""
    source, target = save(tmp_path / "in.jsonl", few()), tmp_path / "out.jsonl"
    assert main(["-i", str(source), "-o", str(target), *more]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "resume" not in error
    assert len(error.splitlines()) == 1
