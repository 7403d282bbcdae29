"""Makes LLM a model of lm_eval, the evaluation harness (pip install -e '.[eval]').

    nanovllm lm-eval run --model nanovllm --model_args model=DIRECTORY \\
        --tasks hellaswag

The arguments are the same as for `lm_eval`, which cannot find models of other packages itself.
Tokens, windows and truncation are the same as for its model "hf".
"""

from __future__ import annotations

import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"{error}; pip install -e '.[eval]'") from error

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED
from nanovllm.utils.log import logger

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Pair = tuple[Any, list[int], list[int]]  # key of the cache, tokens of the prompt, tokens to score


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]
    def __init__(
        self,
        model: str = EMBEDDED,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        model, options: as in LLM().
        batch_size, max_batch_size: ignored, because the engine forms batches itself.
        device: as in LLM(). The default of `lm_eval` is "cuda:0", also on a machine without a GPU,
            where it means the CPU.
        enable_thinking, think_end_token, chat_template_args: as in lm_eval's models: the variable
            of the chat template, the text or id of the token after which the answer begins, and
            further variables.
        """
        import torch  # not for an error in the arguments

        super().__init__()
        if enable_thinking and think_end_token is None:
            raise ValueError(
                "enable_thinking=True needs think_end_token, such as '</think>', after which the "
                "answer begins"
            )
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking
        self.enable_thinking = enable_thinking
        if device == "cuda:0" and not torch.cuda.is_available():
            logger.warning("torch finds no GPU for cuda:0, lm_eval's default: the CPU computes")
        elif device is not None:
            options["device"] = device
        self.llm = LLM(options.pop("pretrained", model), **options)
        self.tokenizer: Any = self.llm.get_tokenizer()
        self.max_length = self.llm.engine.input_processor.max_model_len
        self.max_gen_toks = max_gen_toks
        self.think_end_token = think_end_token
        if str(think_end_token).isdigit():
            self.think_end_token = str(self.tokenizer.decode(int(str(think_end_token))))

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None:
            # The text must not get a second token for the beginning.
            first = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, first)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        options = {"continue_final_message": not add_generation_prompt, "tokenize": False}
        options["add_generation_prompt"] = add_generation_prompt
        options |= self.chat_template_args
        return str(self.tokenizer.apply_chat_template(chat_history, **options))

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        if self.enable_thinking:
            raise ValueError(
                "enable_thinking=True is for tasks that generate text; leave it out for tasks with "
                "log-likelihoods"
            )
        # The last token is scored and not computed. A prompt that is too long is cut on the left.
        prompts = [self._cut(ids, len(end), self.max_length + 1) for _, ids, end in requests]
        continuations = [end for *_, end in requests]
        outputs = self.llm.loglikelihood(prompts, continuations, not disable_tqdm)
        results = [(output.logprob, output.is_greedy) for output in outputs]
        for (key, *_), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _cut(self, ids: list[int], num_after: int, limit: int) -> list[int]:
        """Return the last tokens of a prompt, so that `num_after` more fit into `limit`."""
        room = limit - num_after
        if room < 1:
            raise ValueError(
                f"{num_after} tokens after a prompt leave no token for it, because max_model_len "
                f"is {self.max_length}; give a larger one"
            )
        if len(ids) > room:
            text = "a prompt has %d tokens; the first %d are left out, because max_model_len is %d"
            logger.warning(text, len(ids), len(ids) - room, self.max_length)
        return ids[-room:]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        pairs: list[list[Pair]] = []  # for each request, one in each window of its text
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs.append([(None, *make_disjoint_window(window)) for window in windows])
        scores = iter(self._loglikelihood_tokens(list(chain(*pairs)), disable_tqdm))
        totals = [sum(logprob for logprob, _ in islice(scores, len(each))) for each in pairs]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = []
        params = []
        until = []
        eos = self.tokenizer.decode(self.eot_token_id)
        for context, settings in (request.args for request in requests):
            fields = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
            do_sample = fields.pop("do_sample")
            fields.setdefault("temperature", 1.0 if do_sample else 0.0)
            stop = handle_stop_sequences(fields.pop("until"), eos)
            until.append(stop)
            if self.think_end_token:  # the thinking may have the other ones
                stop = [eos]
            length = fields.pop("max_gen_toks")
            prompts.append(self._cut(self.tok_encode(context), length, self.max_length))
            params.append(
                SamplingParams(max_tokens=length, stop=list(filter(None, stop)), **fields)
            )
        outputs = self.llm.generate(prompts, params, not disable_tqdm)
        results = []
        for request, output, stop in zip(requests, outputs, until, strict=True):
            text = output.outputs[0].text
            results.append(postprocess_generated_text(text, stop, self.think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results


def main(argv: list[str]) -> None:
    """Run the program of lm_eval, with the model "nanovllm"."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["nanovllm lm-eval", *argv]
    cli_evaluate()
