"""LLM: the class that users call. It adds requests to an LLMEngine and runs its steps."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.config import EMBEDDED, EngineConfig, engine_config, with_parameters_of
from nanovllm.engine.chat_template import Message, as_conversations
from nanovllm.engine.request import Progress, Request
from nanovllm.features.tasks.calls import OptionalCalls, show_progress
from nanovllm.inputs import Prompt, ShowProgress, pair_up
from nanovllm.outputs import RequestOutput, StreamOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.errors import GenerationError, why_failed
from nanovllm.utils.log import show_log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class LLM(OptionalCalls):
    """A model with its engine, which runs the requests of all calls and threads together.

    The options are described in docs/api.md. `with LLM() as llm:` aborts all requests at the end.
    """

    __signature__ = inspect.signature(EngineConfig)  # for help()

    @with_parameters_of(EngineConfig)
    def __init__(self, model: str | os.PathLike[str] = EMBEDDED, **options: Any) -> None:
        """Load `model`: a directory, a hub id, or "qwen3-nano", which ships with the package.

        The options are the fields of EngineConfig. Raises ValueError for an invalid model or value,
        and TypeError for an unknown option.
        """
        show_log()
        config = engine_config({"model": model, **options})
        from nanovllm.loading.make_engine import make_engine  # imports torch

        self.engine = self.llm_engine = make_engine(config)
        self._config = config

    def shutdown(self) -> None:
        """Abort all requests. The calls of other threads then return partial outputs.

        The engine remains usable. `del llm` frees its memory.
        """
        self.engine.abort_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of transformers."""
        inputs = self.engine.input_processor
        tokenizer = inputs.get_tokenizer()
        # From now on the engine uses this tokenizer, so setting its chat_template has an effect.
        inputs.tokenizer = getattr(tokenizer, "full", tokenizer)
        return inputs.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json."""
        return self.engine.input_processor.default_sampling_params.clone()

    def stats(self) -> dict[str, int | float]:
        """Return counters of sequences, blocks and tokens; docs/api.md explains them."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and changes nothing, while a request runs."""
        return self.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
    ) -> list[RequestOutput]:
        """Complete the prompts. Returns one result per prompt, in order.

        prompts: a string, token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a list of
            any of these. The text is used unchanged; `chat` applies the chat template. Token ids
            are a list, a NumPy array or a torch tensor. If they have two dimensions, each row is
            one prompt.
        sampling_params: one for all prompts, or one for each. None uses the checkpoint's
            generation_config.json.
        use_tqdm: whether to show a progress bar, or a function that makes it, as tqdm does.

        If a prompt is invalid, none is started. If no token could be sampled for a request,
        GenerationError is raised after all requests have ended. Any other error, also Ctrl-C,
        aborts the requests of this call: they have their output so far and the finish_reason
        "abort". The attribute `outputs` of each of these errors has one result per prompt.
        """
        pairs = pair_up(prompts, sampling_params, SamplingParams, "sampling_params")
        requests = self._run(pairs, use_tqdm)
        outputs: list[RequestOutput] = [request.output for request in requests]
        if reasons := why_failed(requests):
            raise GenerationError(outputs, reasons)
        return outputs

    def _run(
        self,
        pairs: list[tuple[Prompt, Any]],
        use_tqdm: ShowProgress,
        what: str = "Generating",
        names: Sequence[str] = (),
    ) -> list[Request]:
        """Check the prompts, queue their requests, and run steps until these have ended."""
        progress = Progress()
        requests = self.engine.input_processor.check(pairs, progress, names=names)
        try:
            self.engine.add(requests)
            # A program without a console has no stderr.
            is_shown = use_tqdm and sys.stderr is not None and self._config.rank == 0 and requests
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            with make_bar(total=len(requests), desc=what, unit="req", disable=not is_shown) as bar:
                start = last_shown = time.monotonic()
                for _ in self.engine.run(requests):
                    if progress.error is not None:
                        raise progress.error
                    if is_shown and time.monotonic() - last_shown > 0.1:
                        last_shown = time.monotonic()
                        show_progress(bar, self.engine, progress, last_shown - start)
                show_progress(bar, self.engine, progress, time.monotonic() - start)
        except BaseException as error:  # also Ctrl-C
            self.engine.abort(requests, wait=True)
            outputs = [request.output for request in requests if request.ended]
            if any(output is not None for output in outputs):
                error.outputs = outputs  # type: ignore[attr-defined]
                error.add_note("The attribute `outputs` of this error has the results so far.")
            raise
        return requests

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamOutput, None, None]:
        """Complete the prompts as `generate` does, and yield new text and tokens after each step.

        The concatenated texts of one (request_index, index) are the text that `generate` returns.
        A character that consists of several tokens is yielded when it is complete. Text that may
        begin a stop string is yielded when later characters show that it does not. Leaving the loop
        early aborts the remaining requests. With several ranks, they instead continue with the next
        call, unless `shutdown` aborts them. Invalid prompts raise an error before the loop.
        """
        pairs = pair_up(prompts, sampling_params, SamplingParams, "sampling_params")
        progress = Progress()
        requests = self.engine.input_processor.check(pairs, progress, stream=True)
        return self._stream(requests, progress)

    def _stream(
        self, requests: list[Request], progress: Progress
    ) -> Generator[StreamOutput, None, None]:
        try:
            self.engine.add(requests)
            for _ in self.engine.run(requests):
                with self.engine.lock:
                    changed = sorted(progress.changed, key=lambda request: request.number)
                    progress.changed.clear()
                    new = [part for each in changed for part in each.task.read_stream(each)]
                yield from new
                if progress.error is not None:
                    raise progress.error
        except BaseException as error:
            # The garbage collector closes an abandoned stream at a different time on each rank.
            if self._config.tensor_parallel_size == 1 or not isinstance(error, GeneratorExit):
                self.engine.abort(requests)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, [{"role": "user", "content": "..."}, ...], or a list of them.

        The content may be a list of parts, [{"type": "text", "text": "..."}, ...], which are joined
        by newlines if the chat template accepts only strings. The arguments of tool calls may be
        strings in JSON, as in OpenAI's format. chat_template_kwargs are variables of the template;
        as in vLLM, they take precedence over the other arguments. Raises ValueError if the template
        cannot render the messages.
        """
        variables = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        prompts = [
            self.engine.input_processor.chat_prompt(conversation, variables, chat_template_kwargs)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)
