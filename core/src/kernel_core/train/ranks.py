"""What the ranks of a run tell one another: a few numbers in each batch, and what they have to agree on between batches.

One vector, the *facts*, is added up over the ranks in every training batch. The weight of the global batch is used on the
device in the same batch; everything else is read on the host when the batch is done, so that nobody waits for a device.
A run of one process has none of this.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from kernel_core.data.spec import DataSpec
from kernel_core.errors import DataError
from kernel_core.train.randomness import forked_randomness
from kernel_core.train.state import State

log = logging.getLogger(__name__)
WEIGHT, SAMPLES, TOKENS, SECONDS, ENDED, STOP, SIGINT, SIGTERM, SETTLED = range(9)
NUM_FACTS = 9


class Ranks:
    """The other ranks, as the loop of this one sees them.

    Attributes:
        factor: What the gradient of this rank's mean loss is multiplied by so that the average over the ranks is the
            gradient of the mean over the global batch: a number, or a scalar on the device.
        counts_evenly: Whether the factor is known to be 1, as it is where all batches count alike.
        absent: Whether this rank has no batch left, and takes part with one that counts nothing.
        read: Samples and tokens of this rank's batch as its loader gave it.
        settled: Whether this rank's part of a checkpoint is written, or has failed.
        all_settled: Whether that holds for every rank; known to all in the same batch.
    """

    def __init__(self, state: State) -> None:
        self._state, self._engine = state, state.engine
        self._device = state.device
        self._facts = torch.zeros(NUM_FACTS, dtype=torch.float64)
        self._sum = torch.zeros(NUM_FACTS, dtype=torch.float64)
        if self._device.type != "cpu":
            self._facts, self._sum = self._facts.pin_memory(), self._sum.pin_memory()
        self._copied: Any = None
        # kept: gloo's thread must not be the one to free a tensor of Python's while that shuts down
        self._last: Any = None
        # asked of the plan, which all ranks have alike, not of the logger, which hands on to nobody on most ranks
        self._reports = any(one.kind == "loggers" for one in state.plan.plugins)
        self._seconds = 0.0  # of the batch before: that of this one is not known when its facts are sent
        self.factor: Any = 1.0
        self.counts_evenly = True
        self.absent = False
        self.read = (0, 0)
        self.settled: Callable[[], bool] = lambda: False
        self.all_settled = False

    # --- in every training batch ---------------------------------------------------------------------------------

    def send(self, weight: Any) -> None:
        """Add up the facts of this batch over the ranks.

        Args:
            weight: How much this rank's batch counts: a number, or a scalar tensor.
        """
        state = self._state
        samples, tokens = self.read
        if self.absent:
            weight = samples = tokens = 0
        interrupt = state.wanted_signal
        facts = self._facts
        facts[:] = torch.tensor(
            [
                0.0 if isinstance(weight, Tensor) else weight,
                samples,
                tokens,
                self._seconds,
                self.absent,
                state.wants_stop,
                interrupt == signal.SIGINT,
                interrupt is not None and interrupt != signal.SIGINT,
                self.settled(),
            ],
            dtype=torch.float64,
        )
        total = facts.to(self._device, non_blocking=True, copy=True)
        if isinstance(weight, Tensor):
            total[WEIGHT] = weight
        self._engine.all_reduce(total)
        if self._device.type == "cpu":
            self._sum = total
            whole = total[WEIGHT].item()
            self.factor = float(weight) * self._engine.world_size / whole if whole else 0.0
            self.counts_evenly = self.factor == 1.0
            return
        self.counts_evenly = False  # known on the device only
        self._sum.copy_(total, non_blocking=True)
        self._copied = torch.get_device_module(self._device).Event()
        self._copied.record()
        self.factor = torch.nan_to_num(weight * self._engine.world_size / total[WEIGHT], nan=0.0, posinf=0.0).float()

    def receive(self, duration_s: float) -> tuple[int, int, float]:
        """Read the facts of this batch; take note of a stop or signal that any rank wants.

        Args:
            duration_s: How long this rank's batch took; told to the others with the next one.

        Returns:
            Samples and tokens over all ranks that read different data, and how long the batch before took on average: the
            same on every rank, so that decisions by time are.
        """
        if self._copied is not None:
            self._copied.synchronize()  # of a copy made before this batch's forward: long done as a rule
        facts = self._sum.tolist()
        self._seconds = duration_s
        self._take_note(facts)
        return *self._counted(facts), facts[SECONDS] / self._engine.world_size

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean loss over the global batch where anybody logs it, else ``loss``.

        A collective that hosts do not wait for, except on a CPU.
        """
        if not self._reports:
            return loss
        share: Any = self.factor / self._engine.world_size
        precise = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        mean = torch.where(torch.as_tensor(share > 0, device=loss.device), precise * share, 0.0)
        self._engine.all_reduce(mean)
        return mean

    # --- between batches: these wait -------------------------------------------------------------------------------

    def sum(self, *numbers: float) -> list[float]:
        """Return each of ``numbers`` added up over the ranks; hosts wait for one another, not for their devices."""
        self._last = total = torch.tensor(numbers, dtype=torch.float64)
        self._engine.all_reduce(total)
        return total.tolist()  # type: ignore[no-any-return]

    def most(self, number: int) -> int:
        """Return the greatest ``number`` of any rank; hosts wait for one another."""
        return int(max(self._of_each(number)))

    def _of_each(self, number: float) -> list[float]:
        """Return ``number`` of every rank, in their order."""
        mine = [0.0] * self._engine.world_size
        mine[self._engine.rank] = float(number)
        return self.sum(*mine)

    def agree_to_stop(self, num_samples: int = 0, num_tokens: int = 0) -> tuple[int, int]:
        """Let a stop or signal that any rank wants take effect on all, now; return samples and tokens of all ranks."""
        interrupt = self._state.wanted_signal
        facts = [0.0] * NUM_FACTS
        facts[SAMPLES], facts[TOKENS] = float(num_samples), float(num_tokens)
        facts[STOP], facts[SETTLED] = float(self._state.wants_stop), float(self.settled())
        facts[SIGINT] = float(interrupt == signal.SIGINT)
        facts[SIGTERM] = float(interrupt is not None and interrupt != signal.SIGINT)
        facts = self.sum(*facts)
        self._take_note(facts)
        return self._counted(facts)

    def _counted(self, facts: list[float]) -> tuple[int, int]:
        copies = self._engine.world_size // self._engine.data_world_size  # ranks that read the same
        return round(facts[SAMPLES]) // copies, round(facts[TOKENS]) // copies

    def _take_note(self, facts: list[float]) -> None:
        self.all_settled = facts[SETTLED] == self._engine.world_size
        if facts[STOP]:
            self._state.stop_now()
        if facts[SIGINT] or facts[SIGTERM]:
            self._state.stop_now(signal.SIGTERM if facts[SIGTERM] else signal.SIGINT)

    def agree_on_length(self, length: int | None, what: str, to_the_last: bool = False) -> int | None:
        """Return how many batches an epoch has on all ranks, None if a rank does not know.

        Where they differ it ends with the batch in which the first rank has none left; ``to_the_last`` with the last of all.
        """
        lengths = self._of_each(-1 if length is None else length)
        if min(lengths) < 0:
            return None
        least, most = min(lengths), max(lengths)
        if least == most or to_the_last:
            return int(most)
        end = int(least) + 1
        left = sum(max(0, one - end) for one in lengths)
        if self._engine.rank == 0:
            log.warning(
                "%s: the ranks have %d to %d batches in an epoch. It ends with batch %d, in which the first rank has none left; "
                "%d batches of the others are left out.",
                what,
                least,
                most,
                end,
                left,
            )
        return end

    def in_step(
        self,
        batches: Iterator[Any],
        data: DataSpec,
        rounds: int | None,
        what: str,
        to_the_last: bool = False,
        stands_in: bool = True,
    ) -> Iterator[Any]:
        """Yield as many batches as every other rank: up to the one in which the first has none left, or ``to_the_last``.

        A rank that has none left gives its last one, or one made of a single sample, with ``absent`` set; or None where it
        need not compute along, so that nothing ``stands_in``. Where ``rounds`` is known nothing is asked; else the ranks ask
        one another before each batch, which the host waits for.

        Raises:
            DataError: a rank has got no batch at all, others have, and there is nothing it could take part with; on all ranks.
        """
        self.absent, last, done = False, None, 0
        while rounds is None or done < rounds:
            batch = next(batches, None)
            self.absent = batch is None
            if batch is None and stands_in:
                batch = self._stand_in(last, data)
            ended = 0.0
            if rounds is None or done == 0:  # later ones have a batch to stand in
                ended, helpless = self.sum(float(self.absent), float(batch is None and stands_in))
                if ended == self._engine.world_size:
                    break
                if helpless:
                    raise DataError(
                        f"{what}: {int(helpless)} of {self._engine.world_size} ranks got no batch at all, and others did. "
                        "Expected at least one batch on each rank. Give fewer ranks, more data, or a DataLoader over a data set "
                        "with indices, of which a sample can stand in."
                    )
            last = batch
            yield batch
            done += 1
            if ended and not to_the_last and rounds is None:
                if self._engine.rank == 0:
                    log.warning(
                        "%s: %d of %d ranks had no batch left after %d; the epoch ends for all, and what is left on others "
                        "is left out.",
                        what,
                        int(ended),
                        self._engine.world_size,
                        done - 1,
                    )
                break
        self.absent = False

    def _stand_in(self, last: Any, data: DataSpec) -> Any:
        """Return a batch to compute along with, None if there is none."""
        batch = a_sample_of(data.dataloader) if last is None else None
        if batch is None or data.batch_transforms is None:
            return last if batch is None else batch
        return data.batch_transforms(batch)


def a_sample_of(loader: Any) -> Any:
    """Return a batch of the first sample of a DataLoader's data set, None where there is none to be had by index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not len(loader.dataset):  # type: ignore[arg-type]
        return None
    collate: Callable[[Any], Any] = loader.collate_fn
    with forked_randomness("stand-in"):  # what it draws must not shift what this rank draws
        return collate([loader.dataset[0]])
