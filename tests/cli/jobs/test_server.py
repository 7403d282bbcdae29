"""The server of docs/jobs.md, on the loopback address, with the client of OpenAI."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import until

from nanovllm import LLM

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.extra

PAGE = Path(__file__).parents[3] / "docs" / "jobs.md"
QUESTIONS = [f"What is {n} + 30?" for n in range(10, 18)]


def ask(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "qwen3-nano", "messages": messages, **more}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, LLM]]:
    """A client of the server, and the LLM that it asks."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 70
    names: dict[str, Any] = {}
    exec(code, names)
    server = uvicorn.Server(uvicorn.Config(names["app"], "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        url = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), names["llm"]
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_answers(served: tuple[Any, LLM]) -> None:
    client, llm = served
    [model] = client.models.list().data
    assert (model.id, model.object) == ("qwen3-nano", "model")
    create = client.chat.completions.create
    chats = [ask(question)["messages"] for question in QUESTIONS]
    want = llm.chat(chats, use_tqdm=False)

    def whole(question: str) -> str:
        return create(**ask(question)).choices[0].message.content

    def streamed(question: str) -> str:
        chunks = list(create(**ask(question, stream=True)))
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == "stop"
        return "".join(chunk.choices[0].delta.content for chunk in chunks)

    for answer in (whole, streamed):
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            assert list(threads.map(answer, QUESTIONS)) == [out["text"] for out in want]
    # A long answer: on a busy machine several tokens are one piece.
    assert len(list(create(**ask("Count from 1 to 40", stream=True)))) > 3
    one = create(**ask(QUESTIONS[0], n=2, logprobs=True, top_logprobs=2, max_tokens=3))
    assert [choice.index for choice in one.choices] == [0, 1]
    assert [len(token.top_logprobs) for token in one.choices[0].logprobs.content] == [2, 2, 2]
    assert one.usage.completion_tokens == 6
    assert not llm.engine.has_unfinished_requests()


def test_usage_at_the_end_of_a_stream(served: tuple[Any, LLM]) -> None:
    client, llm = served
    create = client.chat.completions.create
    for more in ({}, {"n": 3, "seed": 1, "temperature": 1.0}, {"stop": ["42"]}):
        want = create(**ask(QUESTIONS[2], **more)).usage
        options = {"include_usage": True}
        *chunks, last = create(**ask(QUESTIONS[2], stream=True, stream_options=options, **more))
        assert (last.usage, last.choices) == (want, [])
        assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    chunks = create(**ask("Hi", stream=True, stream_options={"include_usage": False}))
    assert all(chunk.usage is None for chunk in chunks)
    assert not llm.engine.has_unfinished_requests()


def test_a_disconnected_client_aborts_its_request(served: tuple[Any, LLM]) -> None:
    client, llm = served
    endless = ask("Hi", max_tokens=4000, n=16, extra_body={"ignore_eos": True})
    before = llm.stats()["output_tokens"]
    with client.chat.completions.create(**endless, stream=True) as stream:
        next(iter(stream))
        assert llm.engine.has_unfinished_requests()
    until(lambda: not llm.engine.has_unfinished_requests())
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**endless, timeout=0.3)
    until(lambda: not llm.engine.has_unfinished_requests())
    assert llm.stats()["output_tokens"] - before < 16 * 1000
    assert client.chat.completions.create(**ask("What is 2 + 3?")).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_errors(served: tuple[Any, LLM], stream: bool) -> None:
    client, llm = served
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="'gpt' does not exist"):
        create(**ask("Hi", stream=stream) | {"model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        create(**ask("Hi " * 20_000, stream=stream))
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        create(**ask("Hi", stream=stream), extra_body={"tempratur": 1})
    with pytest.raises(openai.BadRequestError, match="more than max_logprobs=20"):
        create(**ask("Hi", stream=stream), logprobs=True, top_logprobs=21)
    loop = "{% for i in range(99) %}{% for j in range(99) %}{% endfor %}{% endfor %}"
    for more in ({"chat_template": loop}, {"chat_template_kwargs": {"chat_template": loop}}):
        with pytest.raises(openai.BadRequestError, match="chat_template is a program"):
            create(**ask("Hi", stream=stream), extra_body=more)
    assert not llm.engine.has_unfinished_requests()
