"""Runs with a plugin and without, started once and compared by many checks; and what a check is."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from kernel_core.testing.conformance.cases import CASES
from kernel_core.testing.conformance.subject import EngineSubject, Subject
from kernel_core.testing.forked import Ended, server_of

Verdict = Literal["proven", "refused", "declared", "does not apply", "refuted"]
TOLERANCE = 1e-9  # of weights in float64, where sums are taken in another order
TIMEOUT_S = 60.0
SPLIT: dict[str, Any] = {
    "dtype": "float64",
    "dropout": 0.0,
    "across_rows": False,
    "optimizer": "sgd",
    "write_weights": True,
}


class OutcomeError(Exception):
    """Why a run, or a comparison, does not show what it was to show."""


class RefutedError(OutcomeError):
    """What a check was to prove is not so. The message says where and how it shows."""


class RefusedError(OutcomeError):
    """The kernel or the plugin refuses the run, in words."""

    def __init__(self, message: str, conflict: bool) -> None:
        super().__init__(message)
        self.conflict = conflict


class AbsentError(OutcomeError):
    """The plugin works nowhere on this machine, and says why."""


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        check: Its name.
        verdict: ``proven``; ``refused``: such a run is refused, and says why; ``declared``: the plugin says that it is
            otherwise, and the rest was proven; ``does not apply``; ``refuted``.
        detail: In words.
    """

    check: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail}" if self.detail else self.verdict


@dataclass(frozen=True)
class Check:
    """A check: a name, what it proves, and the function, which returns a verdict with its detail, or raises."""

    name: str
    claim: str
    function: Callable[[Kit], tuple[Verdict, str] | None]


CHECKS: dict[str, Check] = {}  # of plugins that answer hooks
ENGINE_CHECKS: dict[str, Check] = {}


def check(
    name: str, claim: str, suite: dict[str, Check] = CHECKS
) -> Callable[[Callable[[Kit], tuple[Verdict, str] | None]], Check]:
    """Register a check under ``name``; ``claim`` says what holds when it is proven. A function that returns None proves it."""

    def register(function: Callable[[Kit], tuple[Verdict, str] | None]) -> Check:
        suite[name] = Check(name, claim, function)
        return suite[name]

    return register


