"""What a framework adds to a training step, against a hand-written loop in the same process.

    make bench                                                  # sets up .venv-bench and runs every benchmark
    .venv-bench/bin/python bench/step_overhead.py               # 9 pairs
    .venv-bench/bin/python bench/step_overhead.py --systems kernel,ignite --pairs 15 --terminal

On one thread, alternated with the loop:

* the kernel on a stub step without arithmetic, with no plugin, with 20 that answer no per-batch event ("idle") and with 5
  that answer four each ("busy");
* every system on an MLP 64-64-10 (batches of 32, SGD, 2000 steps), bare, and the kernel with those plugins too;
* the same with progress bar, file logger and the loss logged, as each has them by default, the output going nowhere or,
  with ``--terminal``, to a terminal that nobody sees. Away from a terminal the kernel's bar is a line every 5 seconds, while
  the others draw theirs all the same.

The loop never logs. The clock starts at the tenth batch and stops when the run has ended. All weights must end bit-equal
to the loop's.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from systems import RAW, Figure, Fit, Taken, added, alternate, chosen, compare, kernel, mlp_task, versions

STEPS = 2000
PLUGINS = {"no plugin": (0, 0), "20 idle plugins": (20, 0), "5 busy plugins": (0, 5)}  # number of idle, of busy


class Idle(Callback):
    @hookimpl
    def fit_start(self) -> None:
        pass


class Busy(Callback):
    @hookimpl
    def batch_start(self) -> None:
        pass

    @hookimpl
    def before_forward(self) -> None:
        pass

    @hookimpl
    def after_loss(self) -> None:
        pass

    @hookimpl
    def batch_end(self) -> None:
        pass


def plugins(idle: int, busy: int) -> list[Callback]:
    return [Idle(id=f"idle_{n}") for n in range(idle)] + [Busy(id=f"busy_{n}") for n in range(busy)]


class StubLoss:
    def backward(self) -> None:
        pass

    def detach(self) -> "StubLoss":
        return self


LOSS = StubLoss()


class StubModel(TrainableModel):
    def forward(self, batch: Any) -> Any:
        return batch

    def loss(self, outputs: Any, batch: Any) -> Any:
        return LOSS


class StubOptimizer:
    param_groups: list[dict[str, Any]] = []

    def zero_grad(self) -> None:
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return closure() if closure is not None else None


def timed(run: Callable[[], Any], steps: int) -> Taken:
    gc.collect()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    taken = Taken((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)
    gc.enable()
    return taken


def stub_loop(data: list[Any]) -> Taken:
    model, optimizer = StubModel(), StubOptimizer()

    def run() -> None:
        for batch in data:
            optimizer.zero_grad()
            loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()

    return timed(run, len(data))


def stub_kernel(data: list[Any], idle: int, busy: int) -> Taken:
    with Trainer(
        model=StubModel(),
        train_dataloader=data,
        max_duration=f"{len(data)}ba",
        optimizers=lambda parameters: StubOptimizer(),
        plugins=plugins(idle, busy),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        return timed(trainer.fit, len(data))


def compare_stub(steps: int, pairs: int) -> dict[str, dict[str, Any]]:
    data = [torch.zeros(32, 1)] * steps
    measures = {
        name: (partial(stub_kernel, data, idle, busy), partial(stub_loop, data))
        for name, (idle, busy) in PLUGINS.items()
    }
    return {
        name: {**added(taken), "us_raw_cpu": Figure.of([raw.cpu * 1e6 for _, raw in taken])}
        for name, taken in alternate(measures, pairs).items()
    }


def kernel_with(idle: int, busy: int) -> Callable[..., None]:
    return lambda *arguments: kernel(*arguments, plugins=plugins(idle, busy))


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"{title}\n{'':19}{'µs added, CPU':26}{'µs added, wall':26}{'ratio, CPU':24}µs by hand, CPU")
    for name, row in results.items():
        columns = [row["us_added_cpu"], row["us_added_wall"], row["ratio_cpu"], row["us_raw_cpu"]]
        weights = "" if row.get("bit_equal", True) else "WEIGHTS DIFFER FROM THE LOOP'S"
        print(f"{name:19}{columns[0]!s:26}{columns[1]!s:26}{columns[2]!s:24}{columns[3]!s:26}{weights}".rstrip())
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs for each figure, after one to warm up")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--systems", help="some of kernel,ignite,fabric,accelerate,lightning,hf; the default is all")
    parser.add_argument("--terminal", action="store_true", help="draw progress bars as on a terminal")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs, systems = arguments.pairs, chosen(arguments.systems)
    task = mlp_task(arguments.steps)
    results: dict[str, Any] = {}

    def part(title: str, measured: dict[str, dict[str, Any]]) -> None:
        results[title] = measured
        if not arguments.json:
            show(title, measured)

    if not arguments.json:
        print(f"{pairs} pairs of {arguments.steps} steps, median [least, greatest]; {versions([RAW, *systems])}\n")
    if any(system.fit is kernel for system in systems):
        part("the kernel on a stub step", compare_stub(arguments.steps, pairs))
    bare: dict[str, Fit] = {}
    for system in systems:
        bare[system.name] = system.fit
        if system.fit is kernel:
            bare |= {f"  {name}": kernel_with(*counts) for name, counts in PLUGINS.items() if any(counts)}
    part("MLP, bare", compare(task, bare, pairs))
    where = "a terminal" if arguments.terminal else "output going nowhere"
    loud = {system.name: system.fit for system in systems if system.logs}
    part(f"MLP, bar and loss on, {where}", compare(task, loud, pairs, True, arguments.terminal))
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
