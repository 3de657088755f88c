"""What the kernel adds to a step, against a hand-written loop in the same process.

    python bench/step_overhead.py [--pairs 9] [--json]

Two workloads: a stub step without arithmetic (µs added per step), and an MLP 64-64-10 with batch 32 and SGD for 2000
steps (ratio; final weights must be bit-equal). Each with 0, 5 and 20 plugins that answer no per-batch event, the MLP also
with 5 that answer four each. Kernel and loop are run alternately; medians over the pairs, in wall and CPU time.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from torch import nn

STEPS = 2000


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


class Mlp(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def plugins(idle: int, busy: int = 0) -> list[Callback]:
    return [Idle(id=f"idle_{n}") for n in range(idle)] + [Busy(id=f"busy_{n}") for n in range(busy)]


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    taken = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    return taken


def stub_loop(data: list[Any]) -> None:
    model, optimizer = StubModel(), StubOptimizer()
    for batch in data:
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()


def stub_kernel(data: list[Any], active: list[Callback]) -> Trainer:
    return Trainer(
        model=StubModel(),
        train_dataloader=data,
        max_duration=f"{len(data)}ba",
        optimizers=lambda parameters: StubOptimizer(),
        plugins=active,
        device="cpu",
        progress_bar=False,
    )


def mlp_loop(data: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return net


def mlp_kernel(data: list[Any], active: list[Callback]) -> Trainer:
    torch.manual_seed(0)
    model = Mlp()
    return Trainer(
        model=model,
        train_dataloader=data,
        max_duration=f"{len(data)}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=active,
        device="cpu",
        progress_bar=False,
    )


def compare(loop: Callable[[], Any], make: Callable[[], Trainer], pairs: int) -> dict[str, tuple[float, float, float]]:
    """Median, least and greatest: µs added per step and ratio, wall and CPU."""
    added_wall, added_cpu, ratio_wall, ratio_cpu = [], [], [], []
    for pair in range(pairs + 1):
        trainer = make()
        runs = {"kernel": lambda trainer=trainer: trainer.fit(), "loop": loop}
        order = ("kernel", "loop") if pair % 2 else ("loop", "kernel")
        taken = {name: measure(runs[name]) for name in order}
        trainer.close()
        if pair == 0:
            continue  # the first pair warms up
        (kernel_wall, kernel_cpu), (loop_wall, loop_cpu) = taken["kernel"], taken["loop"]
        added_wall.append((kernel_wall - loop_wall) / STEPS * 1e6)
        added_cpu.append((kernel_cpu - loop_cpu) / STEPS * 1e6)
        ratio_wall.append(kernel_wall / loop_wall)
        ratio_cpu.append(kernel_cpu / loop_cpu)
    series = {
        "us_added_wall": added_wall,
        "us_added_cpu": added_cpu,
        "ratio_wall": ratio_wall,
        "ratio_cpu": ratio_cpu,
    }
    return {name: (statistics.median(values), min(values), max(values)) for name, values in series.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stub_data = [torch.zeros(32, 1)] * STEPS
    generator = torch.Generator().manual_seed(1)
    mlp_data = [
        (torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)) for _ in range(STEPS)
    ]
    net, trainer = mlp_loop(mlp_data), mlp_kernel(mlp_data, [])
    trainer.fit()
    if not all(torch.equal(a, b) for a, b in zip(net.parameters(), trainer.state.model.parameters(), strict=True)):
        sys.exit("the MLP's weights differ from those of the hand-written loop")
    results = {}
    for idle, busy in ((0, 0), (5, 0), (20, 0), (0, 5)):
        label = f"{idle} idle, {busy} busy plugins"
        make_stub = lambda idle=idle, busy=busy: stub_kernel(stub_data, plugins(idle, busy))  # noqa: E731
        make_mlp = lambda idle=idle, busy=busy: mlp_kernel(mlp_data, plugins(idle, busy))  # noqa: E731
        results[f"stub, {label}"] = compare(lambda: stub_loop(stub_data), make_stub, arguments.pairs)
        results[f"mlp, {label}"] = compare(lambda: mlp_loop(mlp_data), make_mlp, arguments.pairs)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{arguments.pairs} pairs of {STEPS} steps; median [least, greatest]; MLP weights bit-equal")
    for label, figures in results.items():
        shown = "  ".join(f"{name} {m:7.2f} [{low:6.2f}, {high:6.2f}]" for name, (m, low, high) in figures.items())
        print(f"{label:32} {shown}")


if __name__ == "__main__":
    main()
