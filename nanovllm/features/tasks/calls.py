"""The calls of LLM that do not sample: beams, embeddings, log-likelihoods, the disk cache.

Also the progress bar of all calls.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Progress, Request
from nanovllm.features.tasks.beam_search import BeamSearchOutput
from nanovllm.features.tasks.embeddings.pooling import EmbeddingRequestOutput, PoolingParams
from nanovllm.features.tasks.loglikelihood import LoglikelihoodOutput, tokenize_pairs
from nanovllm.features.tasks.rerank import Scorer, ScoringRequestOutput
from nanovllm.inputs import Prompt, ShowProgress, pair_up
from nanovllm.sampling_params import BeamSearchParams


class OptionalCalls(ABC):
    """The base class of LLM."""

    engine: LLMEngine
    _config: EngineConfig

    @abstractmethod
    def _run(
        self,
        pairs: list[tuple[Prompt, Any]],
        use_tqdm: ShowProgress,
        what: str,
        names: Sequence[str] = (),
    ) -> list[Request]: ...

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: ShowProgress = True,
    ) -> list[BeamSearchOutput]:
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
    ) -> list[EmbeddingRequestOutput]:
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
    ) -> list[LoglikelihoodOutput]:
        """Return the log-likelihood of each continuation after its prompt.

        prompts: as in `generate`, one for each continuation, or one for all.
        continuations: strings, which are encoded together with their prompts, or token ids.

        A prefix that several pairs share is computed once, except for its last partial block. A
        pair may have up to max_model_len + 1 tokens. Errors are as in `embed`.
        """
        pairs = tokenize_pairs(self.engine.input_processor, prompts, continuations)
        return unaborted(self._run(pairs, use_tqdm, "Scoring"))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: ShowProgress = True,
        *,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2`, a document, answers a query; see rerank.py.

        data_1: a query for each text, or one for all. What its prompts share is computed once.
        instruction: the task of a reranker. None: the task of its model card, a web search.

        With an embedding model a score is the cosine of the two embeddings. Raises ArithmeticError
        if the model computed NaN. Other errors are as in `generate`.
        """
        scorer = Scorer(self.engine, data_1, data_2, instruction)
        pairs = [(prompt, scorer.params) for prompt in scorer.prompts]
        return scorer.outputs(unaborted(self._run(pairs, use_tqdm, "Scoring", scorer.names)))

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Save the blocks of the prefix cache to a file in the directory `path`, which is made.

        Replaces the file of an earlier call, unless the prefix cache is empty. Needs as much host
        memory as the KV. Returns the number of tokens whose KV was saved.

        Raises RuntimeError while requests run, OSError if the file cannot be written, and
        ValueError if the prefix cache is disabled, for several ranks, for a model with linear
        attention, and if the files of the checkpoint have changed since they were loaded.
        """
        from nanovllm.features.kv import disk_cache  # imports torch

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


def unaborted(requests: list[Request]) -> list[Any]:
    """Return the outputs. Raises RuntimeError for an aborted request, which has no output."""
    if any(request.samples[0].seq.finish_reason == "abort" for request in requests):
        raise RuntimeError("another thread has aborted the requests of this call")
    return [request.output for request in requests]


def show_progress(bar: Any, engine: LLMEngine, progress: Progress, seconds: float) -> None:
    """Show the counters of a call, which has run for `seconds`, in its progress bar."""
    num_prompt, num_output = progress.num_prompt_tokens, progress.num_output_tokens
    # A long prompt takes many steps until its request has a first token. The list is a copy,
    # because another thread may run a step meanwhile.
    for seq in list(engine.scheduler.running):
        request = seq.request
        if request and request.progress is progress and request not in progress.started:
            num_prompt += min(seq.num_computed, seq.num_prompt)
    prompt, output = (n / (seconds + 1e-9) for n in (num_prompt, num_output))
    rates = f"prompt {prompt:,.0f} tok/s, output {output:,.0f} tok/s"
    bar.set_postfix_str(rates, refresh=False)
    bar.update(progress.num_ended - bar.n)
    bar.refresh()
