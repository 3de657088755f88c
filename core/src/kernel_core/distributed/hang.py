"""Where a rank stands, found from its stacks afterwards so that it costs nothing per step; and all ranks in one report."""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kernel_core
from kernel_core.train.state import State

KERNEL = str(Path(kernel_core.__file__).parent) + os.sep
# What the kernel does in a function of its own, by file and qualified name. A phase of "" says nothing: look further out.
AROUND = {
    ("train/lifetime.py", "Lifetime.close"): "close",
    ("train/evaluation.py", "evaluate"): "evaluation",
    ("train/prediction.py", "predict"): "prediction",
}
INSIDE = {
    ("train/loop.py", "training_steps"): "data",
    ("train/ranks.py", "Ranks.in_step"): "data",
    ("train/ranks.py", "Ranks.send"): "collective",
    ("train/ranks.py", "Ranks.receive"): "collective",
    ("train/ranks.py", "Ranks.sum"): "collective",
    ("train/ranks.py", "Ranks.mean_loss"): "collective",
    ("train/state.py", "State.bind_model.<locals>.compute_loss"): "loss",
    ("train/microbatch.py", "_make_run.<locals>.run"): "forward",
    ("train/microbatch.py", "_update_metrics"): "metrics",
    ("engine.py", "Engine.backward"): "backward",
    ("engine.py", "Engine.step"): "step",
    ("train/trainer.py", "Trainer.__init__"): "start",
}
WAITING = ("torch/distributed/", "train/ranks.py", "kernel_core/distributed/")  # files in which a rank waits for others
INNERMOST = 3  # frames that tell groups of ranks apart


def record(state: State) -> dict[str, Any]:
    """Return where this rank stands, as plain data.

    Returns:
        ``rank``, ``host``, ``pid``, ``time``, the counters ``epoch`` and ``batch``, ``phase`` (one of those above, or ``outside``
        of the kernel), ``event`` and ``plugin`` inside a plugin's hook, ``waits`` if it stands in a collective, and ``stacks`` of
        all threads by name.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    here = threading.get_ident()
    stack = _stack(frames[main]) if main in frames else []
    phase, event, plugin = locate(stack, state)
    progress = state.progress
    return {
        "rank": state.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "epoch": progress.epoch,
        "batch": progress.batch,
        "phase": phase,
        "event": event,
        "plugin": plugin,
        "waits": any(part in frame.f_code.co_filename for frame in stack[-INNERMOST:] for part in WAITING),
        "main": names.get(main, "main"),
        "stacks": {
            names.get(ident, str(ident)): [_line(one) for one in _stack(frame)]
            for ident, frame in frames.items()
            if ident != here
        },
    }


def locate(stack: Sequence[FrameType], state: State) -> tuple[str, str | None, str | None]:
    """Return phase, event and plugin of a stack, outermost frame first."""
    plugins = {id(active.plugin): active.id for active in state.plan.plugins}
    event = plugin = None
    for frame in stack:
        owner = plugins.get(id(frame.f_locals.get("self")))
        if owner is not None and frame.f_code.co_name in state.plan.specs:
            event, plugin = frame.f_code.co_name, owner
    around = [phase for frame in stack if (phase := AROUND.get(_key(frame.f_code)))]
    inside = [phase for frame in stack if (phase := INSIDE.get(_key(frame.f_code)))]
    return (around or inside or ["outside"])[-1], event, plugin


def _key(code: CodeType) -> tuple[str, str]:
    return code.co_filename.removeprefix(KERNEL).replace(os.sep, "/"), code.co_qualname


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _line(frame: FrameType) -> str:
    code, number = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} {code.co_name}: {text}"


def write(state: State, folder: Path) -> Path:
    """Write this rank's record into ``folder``; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hang-rank{state.rank}.json"
    path.write_text(json.dumps(record(state), indent=1))
    return path


def where(found: Mapping[str, Any]) -> str:
    """Return in words where a rank stands."""
    words = [str(found["phase"])]
    if found["event"]:
        words.append(f"the hook {found['event']} of {found['plugin']}")
    if found["waits"]:
        words.append("waiting for other ranks")
    return ", ".join(words)


def combine(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one report of all ranks: those that differ from the most first, the stack of each group once."""
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for found in records:
        stack = found["stacks"].get(found["main"], [])
        innermost = tuple(line.partition(": ")[0] for line in stack[-INNERMOST:])
        groups[found["phase"], found["event"], found["plugin"], found["waits"], innermost].append(found)
    # one that waits for others is seldom the one that they wait for
    ordered = sorted(groups.values(), key=lambda group: (group[0]["waits"], len(group), group[0]["rank"]))
    lines = ["The ranks stood still."]
    for group in ordered:
        first = group[0]
        ranks = ", ".join(str(found["rank"]) for found in group)
        are = "rank" if len(group) == 1 else "ranks"
        lines.append(f"\n{are} {ranks}: {where(first)} (epoch {first['epoch']}, batch {first['batch']})")
        lines += [f"    {line}" for line in first["stacks"].get(first["main"], [])]
    return "\n".join(lines)
