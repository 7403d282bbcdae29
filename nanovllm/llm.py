"""LLM: the class that a user calls. It adds requests to an LLMEngine and runs its steps."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tqdm import tqdm

from nanovllm.chat import Message, as_conversations, render
from nanovllm.config import EngineConfig, EngineOptions, check_scalar
from nanovllm.engine.input_processor import InputProcessor, Prompt, is_token_id, plain_ids
from nanovllm.engine.interrupt import defer_interrupt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.output_processor import Request
from nanovllm.models.checkpoint import EMBEDDED, GenerationDefaults, config_file, find_checkpoint
from nanovllm.models.config import ModelConfig, read_json
from nanovllm.outputs import GenerationError, RequestOutput, StreamOutput
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm_names import CallArguments, check_call, missing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

MISSING: Any = None  # the default of `prompts`, so that `prompt_token_ids` alone is explained
logger = logging.getLogger("nanovllm")
# Held while an engine loads its tokenizer: transformers imports its modules when they are used, and
# an import that another thread has begun fails there with ImportError.
START_LOCK = threading.Lock()


def _with_fields(init: Callable[..., None], options: type) -> inspect.Signature:
    """Return the signature of `init` with the fields of `options` as its keyword arguments."""
    own = [p for p in inspect.signature(init).parameters.values() if p.kind != p.VAR_KEYWORD]
    fields = inspect.signature(options).parameters.values()
    return inspect.Signature([*own, *(p.replace(kind=p.KEYWORD_ONLY) for p in fields)])


class LLM:
    def __init__(self, model: str = EMBEDDED, **options: Unpack[EngineOptions]) -> None:
        """Load `model`: a directory, a hub id, or "qwen3-nano", which ships with the package.

        The options are EngineConfig's fields. Raises ValueError for a model or a value that cannot
        work, TypeError for an option that does not exist.
        """
        show_log()
        self.engine = self.llm_engine = make_engine(model, EngineConfig.from_options(options))

    # For help() and inspect.signature: EngineConfig's fields in place of `**options`.
    __init__.__signature__ = _with_fields(__init__, EngineConfig)  # type: ignore[attr-defined]

    # Hidden from type checkers, which would take every attribute to exist.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing("LLM", name, [*dir(type(self)), *vars(self)])

    def shutdown(self) -> None:
        """Abort all requests, also those of other threads, whose calls return what there is.

        The engine remains usable; `del llm` frees its memory.
        """
        self.engine.abort_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        self.engine.__reduce__()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init)")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json."""
        return self.engine.inputs.default_sampling_params.clone()

    def stats(self) -> dict[str, int | float]:
        """Counters of sequences, blocks, prefix hits, preemptions and tokens; see docs/api.md."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache. Running requests keep their blocks."""
        self.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] = MISSING,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **vllm: Unpack[CallArguments],
    ) -> list[RequestOutput]:
        """Complete the prompts. Returns one result for each, in their order.

        prompts: a string, token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a list of
            any of these. The text is used as it is; `chat` applies the chat template. Token ids are
            a list, a NumPy array, a torch tensor or a tokenizer's BatchEncoding; two dimensions are
            one prompt for each row.
        sampling_params: one for all, or one for each; None uses the checkpoint's
            generation_config.json.
        vllm: vLLM's other arguments, such as lora_request=None, with values that change nothing.

        All prompts are checked first: if one is refused, none is started. Ctrl-C stops after the
        current step; a second Ctrl-C stops during it. Neither leaves a request behind. A request
        that another thread aborts has what there is as its result, with finish_reason "abort".
        Raises GenerationError, which has all results, if a request ended because no token could be
        sampled.
        """
        check_call(self.generate, vllm)
        items, params = pair_up(prompts, sampling_params)
        requests: list[Request] = []
        with defer_interrupt() as interrupt:
            try:
                for i, (prompt, p) in enumerate(zip(items, params, strict=True)):
                    try:
                        requests.append(self.engine.submit(prompt, p))
                    except (TypeError, ValueError) as error:
                        where = f"prompts[{i}]: " if len(items) > 1 else ""
                        kind = TypeError if isinstance(error, TypeError) else ValueError
                        raise kind(f"{where}{error}") from error
                    interrupt.check()
                return self._run(requests, use_tqdm, interrupt.check)
            except BaseException:
                self.engine.abort(requests)
                raise

    def _run(
        self, requests: list[Request], use_tqdm: bool, check_interrupt: Callable[[], None]
    ) -> list[RequestOutput]:
        start = last_shown = time.monotonic()
        with tqdm(total=len(requests), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            for pending in self.engine.run(requests):
                raise_error(pending)
                check_interrupt()
                if use_tqdm and time.monotonic() - last_shown > 0.1:
                    last_shown = time.monotonic()
                    show_progress(bar, requests, last_shown - start)
            show_progress(bar, requests, time.monotonic() - start)
        outputs = [request.output for request in requests if request.output is not None]
        if any(sample.finish_reason == "error" for out in outputs for sample in out.outputs):
            raise GenerationError(outputs)
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete the prompts as `generate` does, and yield new text and tokens as they come.

        The texts of one (request_index, index), joined, are what `generate` would return. A
        character that spans tokens comes when it is complete, and text that may begin a stop string
        is held back until that is decided. Leaving the loop early aborts the remaining requests.
        """
        items, params = pair_up(prompts, sampling_params)
        requests: list[Request] = []
        try:
            with defer_interrupt() as interrupt:
                for prompt, p in zip(items, params, strict=True):
                    requests.append(self.engine.submit(prompt, p, stream=True))
                    interrupt.check()
            for pending in self.engine.run(requests):
                with defer_interrupt(), self.engine.lock:
                    new = [output for i, r in enumerate(requests) for output in r.read_stream(i)]
                yield from new
                raise_error(pending)
        finally:
            self.engine.abort(requests)

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
        **vllm: Unpack[CallArguments],
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list: [{"role": "user", "content": "..."}, ...].

        The content may be a list of parts, [{"type": "text", "text": "..."}, ...]. If the chat
        template takes strings only, a newline joins them. Raises ValueError if the template cannot
        render the messages. Its time is not limited; Ctrl-C ends its loops.
        """
        check_call(self.chat, vllm)
        if chat_template is not None:
            check_scalar("chat_template", chat_template, str, ())
        tokenizer, prompts = self.get_tokenizer(), []
        for conversation in as_conversations(messages):
            text = render(
                conversation,
                tokenizer,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            ids = self.engine.inputs.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)


def show_progress(bar: tqdm[NoReturn], requests: list[Request], seconds: float) -> None:
    tokens = [request.num_tokens for request in requests]
    prompt, output = (sum(pair[i] for pair in tokens) / (seconds + 1e-9) for i in (0, 1))
    bar.set_postfix_str(f"prompt {prompt:,.0f} tok/s, output {output:,.0f} tok/s", refresh=False)
    bar.update(sum(request.ended for request in requests) - bar.n)
    bar.refresh()


def raise_error(requests: list[Request]) -> None:
    """Raise what ended one of these requests, such as an error of its logits processor."""
    for request in requests:
        if request.error is not None:
            raise request.error


def make_engine(model: str, config: EngineConfig) -> LLMEngine:
    """Load a checkpoint and build its engine."""
    directory = find_checkpoint(model, config.revision, weights=config.load_format != "dummy")
    model_config = ModelConfig.from_file(config_file(directory))
    longest, window = model_config.max_position_embeddings, model_config.sliding_window
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the {longest} positions of the model; use "
            f"at most {longest}"
        )
    tokenizer = None
    if not config.skip_tokenizer_init:
        home = directory
        if config.tokenizer is not None:
            home = find_checkpoint(config.tokenizer, weights=False)
        with START_LOCK:
            tokenizer = load_tokenizer(home)
    if window is not None and max_model_len > window:
        raise ValueError(
            f"{directory.name} attends over a sliding window of {window} tokens, which is not "
            f"supported; set max_model_len={window} or less to run it within one window"
        )
    defaults = GenerationDefaults.from_directory(directory)
    eos_token_ids = defaults.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids |= {tokenizer.eos_token_id}
    runner = ModelRunner(config, model_config, directory, max_model_len)
    num_tokens = runner.num_blocks * config.kvcache_block_size
    size = (runner.num_blocks + 1) * runner.block_bytes(config.kvcache_block_size)
    logger.info(
        f"{directory.name} on {runner.device} in {str(runner.dtype).removeprefix('torch.')}: "
        f"{runner.num_blocks} blocks of {config.kvcache_block_size} tokens, KV cache of "
        f"{num_tokens:,} tokens ({size / 2**20:,.0f} MiB)"
    )
    inputs = InputProcessor(
        tokenizer,
        model_config.vocab_size,
        max_model_len,
        eos_token_ids,
        defaults.sampling,
        config.seed,
    )
    return LLMEngine(config, runner, inputs)


