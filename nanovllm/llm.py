"""LLM: what a user calls. A thin wrapper that feeds an LLMEngine and waits for it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from nanovllm.checkpoint import EMBEDDED
from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.engine.interrupt import interruptible
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Prompt
from nanovllm.outputs import RequestOutput, StreamOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

Message = dict[str, Any]


class LLM:
    def __init__(self, model: str = EMBEDDED, **options: Unpack[EngineOptions]) -> None:
        """Load `model`: a directory, a hub id, or "qwen3-nano", which ships with the package.

        The options are EngineConfig's fields. Raises ValueError for a model or a value that cannot
        work, TypeError for an option that does not exist.
        """
        show_log()
        self.engine = LLMEngine(model, EngineConfig.from_options(options))

    def shutdown(self) -> None:
        """Abort what is under way. The engine stays usable; `del llm` frees its memory."""
        for request_id in list(self.engine.requests):
            self.engine.abort_request(request_id)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init)")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for."""
        return dataclasses.replace(self.engine.default_sampling_params)

    def stats(self) -> dict[str, int | float]:
        """Running and waiting sequences, blocks in use, cached and free, hit rate, preemptions, ..."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every published block; requests that run keep what they have."""
        self.engine.scheduler.blocks.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts; one result for each, in their order.

        prompts: a string, a list of token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a
            list of any of these. The text is taken as it is; `chat` applies the chat template.
        sampling_params: one for all, or one for each; None takes the checkpoint's
            generation_config.json.

        All prompts are checked before anything runs: if one is refused, none is started. Ctrl-C
        stops after the step that is running, a second one at once; neither leaves a request behind.
        """
        items, params = paired(prompts, sampling_params)
        ids: list[str] = []
        try:
            with interruptible() as check:
                for i, (prompt, p) in enumerate(zip(items, params, strict=True)):
                    try:
                        ids.append(self.engine.add_request(prompt, p))
                    except (TypeError, ValueError) as error:
                        where = f"prompts[{i}]: " if len(items) > 1 else ""
                        kind = TypeError if isinstance(error, TypeError) else ValueError
                        raise kind(f"{where}{error}") from error
                    check()
                return self._run(ids, use_tqdm, check)
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise

    def _run(self, ids: list[str], use_tqdm: bool, check: Any) -> list[RequestOutput]:
        engine, wanted = self.engine, set(ids)
        results: dict[str, RequestOutput] = {}
        start, prompt0, output0 = (
            time.monotonic(),
            engine.num_prompt_tokens,
            engine.num_output_tokens,
        )
        shown = start
        with tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while len(results) < len(wanted):
                finished = engine.step()
                results |= {o.request_id: o for o in finished if o.request_id in wanted}
                engine.unclaimed += [o for o in finished if o.request_id not in wanted]
                check()
                now = time.monotonic()
                if use_tqdm and (finished or now - shown > 0.5):
                    shown, seconds = now, now - start + 1e-9
                    bar.set_postfix_str(
                        f"prompt {(engine.num_prompt_tokens - prompt0) / seconds:,.0f} tok/s, "
                        f"output {(engine.num_output_tokens - output0) / seconds:,.0f} tok/s",
                        refresh=False,
                    )
                    bar.update(len(results) - bar.n)
                    if not finished:
                        bar.refresh()
        return [results[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete the prompts as `generate` does, and yield what is new as it comes.

        The texts of one (request_index, index) put together are what `generate` would return; a
        character that spans tokens comes when it is whole, and what may become a stop string is held
        back until it is clear. Leaving the loop early aborts the rest and frees its blocks.
        """
        items, params = paired(prompts, sampling_params)
        engine = self.engine
        ids: list[str] = []
        try:
            for prompt, p in zip(items, params, strict=True):
                ids.append(engine.add_request(prompt, p, stream=True))
            wanted = {request_id: i for i, request_id in enumerate(ids)}
            live = [s for s in engine.samples.values() if s.seq.request_id in wanted]
            while live:
                going = []
                for sample in live:
                    # Whoever steps the engine meanwhile, this reads all that is new.
                    reason = sample.seq.finish_reason
                    text, token_ids = sample.news()
                    if reason is None:
                        going.append(sample)
                    if token_ids or reason is not None:
                        i = wanted[sample.seq.request_id]
                        yield StreamOutput(i, sample.seq.index, text, token_ids, reason)
                live = going
                if live:
                    engine.unclaimed += engine.step()
        finally:
            for request_id in ids:
                engine.abort_request(request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list: [{"role": "user", "content": "..."}, ...]."""
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, list | tuple):
            raise TypeError(
                'messages must be a list like [{"role": "user", "content": "..."}], or a list of '
                f"such lists, not {messages!r}"
            )
        one = not messages or not isinstance(messages[0], list | tuple)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            for message in conversation:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise ValueError(
                        f"a chat message needs a 'role' and 'content', not {message!r}"
                    )
            if not conversation:
                raise ValueError("the conversation is empty; give at least one message")
            text = tokenizer.apply_chat_template(
                list(conversation),
                tokenize=False,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(cast(str, text), add_special_tokens=False)
            prompts.append({"prompt": cast(str, text), "prompt_token_ids": list(ids)})
        return self.generate(prompts, sampling_params, use_tqdm)


def show_log() -> None:
    """Print this package's log (one line at start) to stderr, unless the program logs by itself."""
    logger = logging.getLogger("nanovllm")
    if logger.handlers or logger.level != logging.NOTSET:
        return
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def paired(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> tuple[list[Prompt], list[SamplingParams | None]]:
    """As many parameters as prompts; one for all is repeated."""
    items = as_list(prompts)
    if isinstance(sampling_params, list | tuple):
        params: list[SamplingParams | None] = list(sampling_params)
    else:
        params = [cast("SamplingParams | None", sampling_params)] * len(items)
    if len(params) != len(items):
        raise ValueError(
            f"{len(items)} prompts but {len(params)} sampling_params; give one for all, or one each"
        )
    return items, params


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of ints is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            f"prompts must be a string, token ids, a dict, or a list of these, not {prompts!r}"
        )
    if prompts and all(isinstance(p, int) for p in prompts):
        return [cast("list[int]", list(prompts))]
    return cast("list[Prompt]", list(prompts))
