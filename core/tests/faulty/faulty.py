"""Plugins that are broken on purpose, each in one way; the docstring says how."""

import os
import random
import threading
from typing import Any

import torch
from kernel_core import Algorithm, Callback, LoggerDestination, State, hookimpl
from torch import nn


def gradients(state: State) -> list[torch.Tensor]:
    return [one.grad for one in state.model.parameters() if one.grad is not None]


def scale(state: State, factor: float) -> None:
    for gradient in gradients(state):
        gradient.mul_(factor)


class ForgetsItsState(Algorithm):
    """Counts batches, trains by the count, and does not save it."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 1 + 0.1 * self.count)

    @hookimpl
    def batch_end(self) -> None:
        self.count += 1


class LoadsHalfItsState(ForgetsItsState):
    """Saves two numbers and loads one."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "doubled": getattr(self, "doubled", 0)}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]

    @hookimpl
    def batch_end(self) -> None:
        self.count += 1
        self.doubled = 2 * self.count


class DrawsFromTorch(Algorithm):
    """Draws from torch's global generator."""

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 1 + 0.1 * float(torch.rand(())))


class DrawsFromPython(Callback):
    """Draws from Python's global generator."""

    affects_training = False

    @hookimpl
    def epoch_end(self) -> None:
        self.number = random.random()


class DrawsOnOneRank(Callback):
    """Draws on the second rank only."""

    affects_training = False

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.rank == 1:
            torch.rand(())


class PatchesTorch(Algorithm):
    """Puts a function of its own into torch and leaves it there."""

    @hookimpl
    def fit_start(self) -> None:
        held = torch.nn.functional.relu
        torch.nn.functional.relu = lambda *arguments, **options: held(*arguments, **options)  # type: ignore[assignment]


class LeavesAHook(Callback):
    """Hangs a hook on the model and leaves it there."""

    affects_training = False

    @hookimpl
    def fit_start(self, state: State) -> None:
        state.model.register_forward_hook(lambda *_: None)


class LeavesAWrapper(Algorithm):
    """Puts a function around the model's forward and leaves it there."""

    @hookimpl
    def fit_start(self, state: State) -> None:
        held = state.model.forward
        state.model.forward = lambda batch: held(batch)


class LeavesAThread(Callback):
    """Starts a thread that nobody ends."""

    affects_training = False

    @hookimpl
    def fit_start(self) -> None:
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, daemon=True, name="left over").start()


class LeavesAFile(Callback):
    """Opens a file that nobody closes."""

    affects_training = False

    @hookimpl
    def fit_start(self) -> None:
        self.file = open("left.txt", "w")  # noqa: SIM115


class ChangesTheDtype(Algorithm):
    """Changes torch's default dtype and leaves it so."""

    @hookimpl
    def fit_end(self) -> None:
        torch.set_default_dtype(torch.float64)


class ClosesOnce(Callback):
    """Cannot be closed twice."""

    affects_training = False

    @hookimpl
    def fit_start(self) -> None:
        self.things = [1]

    @hookimpl
    def close(self) -> None:
        self.things.pop()


class WrongOrder(Algorithm):
    """Scales gradients, and wants to after they are clipped, which wants to be after all that scale them."""

    roles = {"scales-gradients"}
    after = {"gradient_clipping"}

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 2.0)


class UnknownRole(Algorithm):
    """Has a role that nobody has heard of."""

    roles = {"makes-coffee"}

    @hookimpl
    def fit_start(self) -> None:
        pass


class DoesNotCommute(Algorithm):
    """Says that it commutes with clipping, and does not."""

    commutes = {"gradient_clipping"}

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 100.0)


class PartsWhatIsShared(Algorithm):
    """Gives a layer weights of its own where it shared them with another."""

    @hookimpl
    def transform_model(self, model: Any, report: Any) -> None:
        if hasattr(model, "model") and hasattr(model.model, "lm_head"):
            head = model.model.lm_head
            head.weight = nn.Parameter(head.weight.detach().clone())
            report.record("model.lm_head", "shared", "its own", "parted")


