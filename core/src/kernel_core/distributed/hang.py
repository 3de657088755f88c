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
# What the kernel does in a function of its own, by file and qualified name. Those around others win.
AROUND = {
    ("train/lifetime.py", "Lifetime.close"): "close",
    ("train/evaluation.py", "evaluate"): "evaluation",
    ("train/prediction.py", "predict"): "prediction",
    ("train/trainer.py", "Trainer.__init__"): "start",
}
INSIDE = {
    ("train/trainer.py", "Trainer.steps"): "start",
    ("train/loop.py", "training_steps"): "data",
    ("train/ranks.py", "Ranks.in_step"): "data",
    ("train/loop.py", "_log_batch"): "log",
    ("train/loop.py", "_finish_train_metrics"): "metrics",
    ("train/evaluation.py", "Evaluations.run_due"): "evaluation",
    ("train/step.py", "make_run_batch.<locals>.run_batch"): "step",
    ("train/microbatch.py", "make_train_batch.<locals>.train_batch"): "step",
    ("train/microbatch.py", "_make_run.<locals>.run"): "forward",
    ("train/microbatch.py", "_update_metrics"): "metrics",
    ("train/state.py", "State.bind_model.<locals>.compute_loss"): "loss",
    ("engine.py", "Engine.backward"): "backward",
    ("engine.py", "Engine.step"): "step",
}
# Where the kernel itself waits for other ranks. In in_step it waits for its loader, or in sum.
WAITS = {
    ("train/ranks.py", "Ranks.send"),
    ("train/ranks.py", "Ranks.receive"),
    ("train/ranks.py", "Ranks.mean_loss"),
    ("train/ranks.py", "Ranks.sum"),
    ("distributed/connection.py", "Connection.agree"),
    ("distributed/connection.py", "Connection.gather"),
    ("distributed/connection.py", "Connection._read"),
    ("distributed/connection.py", "connect"),
    ("distributed/engine.py", "DistributedEngine.check_same"),
    ("distributed/engine.py", "DistributedEngine.align"),
}
# Modules of torch whose frames are on a stack only while it communicates; those of wrappers around a model are not among them.
COLLECTIVES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
)
INNERMOST = 3  # frames that tell groups of ranks apart


def record(state: State, still_s: float = 0.0) -> dict[str, Any]:
    """Return where this rank stands, as plain data.

    Args:
        state: The run.
        still_s: How long nothing has moved.

    Returns:
        ``rank``, ``world_size``, ``host``, ``pid``, ``time``, ``still_s``, the counters ``epoch`` and ``batch``, ``phase``
        (``data``, ``forward``, ``loss``, ``backward``, ``step``, ``collective``, ``metrics``, ``log``, ``evaluation``,
        ``prediction``, ``checkpoint``, ``close``, ``start``, the name of a hook, or ``outside`` of the kernel), ``event`` and
        ``plugin`` inside a plugin, ``waits`` if it stands in a collective, ``main`` and ``stacks``: of all threads by name,
        innermost last.
    """
    frames = sys._current_frames()
    names = _names()
    main, stack = _trainer(frames)
    phase, event, plugin = locate(stack, state)
    here = threading.get_ident()
    return {
        "rank": state.rank,
        "world_size": state.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "still_s": round(still_s, 1),
        "epoch": state.progress.epoch,
        "batch": state.progress.batch,
        "phase": phase,
        "event": event,
        "plugin": plugin,
        "waits": waits(stack),
        "main": names.get(main, str(main)),
        "stacks": {
            names.get(ident, str(ident)): [_line(one) for one in _stack(frame)]
            for ident, frame in frames.items()
            if ident != here
        },
    }


def _names() -> dict[int | None, str]:
    """Return the name of each thread; a name that several have gets a number."""
    found: dict[int | None, str] = {}
    for thread in threading.enumerate():
        found[thread.ident] = thread.name if thread.name not in found.values() else f"{thread.name} ({thread.ident})"
    return found


def _trainer(frames: Mapping[int, FrameType]) -> tuple[int | None, list[FrameType]]:
    """Return the thread that trains and its stack, outermost frame first: the main one, unless the kernel runs in another."""
    stacks = {ident: _stack(frame) for ident, frame in frames.items() if ident != threading.get_ident()}
    main = threading.main_thread().ident
    at_work = [ident for ident, stack in stacks.items() if any(_key(frame.f_code) in _PHASES for frame in stack)]
    ident = main if main in at_work or not at_work else at_work[0]
    return ident, stacks.get(ident, []) if ident is not None else []