FAST_TOKENIZER = "PreTrainedTokenizerFast"


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    if not any((directory / name).is_file() for name in names):
        raise ValueError(
            f"{directory} has no tokenizer files; name one with tokenizer=..., or set "
            "skip_tokenizer_init=True to work with token ids"
        )
    try:
        config = directory / "tokenizer_config.json"
        if config.is_file() and read_json(config).get("tokenizer_class") == FAST_TOKENIZER:
            # What AutoTokenizer would choose, which imports transformers' models first: 0.4 s.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many
        for path in sorted(directory.glob("*.json")):
            read_json(path)  # raises ValueError with the name of a broken file
        raise ValueError(
            f"tokenizer.json or tokenizer_config.json in {directory} cannot be used "
            f"({type(error).__name__}: {error}); fetch them again, or name another tokenizer with "
            "tokenizer=..."
        ) from error


def show_log() -> None:
    """Print this package's log to stderr, unless the program configures logging itself."""
    with START_LOCK:
        if logger.handlers or logger.level != logging.NOTSET:
            return
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def pair_up(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> tuple[list[Prompt], list[SamplingParams | None]]:
    """Return as many parameters as prompts; a single SamplingParams is repeated."""
    items = as_list(prompts)
    if isinstance(sampling_params, list | tuple):
        params: list[SamplingParams | None] = list(sampling_params)
    else:
        params = [cast("SamplingParams | None", sampling_params)] * len(items)
    if len(params) != len(items):
        raise ValueError(
            f"{len(items)} prompts but {len(params)} sampling_params; give one, or one for each"
        )
    return items, params


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. Token ids are one prompt, or one for each row."""
    items = plain_ids(prompts)
    if isinstance(items, str | Mapping):
        return [items]
    if not isinstance(items, list | tuple):
        raise TypeError(
            f"prompts must be a string, token ids, a dict, or a list of these, not {prompts!r}"
        )
    # An empty array is an empty prompt, but an empty list has no prompts.
    if (items or items is not prompts) and all(map(is_token_id, items)):
        return [list(items)]
    return list(items)