class ChangesWithoutAWord(Algorithm):
    """Changes the model and reports nothing."""

    @hookimpl
    def transform_model(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.extra = nn.Identity()


class Branches(nn.Module):
    """Computes one thing or another, as the numbers are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.sum() > 0 else x.relu() * 1.0


class CannotBeExported(Algorithm):
    """Puts modules into the model whose control flow depends on numbers."""

    @hookimpl
    def module_replacements(self) -> Any:
        return {nn.ReLU: lambda module, path: Branches()}


class CollectiveOnOneRank(Callback):
    """Lets one rank wait for the other, which does not come."""

    affects_training = False

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.rank == 1:
            torch.distributed.all_reduce(torch.ones(1))


class DifferentCollectives(Callback):
    """Lets the ranks issue collectives of different shapes."""

    affects_training = False

    @hookimpl
    def epoch_end(self, state: State) -> None:
        if state.world_size > 1:
            torch.distributed.all_reduce(torch.ones(1 + state.rank))


class CommitsTooEarly(ForgetsItsState):
    """Counts a batch before it is done, so that one that is tried again counts twice."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]

    @hookimpl
    def before_train_batch(self) -> None:
        self.count += 1

    @hookimpl
    def batch_end(self) -> None:
        pass


class DependsOnTheSplit(Algorithm):
    """Bounds gradients after each microbatch."""

    @hookimpl
    def after_backward(self, state: State) -> None:
        for gradient in gradients(state):
            gradient.clamp_(-0.01, 0.01)


class IsNotNeutral(Algorithm):
    """Names neutral options and does something all the same.

    Args:
        factor: Of the gradients.
    """

    neutral = {"factor": 1.0}

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, self.factor + 1e-3)


class WatcherThatMeddles(Callback):
    """Says that it watches only, and stops training."""

    affects_training = False

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.progress.batch == 5:
            state.stop_training()


class IsNeverTheSame(Algorithm):
    """Trains by something that no seed decides."""

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 1 + int.from_bytes(os.urandom(2), "little") / 2**16)


class MeddlesInEvaluations(Algorithm):
    """Changes the weights when they are evaluated, and does not put them back."""

    @hookimpl
    def eval_start(self, state: State) -> None:
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.mul_(0.9)


class BeginsAnewInEachFit(Algorithm):
    """Counts batches from zero whenever a fit begins."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def fit_start(self) -> None:
        self.count = 0

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 1 + 0.1 * self.count)

    @hookimpl
    def batch_end(self) -> None:
        self.count += 1


class TakesAnything(Algorithm):
    """Takes any option."""

    def __init__(self, **others: Any) -> None:
        pass

    @hookimpl
    def fit_start(self) -> None:
        pass


class UndescribedOption(Algorithm):
    """Has an option that it does not describe."""

    def __init__(self, secret: int = 1) -> None:
        pass

    @hookimpl
    def fit_start(self) -> None:
        pass


class RanksDiverge(Algorithm):
    """Changes gradients on one rank after they were averaged."""

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        scale(state, 1.0 + state.rank)


class LooksAtItsPartOnly(Algorithm):
    """Bounds gradients by the norm of what this rank has of them."""

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        parts = [one.to_local() if hasattr(one, "to_local") else one for one in gradients(state)]
        norm = torch.sqrt(sum(part.square().sum() for part in parts))  # type: ignore[arg-type]
        for part in parts:
            part.div_(norm + 1)


class UnknownWord(Algorithm):
    """Says that it does not support something that does not exist."""

    unsupported = {"fdsp": "it is misspelt"}

    @hookimpl
    def fit_start(self) -> None:
        pass


class UnknownHook(Algorithm):
    """Answers a hook that does not exist."""

    @hookimpl
    def batch_ended(self) -> None:
        pass


class FailsInSilence(Algorithm):
    """Fails on every model with an error that says nothing to a user."""

    @hookimpl
    def batch_start(self, state: State) -> None:
        raise KeyError("inputs")


class TakesNumbersOnly(LoggerDestination):
    """Cannot write down a table."""

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        self.total = sum(value for row in rows for value in row)


class EachRankForItself(Algorithm):
    """Keeps on each rank what that rank has seen, and does not say so, so that all ranks load what the first one kept."""

    def __init__(self) -> None:
        self.seen = 0.0

    @hookimpl
    def batch_end(self, state: State) -> None:
        self.seen += float(state.batch[0].sum())

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]