class Kit:
    """Starts runs with a plugin, each once.

    Args:
        subject: The plugin, or an engine.
        full: Whether to try all models and more points, which takes minutes instead of seconds.
    """

    def __init__(self, subject: Subject | EngineSubject, full: bool = False) -> None:
        self._subject, self.full = subject, full
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        self._done: dict[str, list[dict[str, Any]]] = {}
        self.last_folder = ""

    @property
    def checks(self) -> dict[str, Check]:
        """The checks of a plugin of its kind."""
        return CHECKS if isinstance(self._subject, Subject) else ENGINE_CHECKS

    @property
    def subject(self) -> Subject:
        """The plugin that answers hooks."""
        assert isinstance(self._subject, Subject)
        return self._subject

    @property
    def engine(self) -> EngineSubject:
        """The engine."""
        assert isinstance(self._subject, EngineSubject)
        return self._subject

    def close(self) -> None:
        """Delete the files of the runs."""
        self._folder.cleanup()

    def perform(self, check: Check) -> Result:
        """Return what the check finds."""
        try:
            found = check.function(self)
        except RefutedError as error:
            return Result(check.name, "refuted", str(error))
        except AbsentError as error:
            return Result(check.name, "does not apply", f"refused here: {error}")
        except RefusedError as error:
            return Result(check.name, "refuted", f"refused: {error}")
        return Result(check.name, *(found or ("proven", "")))

    # --- runs ------------------------------------------------------------------------------------------------------

    def call(self, function: str, *, world_size: int = 1, folder: str = "", **arguments: Any) -> list[Ended]:
        """Call a function of ``served.py`` in new processes, and return how they ended."""
        server = server_of(str(Path(__file__).with_name("served.py")))
        case = CASES.get(arguments.get("case", ""))
        if case is not None and case.needs:
            server.start(1, "prepare", here=True, modules=_modules_of(case.name))
        if folder:
            arguments["folder"] = folder
        return server.start(world_size, function, TIMEOUT_S, **arguments)

    def train(
        self, *, plugin: bool = True, options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Train in one process and return what was noted."""
        return self.train_ranks(1, plugin=plugin, options=options, **arguments)[0]

    def train_ranks(
        self,
        world_size: int,
        *,
        plugin: bool = True,
        options: Mapping[str, Any] | None = None,
        again: int = 0,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Train on so many ranks and return what was noted on each, with the ``folder`` of the run; once for the same arguments.

        Args:
            world_size: The number of ranks.
            plugin: Whether to train with the plugin.
            options: Its options, if not those of ``example``.
            again: Tells apart runs with the same arguments.
            arguments: Those of ``runs.train``; the default model is the first that the plugin works on.

        Raises:
            RefutedError: it did not end, or failed.
            RefusedError: it was refused.
        """
        if "case" not in arguments:
            arguments["case"] = self.case
        arguments |= {"request": None, "options": None}
        if plugin:
            given = self.subject.options if options is None else options
            arguments |= {"request": self.subject.request, "options": dict(given)}
        key = json.dumps([world_size, again, arguments], sort_keys=True)
        if key not in self._done:
            folder = str(Path(self._folder.name) / f"run-{len(self._done)}")
            self._done[key] = []
            ended = self.call("train", world_size=world_size, folder=folder, **arguments)
            self._done[key] = [{"folder": folder, "output": one.output, **(one.value or {})} for one in ended]
        found = self._done[key]
        self.last_folder = found[0]["folder"] if found else ""
        failed = [(rank, one) for rank, one in enumerate(found) if "losses" not in one and "refused" not in one]
        if failed or not found:
            raise RefutedError(
                "\n".join(f"{_rank(world_size, rank)}{_last_words(one['output'])}" for rank, one in failed)
            )
        for one in found:
            if "refused" in one:
                raise RefusedError(one["refused"], one["conflict"])
        return found

    # --- where the plugin works ------------------------------------------------------------------------------------

    @cached_property
    def case(self) -> str:
        """The first model on which the plugin works and, if it does surgery, does something.

        Raises:
            AbsentError: every model is refused, for want of an accelerator or a package, say.
            RefutedError: there is none for other reasons.
        """
        told = []
        for name in self.cases:
            works, how = self.try_case(name)
            if works:
                return name
            told.append(f"{name}: {how}")
        if all(": refused: " in one for one in told):
            raise AbsentError(told[0].partition(": refused: ")[2])
        raise RefutedError("it works on none of the models. " + " | ".join(told))

    @property
    def cases(self) -> list[str]:
        """The models for which what they need is installed."""
        return [name for name, case in CASES.items() if not case.needs or importlib.util.find_spec(case.needs)]

    def try_case(self, name: str) -> tuple[bool, str]:
        """Return whether the plugin works on a model, and how."""
        try:
            found = self.train(case=name)
        except RefusedError as error:
            return False, f"refused: {error}"
        except RefutedError as error:
            return False, f"fails: {error}"
        if found["no_effect"]:
            return False, "no effect"
        return True, "works"

    def refusal(self, word: str, run: Callable[[], Any]) -> tuple[Verdict, str] | None:
        """Return that ``run`` is refused, if it is; what the plugin says it does not support, by ``word``, must be.

        Raises:
            RefutedError: it is not refused.
            RefusedError: it is, for no reason that the plugin has.
        """
        declared = self.subject.plugin.unsupported.get(word)
        try:
            run()
        except RefusedError as error:
            if declared is None and not error.conflict:
                raise
            return "refused", declared or str(error)
        if declared is not None:
            raise RefutedError(f"it says that it does not support {word}, and such a run is not refused")
        return None

    # --- comparisons -----------------------------------------------------------------------------------------------

    def differences(self, found: Mapping[str, Any], expected: Mapping[str, Any], parts: Sequence[str]) -> str:
        """Return in words how two runs differ in ``parts`` of what was noted, empty if they do not."""
        told = [text for part in parts if (text := _difference(part, found[part], expected[part]))]
        return "; ".join(told)

    def distance(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
        """Return the largest difference of a weight of two runs that wrote them down."""
        one, other = (load_file(Path(run["folder"]) / "weights.safetensors") for run in (found, expected))
        if one.keys() != other.keys():
            return float("inf")
        return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())


def _modules_of(case: str) -> list[str]:
    return [f"transformers.models.{case}.modeling_{case}"]


def _difference(part: str, found: Any, expected: Any) -> str:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        names = [*expected, *(name for name in found if name not in expected)]
        told = [text for name in names if (text := _difference(f"{part}/{name}", found.get(name), expected.get(name)))]
        return told[0] + (f" (and {len(told) - 1} more)" if len(told) > 1 else "") if told else ""
    if isinstance(found, list) and isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            if one != other:
                return _difference(f"{part}[{index}]", one, other)
        return "" if len(found) == len(expected) else f"{part}: {len(found)} entries instead of {len(expected)}"
    return "" if found == expected else f"{part}: {_short(found)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith(("0x", "-0x")):
        value = float.fromhex(value)
    return f"{value!r:.60}"


def _rank(world_size: int, rank: int) -> str:
    return "" if world_size == 1 else f"rank {rank}: "


def _last_words(output: str) -> str:
    """Return the error at the end of what a process printed."""
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return "it did not end, or died without a word"
    starts = [
        index for index, line in enumerate(lines) if line[:1].strip() and ("Error" in line or "Exception" in line)
    ]
    return " ".join(lines[starts[-1] if starts else -1 :])[:400]
