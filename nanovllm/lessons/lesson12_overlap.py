"""Lesson 12: overlap and graphs.

A GPU works on its own, and the host only launches what it does. Two things can make the GPU wait.
The host reads the tokens of a step before it plans the next one: with async scheduling, step N+1 is
planned and launched before the tokens of step N are read (as in NanoFlow, Zhu et al. 2024,
arXiv:2408.12757, and in vLLM). And a step is hundreds of launches: a CUDA graph records them once
and replays them by one call. On a CPU with AMX, one call computes all layers for a similar reason.

    without   host    plan 1 |........| commit 1, plan 2 |........| commit 2 ...
              device         | step 1 |                  | step 2 |
    with      host    plan 1 | plan 2 |..| commit 1, plan 3 |..| commit 2 ...
    overlap   device         | step 1    | step 2              | step 3
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.core import EngineCore
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.gpu.graphs import DecodeGraphs
from nanovllm.lessons.lesson import decode_plan, make_runner, optional, prompt_plan, timed
from nanovllm.lessons.show import Question, link, say, show_source, show_table
from nanovllm.plan import HostTier, StepOutput, StepPlan
from nanovllm.runner.model_runner import ModelRunner

DEVICE_SECONDS, HOST_SECONDS = 0.005, 0.003  # of one step
LAYERS = "nanovllm.cpu.layers"  # needs Numba


class Device:
    """A Runner without a model. Its device takes DEVICE_SECONDS a step and works on its own.

    The token that is sampled after n tokens of a sequence is n.
    """

    num_blocks, is_async = 64, True
    host_tier: HostTier | None = None

    def __init__(self) -> None:
        self.queue = ThreadPoolExecutor(1)  # one step at a time, in the order of the launches
        self.lengths: dict[int, int] = {}  # row -> computed tokens
        self.sampled = 0

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        for chunk in plan.chunks:
            self.lengths[chunk.row] = chunk.start + len(chunk.token_ids)
        for row in plan.decode_rows:
            self.lengths[row] += 1
        rows = [chunk.row for chunk in plan.chunks if chunk.yields] + plan.decode_rows
        tokens = [self.lengths[row] for row in rows]
        self.sampled += len(tokens)
        done = self.queue.submit(time.sleep, DEVICE_SECONDS)

        def wait() -> StepOutput:
            done.result()
            return StepOutput(tokens)

        return wait


class Host(Observer):
    """An Observer that notes the order of events. It takes HOST_SECONDS for each plan."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.plans = self.commits = self.dropped = self.returned = 0

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is not None:
            self.plans += 1
            self.events.append(f"plan {self.plans}")
            time.sleep(HOST_SECONDS)

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        self.commits += 1
        self.events.append(f"commit {self.commits}")
        self.dropped += len(step.sampling_seqs) - len(updated)


