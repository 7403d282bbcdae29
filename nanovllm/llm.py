"""LLM: the class that users call. It adds requests to an LLMEngine and runs its steps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from nanovllm.config import EMBEDDED, EngineConfig, with_parameters_of
from nanovllm.engine.chat_template import Message, as_conversations
from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request
from nanovllm.engine.results import check_generated
from nanovllm.features.tasks import results
from nanovllm.inputs import Prompt, ShowProgress, pair_up
from nanovllm.outputs import RequestOutput, StreamOutput
from nanovllm.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from nanovllm.utils.log import show_log


class LLM:
    """A model with its engine, which runs the requests of all calls and threads together.

    The options are described in docs/api.md. `with LLM() as llm:` aborts all requests at the end.
    """

    @with_parameters_of(EngineConfig)
    def __init__(self, model: str | os.PathLike[str] = EMBEDDED, **options: Any) -> None:
        """Load `model`: a directory, a hub id, or "qwen3-nano", which ships with the package.

        The options are the fields of EngineConfig. Raises ValueError for an invalid model or value,
        and TypeError for an unknown option.
        """
        show_log()
        config = EngineConfig.from_options({"model": model, **options})
        from nanovllm.loading.make_engine import make_engine  # imports torch

        self.engine = self.llm_engine = make_engine(config)
        self._config = config

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
        check_generated(requests)
        return [request.output for request in requests]

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

    # ---- other kinds of requests ----

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: ShowProgress = True,
    ) -> list[results.BeamSearchOutput]:
        """Search for the most likely outputs of the prompts; see beam_search.py.

        params: one for all prompts, or one for each.

        Returns one result per prompt. Its `sequences` are sorted, the best first. Prompts, errors
        and Ctrl-C are as in `generate`.
        """
        pairs = pair_up(prompts, params, BeamSearchParams, "params", optional=False)
        requests = self._run(pairs, use_tqdm, "Searching")
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.output for request in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ShowProgress = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[results.EmbeddingRequestOutput]:
        """Return the embedding of each prompt: the last token's final hidden state, normalized.

        prompts: as in `generate`; each may have up to max_model_len tokens.
        pooling_params: one for all prompts, or one for each. The next three arguments are its
            fields and can be passed instead. None uses the setting of the checkpoint.

        Raises ArithmeticError if the model computed NaN. Other errors are as in `generate`.
        """
        fields = PoolingParams(dimensions, normalize, prompt_name)
        if pooling_params is None:
            pooling_params = fields
        elif fields != PoolingParams():
            raise TypeError("pass either pooling_params or its fields, not both")
        pairs = pair_up(prompts, pooling_params, PoolingParams, "pooling_params")
        return unaborted(self._run(pairs, use_tqdm, "Embedding"))

    def loglikelihood(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        use_tqdm: ShowProgress = True,
    ) -> list[results.LoglikelihoodOutput]:
        """Return the log-likelihood of each continuation after its prompt.

        prompts: as in `generate`, one for each continuation, or one for all.
        continuations: strings, which are encoded together with their prompts, or token ids.

        A prefix that several pairs share is computed once, except for its last partial block. A
        pair may have up to max_model_len + 1 tokens. Errors are as in `embed`.
        """
        from nanovllm.features.tasks.loglikelihood import tokenize_pairs

        pairs = tokenize_pairs(self.engine.input_processor, prompts, continuations)
        return unaborted(self._run(pairs, use_tqdm, "Scoring"))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: ShowProgress = True,
        *,
        instruction: str | None = None,
    ) -> list[results.ScoringRequestOutput]:
        """Return how well each text of `data_2`, a document, answers a query; see rerank.py.

        data_1: a query for each text, or one for all. What its prompts share is computed once.
        instruction: the task of a reranker. None: the task of its model card, a web search.

        With an embedding model a score is the cosine of the two embeddings. Raises ArithmeticError
        if the model computed NaN. Other errors are as in `generate`.
        """
        from nanovllm.features.tasks.rerank import Scorer

        scorer = Scorer(self.engine, data_1, data_2, instruction)
        pairs = [(prompt, scorer.params) for prompt in scorer.prompts]
        return scorer.outputs(unaborted(self._run(pairs, use_tqdm, "Scoring", scorer.names)))

    # ---- the engine ----

    def shutdown(self) -> None:
        """Abort all requests. The calls of other threads then return partial outputs.

        The engine remains usable. `del llm` frees its memory.
        """
        self.engine.abort_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Tokenizer:
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

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Save the blocks of the prefix cache to a file in the directory `path`, which is made.

        Replaces the file of an earlier call, unless the prefix cache is empty. Needs as much host
        memory as the KV. Returns the number of tokens whose KV was saved.

        Raises RuntimeError while requests run, OSError if the file cannot be written, and
        ValueError if the prefix cache is disabled, for several ranks, for a model with linear
        attention, and if the files of the checkpoint have changed since they were loaded.
        """
        from nanovllm.features.kv import disk_cache

        return disk_cache.save(self.engine, self._config, path)

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Load what `save_prefix_cache` saved into free blocks, the most recently used first.

        With `swap_space`, what the device has no room for is loaded into host memory. Returns the
        number of tokens whose KV was loaded: 0 if there is no file yet.

        Raises ValueError, and loads nothing, if the file is damaged, or if it was saved by another
        model or with options that change the KV. Other errors are as in `save_prefix_cache`.
        """
        from nanovllm.features.kv import disk_cache

        return disk_cache.load(self.engine, self._config, path)

    def load_weights(
        self,
        weights: str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]],
        partial: bool = False,
    ) -> None:
        """Store new weights in the engine, and empty its prefix cache.

        weights: dense tensors of BF16, F16, F32 or F64 on any device, by their names in a
            checkpoint or in a model of transformers: a dict or an iterable of pairs, which is read
            tensor by tensor if it has no length; or the directory of a checkpoint.
        partial: whether tensors may be missing, which then do not change.

        Raises ValueError with all names that are unknown or missing and all shapes that are wrong.
        Nothing has changed then, unless the iterable has no length. After an error or Ctrl-C that
        comes later, all calls raise RuntimeError until all weights have been loaded. Raises
        RuntimeError while requests run. With several ranks, each makes the same call.
        """
        from nanovllm.features.weights.new_weights import load_weights

        load_weights(self.engine, self._config, weights, partial)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and on a GPU the weights: level 1 copies them to host memory.

        Level 2 frees the weights on any device, and they have to be loaded after `wake_up`. The
        prefix cache is emptied. Until `wake_up`, all calls raise RuntimeError, as this one does
        while requests run. An engine that sleeps may be called again with the same level; another
        one is a RuntimeError. With several ranks, each makes the same call.
        """
        from nanovllm.features.weights.sleep import sleep

        sleep(self.engine, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate again what `sleep` has freed. Does nothing if the engine does not sleep.

        tags: a list of "weights", "kv_cache" or both, which wake up now. None: both. Raises
            ValueError for other tags.

        Other calls raise RuntimeError until both are awake, and after level 2 until `load_weights`
        has loaded all weights. `load_weights` needs only the weights to be awake.
        """
        from nanovllm.features.weights.sleep import wake_up

        wake_up(self.engine, tags)

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
                        progress.show(bar, self.engine.scheduler, last_shown - start)
                progress.show(bar, self.engine.scheduler, time.monotonic() - start)
        except BaseException as error:  # also Ctrl-C
            self.engine.abort(requests)
            outputs = [request.output for request in requests if request.ended]
            if any(output is not None for output in outputs):
                error.outputs = outputs  # type: ignore[attr-defined]
                error.add_note("The attribute `outputs` of this error has the results so far.")
            raise
        return requests

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
                self.engine.abort(requests, wait=False)
            raise


def unaborted(requests: list[Request]) -> list[Any]:
    """Return the outputs. Raises RuntimeError for an aborted request, which has no output."""
    if any(request.samples[0].seq.finish_reason == "abort" for request in requests):
        raise RuntimeError("another thread has aborted the requests of this call")
    return [request.output for request in requests]