_PHASES = {**AROUND, **INSIDE}


def locate(stack: Sequence[FrameType], state: State) -> tuple[str, str | None, str | None]:
    """Return phase, event and plugin of a stack, outermost frame first."""
    plugins = {id(active.plugin): active.id for active in state.plan.plugins}
    event = plugin = None
    is_hook = False
    for frame in stack:
        name = frame.f_code.co_name
        owner = plugins.get(id(frame.f_locals.get("self"))) if "self" in frame.f_code.co_varnames else None
        if owner is not None and (name in state.plan.specs or not is_hook):
            event, plugin, is_hook = name, owner, name in state.plan.specs
    if event is not None and is_hook:
        return ("checkpoint" if event.endswith("_checkpoint") else event), event, plugin
    around = [phase for frame in stack if (phase := AROUND.get(_key(frame.f_code)))]
    if not around and waits(stack):
        return "collective", event, plugin
    inside = [phase for frame in stack if (phase := _inside(frame.f_code, state))]
    return (around or inside or ["outside"])[-1], event, plugin


def _inside(code: CodeType, state: State) -> str | None:
    """Return the phase of a function that kernel or engine has for it."""
    engine = type(state.engine)
    own = {engine.backward.__code__: "backward", engine.step.__code__: "step", engine.reduce_gradients.__code__: "step"}
    return own.get(code) or INSIDE.get(_key(code))


def waits(stack: Sequence[FrameType]) -> bool:
    """Say whether the innermost frames, up to the first that has a phase, belong to a collective."""
    for frame in reversed(stack):
        key = _key(frame.f_code)
        if key in WAITS or frame.f_globals.get("__name__") in COLLECTIVES:
            return True
        if key in _PHASES:
            return False
    return False


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


def write(state: State, folder: Path, still_s: float = 0.0) -> Path:
    """Write this rank's record into ``folder``; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hang-rank{state.rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record(state, still_s), indent=1))
    part.replace(path)  # whoever reads it meanwhile finds all of it or nothing
    return path


def where(found: Mapping[str, Any]) -> str:
    """Return in words where a rank stands."""
    words = [str(found["phase"])]
    if found["event"]:
        hook = "the hook " if found["phase"] in (found["event"], "checkpoint") else ""
        words.append(f"in {hook}{found['event']} of the plugin {found['plugin']}")
    if found["waits"] and found["phase"] != "collective":
        words.append("waiting for other ranks")
    return ", ".join(words)


def in_words(found: Mapping[str, Any]) -> str:
    """Return ``where`` as the end of a sentence."""
    return "outside of the trainer" if found["phase"] == "outside" else f"in {where(found)}"


def combine(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one report of all ranks: those that differ from the most first, the stack of each group once."""
    if not records:
        return "No rank has left a record of where it stood."
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for found in sorted(records, key=lambda one: one["rank"]):
        stack = found["stacks"].get(found["main"], [])
        innermost = tuple(line.partition(": ")[0] for line in stack[-INNERMOST:])
        groups[found["phase"], found["event"], found["plugin"], found["waits"], innermost].append(found)
    # one that waits for others is seldom the one that they wait for
    ordered = sorted(groups.values(), key=lambda group: (group[0]["waits"], len(group), group[0]["rank"]))
    missing = sorted(set(range(records[0]["world_size"])) - {found["rank"] for found in records})
    lines = [_headline(ordered)]
    if missing:
        lines.append(f"{_ranks(missing)} left no record: ended before, or in code that lets no other thread run.")
    for group in ordered:
        first = group[0]
        ranks = _ranks([found["rank"] for found in group])
        lines.append(f"\n{ranks}: {where(first)} (epoch {first['epoch']}, batch {first['batch']}, {first['time']})")
        lines += [f"    {line}" for line in first["stacks"].get(first["main"], [])]
    return "\n".join(lines)


def _headline(groups: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Say in one line which ranks differ from the others."""
    if len(groups) == 1:
        return f"The ranks stood still, all {in_words(groups[0][0])}."
    *few, most = groups
    parts = [f"{_ranks([one['rank'] for one in group])} {in_words(group[0])}" for group in few]
    return f"The ranks stood still: {'; '.join(parts)}; the others {in_words(most[0])}."


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