def serve(overlap: bool, params: list[SamplingParams]) -> tuple[Host, int, float]:
    """Run a request for each of `params` -> (host, tokens that were sampled, seconds a step)."""
    config, device, host = EngineConfig(async_scheduling=overlap), Device(), Host()
    inputs = InputProcessor(None, 100, 100, frozenset(), SamplingParams(), 0)
    engine = LLMEngine(config, device, inputs)
    engine.observer = host
    for one in params:
        engine.add_request([0, 0, 0], one)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            assert ids == list(range(3, 3 + len(ids)))  # The same with and without overlap.
            host.returned += len(ids)
    return host, device.sampled, (time.perf_counter() - start) / host.plans


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operators, each about one launch on a GPU, and the calls that Python makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.calls = self.replays = 0
        self.paused = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operators += not (self.paused or operator.is_view)  # A view launches nothing.
        return operator(*args, **(kwargs or {}))

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call") and not self.paused

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Stands in for `cuda_capture`. A replay calls the function again, which is not counted."""
        function()

        def replay() -> None:
            self.replays, self.paused = self.replays + 1, True
            function()
            self.paused = False

        return replay

    def capture_decode(self, decode: Callable[[Tensor], Any], hidden: Tensor) -> DecodeGraphs:
        return DecodeGraphs(decode, hidden, lambda: self.capture)

    def count(self, step: Callable[[], object]) -> tuple[int, int, int]:
        """(operators, Python calls, replays) of a step, which is run four times."""
        self.operators = self.replays = 0
        with self:
            step()
        operators, replays, before, calls = self.operators, self.replays, sys.getprofile(), []
        for _ in range(3):
            self.calls = -1  # The call that ends the profile is counted too.
            sys.setprofile(self.profile)
            step()
            sys.setprofile(before)
            calls.append(self.calls)
        return operators, min(calls), replays  # At times a step also reads the load of the cores.


def embedded_runner(backend: str, dtype: str = "float32", capture: Any = None) -> ModelRunner:
    """A ModelRunner with the embedded model and 8 rows."""
    options = dict(max_num_seqs=8, num_kvcache_blocks=64, attention_backend=backend)
    return make_runner(None, 128, capture, dtype=dtype, **options)


def decoding(runner: ModelRunner, num: int) -> Callable[[], list[int]]:
    """Compute the prompts of `num` sequences. Returns a function that runs a decode step."""
    prompts = [list(range(97, 113 + row)) for row in range(num)]
    tables = [list(range(8 * row + 1, 8 * row + 9)) for row in range(num)]
    runner.run(prompt_plan(prompts, tables))()
    step = decode_plan(num)
    runner.run(step)()  # The first one sends the list of rows to the device.
    return lambda: runner.run(step)().token_ids


def show_overlap(params: list[SamplingParams]) -> None:
    say(f"""First overlap. The real LLMEngine runs two requests on a device that takes
        {DEVICE_SECONDS * 1e3:g} ms for a step, while an observer makes the host take
        {HOST_SECONDS * 1e3:g} ms for each plan. One request ends at a stop token, the other at
        max_tokens.""")
    rows, steps = [], []
    for overlap in (False, True):
        host, sampled, seconds = serve(overlap, params)
        print(f"async_scheduling={overlap}: {', '.join(host.events[:7])} ...")
        assert sampled == host.returned + host.dropped
        times = (f"{seconds * 1e3:.1f}", f"{1 / seconds:.0f}")
        rows.append((overlap, *times, sampled, host.returned, host.dropped))
        steps.append(seconds * 1e3)
    print()
    head = ("ms a step", "steps/s", "tokens sampled", "returned", "dropped")
    show_table(("async_scheduling", *head), rows)
    device, both = DEVICE_SECONDS * 1e3, (DEVICE_SECONDS + HOST_SECONDS) * 1e3
    say(f"""A step takes {steps[0]:.1f} ms without overlap, when the device and the host work in turn
        ({both:g} ms at least), and {steps[1]:.1f} ms with it, when the slower of the two decides
        ({device:g} ms at least). The price: step N+1 is planned when the tokens of step N are counted
        but not known. The scheduler knows then whether a sequence reaches max_tokens, but not that it
        sampled a stop token. That sequence is computed once more, and the token is dropped.""")


def show_graphs() -> ModelRunner:
    """Count what the host does for a decode step with and without graphs."""
    counter = Counter()
    runner = embedded_runner("sdpa", capture=counter.capture_decode)
    tokens, rows = [], []
    for graphs in (None, runner.graphs):
        runner.graphs = graphs  # None is what enforce_eager=True means.
        for num in (1, 8):
            step = decoding(runner, num)
            tokens.append(step())
            rows.append(("yes" if graphs else "no", num, *counter.count(step)))
    assert tokens[:2] == tokens[2:]
    say(f"""Then graphs. This is what the host does for one decode step of the embedded model on the
        plain backend. Graphs are captured for {sorted(runner.graphs.replays)} sequences.""")
    show_table(("graph", "sequences", "torch operators", "Python calls", "replays"), rows)
    say("""An operator is about one kernel launch on a GPU. With a graph, one replay takes the place
        of all operators, and the copy of the tokens to the host remains. No CPU can time what this
        saves: here a stand-in for a graph calls the captured function again, which is not counted.
        (PlainAttention attends to one sequence after another, so its operators grow with the batch.
        The Triton kernel needs one launch for all sequences.)""")
    return runner


def show_layers() -> None:
    """Time a decode step: in plain torch, in the CPU's kernels and, with AMX, in one call."""
    rows = []

    def measure(name: str, runner: ModelRunner) -> None:
        step = decoding(runner, 8)
        operators, calls, _ = Counter().count(step)
        _, seconds = timed(step, 15)
        rows.append((name, f"{seconds * 1e3:.2f}", f"{8 / seconds:,.0f}", operators, calls))

    measure("plain torch, float32", embedded_runner("sdpa"))
    runner, layers = embedded_runner("auto"), optional(LAYERS)
    if type(runner.attention).__name__ != "PlainAttention":
        measure("Numba kernels, float32", runner)
    if layers is not None and (layers.amx.has_amx() or layers.avx512.has_avx512_bf16()):
        runner = embedded_runner("auto", "bfloat16")
        one_call, runner.compiled_model = runner.compiled_model, runner.model
        if one_call is not runner.model:
            measure("Numba kernels, bfloat16", runner)
            runner.compiled_model = one_call
            measure("all layers in one call, bfloat16", runner)
    say("""Last the CPU. Its kernels combine many small operators, because a call costs microseconds
        whatever it computes. A decode step of 8 sequences:""")
    show_table(("layers", "ms a step", "tokens/s", "torch operators", "Python calls"), rows)
    if len(rows) == 1:
        say("The CPU's kernels are missing: Numba is not installed, or is compiling them now.")
    if len(rows) < 4:
        say("""With AMX or AVX512-BF16 one call computes all layers. This processor has neither, or
            the kernels for bfloat16 are not compiled yet, so that call is not timed.""")


def run() -> list[Question]:
    by_token, by_length = SamplingParams(stop_token_ids=[20]), SamplingParams(max_tokens=40)
    show_overlap([by_token, by_length])
    runner = show_graphs()
    show_layers()
    links = [
        link(EngineCore.run_step, "max_in_flight"),
        link(Scheduler.commit, "Status.FINISHED"),
        link(DecodeGraphs.replay, "self.replays[self.size]()"),
    ]
    if (layers := optional(LAYERS)) is not None:
        links.append(link(layers.CompiledLayers.forward, "decode_layers"))
    show_source(*links)
    decoding(runner, 5)
    return [
        Question(
            "Eight requests run with async_scheduling=True. Five end at a stop token and three at "
            "max_tokens. How many sampled tokens are dropped?",
            str(serve(True, [by_token] * 5 + [by_length] * 3)[0].dropped),
            "One for each sequence whose end is found when its next step is in flight. The end at "
            "max_tokens is known when the step is planned.",
            "The table above has one request of each kind. Which of the two had a token dropped?",
        ),
        Question(
            "A step decodes 5 sequences, and there are the graphs that are named above. How many "
            "rows does the GPU compute?",
            str(runner.graphs.size),
            "The batch is padded to the next captured size. Padding rows use the null block.",
            "A graph has a fixed number of rows. Which of the captured numbers is the next after 5?",
        ),
    ]
