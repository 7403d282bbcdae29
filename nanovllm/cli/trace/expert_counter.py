"""Counts the experts that each step of an engine uses, for a Trace."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any


class ExpertCounter:
    """Counts while it is started. It replaces the method `route` of each mixture of experts.

    `steps` has a list for each step that was launched and not read yet: for each layer with experts
    how many of them the tokens of the step use.
    """

    def __init__(self, runner: Any) -> None:
        """Raise ValueError if the model of this ModelRunner has no experts or is captured."""
        runner = getattr(runner, "runner", runner)  # with several ranks it is in an AgreeingRunner
        layers = getattr(getattr(runner, "model", None), "layers", ())
        self.mlps = [layer.mlp for layer in layers if hasattr(layer.mlp, "route")]
        if not self.mlps:
            raise ValueError("experts=True needs a model with experts; leave it out")
        if runner.graphs is not None:
            raise ValueError(
                "experts=True cannot count in steps that are CUDA graphs; set enforce_eager=True"
            )
        self.num_experts = int(self.mlps[0].config.num_experts)
        self.steps: deque[list[int]] = deque()

    def start(self) -> None:
        for mlp in self.mlps:
            mlp.route = partial(self._route, mlp is self.mlps[0], mlp.route)

    def stop(self) -> None:
        for mlp in self.mlps:
            del mlp.route  # what remains is the method of the class

    def _route(self, is_first: bool, route: Any, x: Any) -> Any:
        weights, choices = route(x)
        if is_first:
            self.steps.append([])
        # On a GPU this waits for the device.
        self.steps[-1].append(len(set(choices.flatten().tolist())))
        return weights, choices
