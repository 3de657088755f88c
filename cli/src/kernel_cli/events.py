"""``kernel events``: the training loop as pseudo-code, made from the recording of a small run.

A recorder answers every hook and wraps what the kernel calls between them; two iterations of two epochs of two batches
of two microbatches are trained, evaluated and predicted. Pairs of hooks give the nesting, repetition gives the loops.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import torch
from kernel_core import Callback, Evaluator, TrainableModel, Trainer, hookimpl, hooks
from kernel_core.checkpoint.request import SaveRequest
from kernel_core.engine import SingleEngine
from kernel_core.registry.hookmanager import HookManager

LOOPS = {
    "iteration_start": "for each iteration:",
    "epoch_start": "for each epoch:",
    "before_dataloader": "for each batch:",
    "before_forward": "for each microbatch:",
    "eval_start": "for each evaluator that is due:",
    "eval_batch_start": "for each batch of the evaluator:",
    "predict_batch_start": "for each batch:",
}


@dataclass
class Node:
    """A line of the pseudo-code: an event, an action of the kernel, a call of the user's, or a loop."""

    kind: str
    text: str
    closing: str | None = None
    children: list[Node] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the node as plain data."""
        closing = {"closes_with": self.closing} if self.closing else {}
        return {"kind": self.kind, "text": self.text, **closing, "children": [node.to_json() for node in self.children]}


Trace = list[tuple[str, str]]


def _recorder(trace: Trace, folder: str, fail: bool = False) -> Callback:
    def answer(hook: str) -> Callable[..., Any]:
        def record(self: Any) -> Any:
            trace.append(("event", hook))
            if fail and hook == "batch_start":
                raise RuntimeError("a plugin, or the model, raises")
            return {} if hook == "module_replacements" else None

        record.__name__ = hook
        return hookimpl(record)

    def transform_model(self: Any, report: Any) -> None:
        trace.append(("event", "transform_model"))
        report.record("", "", "", "recorded")

    def kernel_addhooks(self: Any, hooks: Any) -> None:
        trace.append(("event", "kernel_addhooks"))

    def checkpoint_folder(self: Any) -> str:
        trace.append(("event", "checkpoint_folder"))
        return folder

    def should_save(self: Any) -> SaveRequest:
        trace.append(("event", "should_save"))
        trace.append(("action", "copy the run; a thread writes the copy"))
        return SaveRequest(folder, "{batch}", latest=None, asynchronous=False)  # so that its end has one place

    methods = {name: answer(name) for name in HookManager().specs}
    special = (transform_model, kernel_addhooks, checkpoint_folder, should_save)
    methods |= {function.__name__: hookimpl(function) for function in special}
    made: Callback = type("Recorder", (Callback,), methods)()
    return made


class _Data(list[Any]):
    trace: Trace

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.trace.append(("action", "state.batch = next(dataloader)"))
            yield batch


class _Metric:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __deepcopy__(self, memo: Any) -> _Metric:
        return _Metric(self.trace)

    def update(self, *args: Any) -> None:
        self.trace.append(("action", "metric.update(batch, outputs)"))

    def compute(self) -> float:
        self.trace.append(("action", "metric.compute()"))
        return 0.0

    def reset(self) -> None:
        pass


class _Model(TrainableModel):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace, self.line = trace, torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        self.trace.append(("action", "state.outputs = model.forward(state.batch)"))
        return self.line(batch)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        self.trace.append(("action", "state.outputs = model.eval_forward(state.batch)"))
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.trace.append(("action", "state.loss = model.loss(state.outputs, state.batch)"))
        return outputs.mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"metric": _Metric(self.trace)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update()


class _Engine(SingleEngine):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def prepare(self, model: Any, device: Any, materialize: Any) -> Any:
        self.trace.append(("action", "model = engine.prepare(model)"))
        return model

    def backward(self, loss: Any) -> None:
        self.trace.append(("action", "engine.backward(state.loss)"))
        super().backward(loss)


class _Optimizer(torch.optim.SGD):
    trace: Trace

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(p.grad is not None for group in self.param_groups for p in group["params"]) or not self.state:
            self.trace.append(("action", "optimizer.zero_grad()"))
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.trace.append(("action", "optimizer.step()"))
        return loss


def record_run() -> Trace:
    """Train, evaluate and predict, then fail, and return what happened in order."""
    with tempfile.TemporaryDirectory(prefix="kernel-events-") as folder:
        return _record_run(folder)


def _record_run(folder: str) -> Trace:
    trace: Trace = []
    data = _Data([torch.ones(4, 2), torch.ones(4, 2)])
    data.trace = trace

    def make_optimizer(parameters: Any) -> _Optimizer:
        trace.append(("action", "make or re-point the optimizers"))
        optimizer = _Optimizer(parameters, lr=0.1)
        optimizer.trace = trace
        return optimizer

    make: Callable[..., Trainer] = partial(
        Trainer,
        train_dataloader=data,
        max_duration="4ep",
        iteration_length=2,
        device_train_microbatch_size=2,
        optimizers=make_optimizer,
        device="cpu",
        seed=0,
        progress_bar=False,
    )
    evaluators = [
        Evaluator(label, data, eval_interval=interval)
        for label, interval in (("a", "1ba"), ("b", "1ba"), ("c", "1ep"), ("d", "1ep"))
    ]
    trace.append(("call", "Trainer(...)"))
    trainer = make(
        model=_Model(trace),
        eval_dataloader=evaluators,
        plugins=[_recorder(trace, folder)],
        parallelism=_Engine(trace),
        run_name="recorded",
        autoresume=True,
    )
    trace.append(("call", "trainer.fit()"))
    trainer.fit()
    trace.append(("call", "trainer.eval()"))
    trainer.eval()
    trace.append(("call", "trainer.predict(dataloader)"))
    trainer.predict(data)
    trace.append(("call", "trainer.close()"))
    trainer.close()
    failing: Trace = []
    try:
        data.trace, kept = failing, trace
        trace = failing
        make(model=_Model(failing), plugins=[_recorder(failing, folder, fail=True)]).fit()
    except RuntimeError:
        kept.append(("call", "when fit raises"))
        kept += failing[failing.index(("event", "fit_failed")) :]
    return kept


def build_tree(trace: Iterable[tuple[str, str]]) -> list[Node]:
    """Nest the recording by the pairs of its hooks and fold what repeats into loops.

    Raises:
        RuntimeError: the run did not fire a hook that hooks.py describes, or fired one it does not know.
    """
    trace = list(trace)
    specs = HookManager().specs
    recorded = {text for kind, text in trace if kind == "event"}
    if recorded != set(specs):
        raise RuntimeError(f"recording and hooks.py differ in {sorted(recorded ^ set(specs))}")
    closers = {name: spec.closes for name, spec in specs.items() if spec.closes}
    root = Node("root", "")
    stack = [root]
    for kind, text in trace:
        if kind == "call":
            stack = [root, Node("call", text)]
            root.children.append(stack[1])
        elif kind == "event" and text in closers and any(node.text == closers[text] for node in stack):
            _close(stack, closers[text], text)
        else:
            node = Node(kind, text)
            stack[-1].children.append(node)
            if kind == "event" and text in closers.values():
                stack.append(node)
    for node in root.children:
        _fold(node)
    return root.children


def _close(stack: list[Node], opening: str, closing: str) -> None:
    while True:
        node = stack.pop()
        if node.text == opening:
            node.closing = closing
            return
        stack[-1].children += node.children  # opened and never closed: what it held follows it
        node.children = []


def _fold(node: Node) -> None:
    for child in node.children:
        _fold(child)
    children, index = node.children, 0
    while index < len(children):
        for period in range(1, (len(children) - index) // 2 + 1):
            block = children[index : index + period]
            end = index + period
            while children[end : end + period] == block:
                end += period
            if end > index + period:
                loop = LOOPS.get(block[0].text)
                children[index:end] = [Node("loop", loop, children=block)] if loop else block
                break
        index += 1
    node.children = children


def render(nodes: Iterable[Node], depth: int = 0) -> list[str]:
    """Return the tree as lines; events are marked with ``*``."""
    lines = []
    for node in nodes:
        pad = "    " * depth
        lines.append(f"{pad}{'* ' if node.kind == 'event' else ''}{node.text}{':' if node.kind == 'call' else ''}")
        inner = depth + (node.kind in ("call", "loop") or bool(node.children))
        lines += render(node.children, inner)
        if node.closing:
            lines.append(f"{pad}* {node.closing}")
    return lines


def describe_hooks() -> list[dict[str, Any]]:
    """Return every hook of hooks.py in its order, with arguments, direction and documentation."""
    described = []
    for name, spec in HookManager().specs.items():
        function = getattr(hooks, name)
        described.append(
            {
                "name": name,
                "arguments": list(inspect.signature(function).parameters),
                "order": spec.order,
                "bands": list(spec.bands),
                "closes": spec.closes,
                "since": spec.since,
                "deprecated": spec.deprecated,
                "replaced_by": spec.replaced_by,
                "documentation": inspect.getdoc(function) or "",
            }
        )
    return described


def show_events(as_json: bool) -> dict[str, Any]:
    """Record, fold and print the loop."""
    tree = build_tree(record_run())
    if not as_json:
        click.echo("\n".join(render(tree)))
        click.echo("\n* an event: answer it with a method of that name marked @hookimpl")
    return {"loop": [node.to_json() for node in tree], "hooks": describe_hooks()}
