"""Real models against hand-written loops over the same sampler: losses and weights bit for bit; and no device syncs."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from kernel_core.data.sampler import ResumableBatchSampler, ResumableSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 2, 8


class Wrapped(TrainableModel):
    """A bare module and a loss, as a trainer wants them."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        return self._loss(self.module, batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs


def _mlp() -> tuple[nn.Module, TensorDataset, Any]:
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(30, 6), torch.randint(3, (30,)))
    return net, data, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])


def _resnet() -> tuple[nn.Module, TensorDataset, Any]:
    compat = pytest.importorskip("kernel_plugin_torchvision")
    net = compat.import_torchvision().models.resnet18(num_classes=3)
    data = TensorDataset(torch.randn(18, 3, 32, 32), torch.randint(3, (18,)))
    return net, data, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])


def _gpt2() -> tuple[nn.Module, TensorDataset, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    data = TensorDataset(torch.randint(64, (30, 16)))
    return net, data, lambda net, batch: net(input_ids=batch[0], labels=batch[0]).loss


MODELS = {"mlp": _mlp, "resnet18": _resnet, "gpt2": _gpt2}


def loader(data: TensorDataset, seed: int) -> tuple[DataLoader[Any], ResumableSampler]:
    order = ResumableSampler(data, shuffle=True, seed=seed)
    return DataLoader(data, batch_sampler=ResumableBatchSampler(order, BATCH)), order


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_for_bit_that_of_a_hand_written_loop(name: str) -> None:
    torch.manual_seed(7)
    net, data, compute = MODELS[name]()
    start = {key: value.clone() for key, value in net.state_dict().items()}

    # by hand
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    batches, order = loader(data, seed=3)
    losses: list[Tensor] = []
    torch.manual_seed(3)
    net.train()
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            loss = compute(net, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
    by_hand = {key: value.clone() for key, value in net.state_dict().items()}

    # by the kernel: over a plain shuffling loader, which gets the same sampler
    net.load_state_dict(start)
    seen: list[Tensor] = []

    class Watch(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            seen.append(state.loss)

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    trainer = Trainer(
        model=Wrapped(net, compute),
        train_dataloader=DataLoader(data, batch_size=BATCH, shuffle=True),
        max_duration=EPOCHS,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        callbacks=Watch(),
        seed=3,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    assert torch.equal(torch.stack(seen), torch.stack(losses))
    assert all(torch.equal(value, by_hand[key]) for key, value in net.state_dict().items())


def test_muon_on_matrices_and_adamw_on_the_rest_are_one_run() -> None:
    """Two optimizers, one with two groups of different rates, one evaluation: as by hand."""

    def build(net: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in net.parameters() if p.ndim == 2]
        first, last = [p for p in net.parameters() if p.ndim != 2]
        groups = [{"params": [first], "lr": 0.01}, {"params": [last], "lr": 0.1, "weight_decay": 0.0}]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups)]

    torch.manual_seed(7)
    net, data, compute = _mlp()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    optimizers = build(net)
    batches, _ = loader(data, seed=3)
    torch.manual_seed(3)
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        compute(net, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    by_hand = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    Trainer(
        model=Wrapped(net, compute),
        train_dataloader=DataLoader(data, batch_size=BATCH, shuffle=True),
        max_duration="1ep",
        optimizers=build(net),
        seed=3,
        device="cpu",
        progress_bar=False,
    ).fit()
    assert all(torch.equal(value, by_hand[key]) for key, value in net.state_dict().items())


class Tokens(TrainableModel):
    """Predicts labels of which -100 do not count, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()

    def forward(self, batch: Any) -> Any:
        return self.net(batch["input_ids"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def loss_weight(self, batch: Any) -> Any:
        return (batch["labels"] != -100).sum()


@pytest.mark.parametrize("number", range(8))
def test_accumulation_is_exact_for_ragged_batches(number: int) -> None:
    """Random rows, padding and microbatch sizes in float64: the gradient is that of one big batch, to 1e-10."""
    generator = torch.Generator().manual_seed(1000 * int(os.environ.get("KERNEL_TEST_SEED", "0")) + number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows, length = draw(5, 14), draw(3, 9)
    ids = torch.randint(11, (rows, length), generator=generator)
    labels = torch.randint(11, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, draw(0, length + 1) :] = -100  # some rows count not at all
    labels[0, 0] = 1
    batch = {"input_ids": ids, "labels": labels}
    model = Tokens()
    expected = torch.autograd.grad(model.loss(model(batch), batch), list(model.parameters()))
    kept: list[Tensor] = []

    class Keep(Callback):
        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            kept.extend(p.grad.clone() for p in state.model.parameters())

    Trainer(
        model=model,
        train_dataloader=[batch],
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=Keep(),
        device_train_microbatch_size=draw(1, rows),
        device="cpu",
        progress_bar=False,
    ).fit()
    for one, other in zip(kept, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


READING = ["item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"]


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_nothing_is_read_from_the_device_in_the_steady_state(
    monkeypatch: pytest.MonkeyPatch, precision: str, microbatch: int | None
) -> None:
    """On a CPU by watching everything that hands a tensor's value to Python, with the plugins people leave on."""
    read: list[str] = []

    class Steady(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            if state.progress.batch != 3:
                return
            for name in READING:
                original = getattr(Tensor, name)

                def watched(
                    self: Tensor, *args: Any, _original: Any = original, _name: str = name, **options: Any
                ) -> Any:
                    read.append(_name)
                    return _original(self, *args, **options)

                monkeypatch.setattr(Tensor, name, watched)
            monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: read.append("synchronize"))

        @hookimpl
        def batch_checkpoint(self, state: Any) -> None:
            if state.progress.batch == 12:
                monkeypatch.undo()

    net, _, compute = _mlp()
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(14)]
    model = Wrapped(net, compute)
    with Trainer(
        model=model,
        train_dataloader=data,
        max_duration="14ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[("gradient_clipping", {"clipping_threshold": 1.0}), "lr_monitor", "speed_monitor", Steady()],
        loggers=[("file_logger", {"filename": "/dev/null", "flush_interval": 1000})],
        device_train_microbatch_size=microbatch,
        precision=precision,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert read == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_waits_for_the_gpu_in_the_steady_state() -> None:
    class Steady(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            if state.progress.batch == 3:
                torch.cuda.set_sync_debug_mode("error")

        @hookimpl
        def batch_checkpoint(self, state: Any) -> None:
            if state.progress.batch == 12:
                torch.cuda.set_sync_debug_mode("default")

    net, _, compute = _mlp()
    data = [(torch.randn(8, 6).pin_memory(), torch.randint(3, (8,)).pin_memory()) for _ in range(14)]
    model = Wrapped(net, compute)
    Trainer(
        model=model,
        train_dataloader=data,
        max_duration="14ba",
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plugins=["lr_monitor", "speed_monitor", Steady()],
        device="gpu",
        progress_bar=False,
    ).fit()
