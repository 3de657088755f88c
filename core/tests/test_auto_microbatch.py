"""``device_train_microbatch_size="auto"``: memory that runs out anywhere before the step leaves no trace."""

from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Evaluator, LoggerDestination, TrainableModel, Trainer, hookimpl
from kernel_core.errors import TrainerError
from kernel_core.train.snapshot import is_out_of_memory
from torch import Tensor, nn
from torchmetrics import SumMetric

ROWS = 12
FITS = 3  # more rows than that run out of memory
BATCH_HOOKS = ["before_train_batch", "after_train_batch"]
MICROBATCH_HOOKS = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
PHASES = ["transform", "forward", "loss", "metric"]


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test.")


class Model(TrainableModel):
    """Counts the rows it saw in a buffer, as batch norm would."""

    def __init__(self, fails_in: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.fails_in = fails_in

    def _fail(self, where: str, rows: int) -> None:
        if self.fails_in == where and rows > FITS:
            raise out_of_memory()

    def forward(self, batch: Any) -> Any:
        self.seen += len(batch[0])
        self._fail("forward", len(batch[0]))
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        self._fail("loss", len(outputs))
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"labels": SumMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(batch[1])
        self._fail("metric", len(outputs))


class Injector(Algorithm):
    """Fails in one hook where the batch is too large, and counts what it did, too early, as plugin state."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.rows = 0
        self.labels: list[float] = []

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        self.labels.append(float(state.train_metric_values["labels"]))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: Any) -> None:
        self.rows = state["rows"]


def _inject(hook: str) -> Any:
    def fail(self: Any, state: Any) -> None:
        if hook == "before_loss":
            self.rows += len(state.batch[0])
        if self.where != hook:
            return
        rows = len(state.batch[0]) if hook in MICROBATCH_HOOKS else state.device_train_microbatch_size or ROWS
        if rows > FITS:
            raise out_of_memory()

    fail.__name__ = hook
    return hookimpl(fail)


for _hook in BATCH_HOOKS + MICROBATCH_HOOKS:
    setattr(Injector, _hook, _inject(_hook))


class Sizes(LoggerDestination):
    def __init__(self) -> None:
        self.sizes: list[Any] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.sizes += [value for name, value in metrics.items() if name == "trainer/device_train_microbatch_size"]


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = [ROWS, ROWS, 5]  # a short last batch
    return [
        (
            torch.randn(n, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in rows
    ]


def run(
    size: Any, where: str = "", optimizer: Any = torch.optim.AdamW, precision: str = "fp32"
) -> tuple[Any, Any, Any]:
    model = Model(where if where in PHASES else None)
    injector, sizes = Injector(where), Sizes()

    def transform(batch: Any) -> Any:
        if where == "transform" and len(batch[0]) > FITS:
            raise out_of_memory()
        return batch

    trainer = Trainer(
        model=model,
        train_dataloader={"dataloader": data(), "microbatch_transforms": transform},
        max_duration="2ep",
        optimizers=optimizer(model.parameters(), lr=0.05),
        plugins=[injector, sizes],
        device_train_microbatch_size=size,
        precision=precision,
        device="cpu",
        seed=1,
        progress_bar=False,
    )
    trainer.fit()
    return trainer, injector, sizes


@pytest.mark.parametrize("where", [*BATCH_HOOKS, *MICROBATCH_HOOKS, *PHASES])
def test_a_failed_try_is_undone(where: str) -> None:
    """Weights as with all the memory in the world; buffers, metrics and plugin state count every row once."""
    whole, expected, _ = run(None)
    tried, injector, sizes = run("auto", where)
    for one, other in zip(tried.state.model.parameters(), whole.state.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    rows = sum(len(batch[0]) for batch in data())
    assert tried.state.model.seen == whole.state.model.seen == 2 * rows
    assert injector.rows == expected.rows == 2 * rows
    assert injector.labels == expected.labels
    assert tried.state.device_train_microbatch_size == FITS  # 12, 6, 3
    assert sizes.sizes == [FITS]


def test_without_a_failure_the_batch_stays_whole_and_bit_equal() -> None:
    whole, _, _ = run(None)
    tried, _, sizes = run("auto")
    for one, other in zip(tried.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert tried.state.device_train_microbatch_size is None
    assert sizes.sizes == [ROWS]


class FailsInItsFirstStep(torch.optim.AdamW):
    """Runs out of memory half-way: some parameters are stepped already."""

    fails = 2

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            self.fails -= 1
            raise out_of_memory()
        return loss


def test_the_first_optimizer_step_can_fail_half_way() -> None:
    whole, expected, _ = run(None)
    tried, injector, _ = run("auto", optimizer=FailsInItsFirstStep)
    for one, other in zip(tried.state.model.parameters(), whole.state.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    steps = {int(state["step"]) for state in tried.state.optimizers[0].state.values()}
    assert steps == {6}
    assert tried.state.device_train_microbatch_size == FITS
    assert injector.rows == tried.state.model.seen
    assert injector.labels == expected.labels


def test_randomness_goes_on_as_if_the_size_had_been_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: bit for bit the run that has this size from the start."""

    def forward(self: Model, batch: Any) -> Any:
        outputs = nn.functional.dropout(self.net(batch[0]), 0.3, self.training)
        self._fail("forward", len(batch[0]))
        return outputs

    monkeypatch.setattr(Model, "forward", forward)
    known, _, _ = run(FITS)
    tried, _, _ = run("auto", "forward")
    for one, other in zip(tried.state.model.parameters(), known.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_loss_scaling_survives_a_failure_after_unscaling() -> None:
    trainer, _, _ = run("auto", "after_train_batch", torch.optim.SGD, "amp_fp16")
    assert trainer.state.progress.batch == 6


def test_a_row_that_does_not_fit_is_one_clear_error() -> None:
    class Never(Algorithm):
        @hookimpl
        def before_forward(self) -> None:
            raise out_of_memory()

    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=Never(),
        device_train_microbatch_size="auto",
        device="cpu",
        progress_bar=False,
    )
    with pytest.raises(TrainerError, match="out of memory with a single row") as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_are_not_retried() -> None:
    calls = []

    class Broken(Algorithm):
        @hookimpl
        def before_forward(self) -> None:
            calls.append(1)
            raise RuntimeError("CUDA out of memory")  # the text alone says nothing

    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=Broken(),
        device_train_microbatch_size="auto",
        device="cpu",
        progress_bar=False,
    )
    with pytest.raises(RuntimeError):
        trainer.fit()
    assert len(calls) == 1


def test_memory_that_runs_out_is_known_by_type_and_code() -> None:
    error = torch.AcceleratorError("anything")
    assert not is_out_of_memory(error)
    error.error_code = 2  # type: ignore[attr-defined]
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("CUDA error: out of memory"))


def test_a_larger_batch_later_is_probed_anew() -> None:
    """The first batches fit whole; a larger one fails and is undone as well."""
    model = Model("forward")
    batches = [tuple(part[:2] for part in batch) for batch in data()[:2]] + data()[1:2]
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device_train_microbatch_size="auto",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    assert model.seen == 2 + 2 + ROWS


@pytest.mark.parametrize("size", [None, 4, "auto"])
def test_evaluation_counts_every_row_once(size: Any) -> None:
    class EvalModel(Model):
        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(batch[1])
            if size == "auto" and len(outputs) > FITS:
                raise out_of_memory()

    model = EvalModel()
    trainer = Trainer(
        model=model,
        eval_dataloader=Evaluator("all", data(), device_eval_microbatch_size=size),
        device="cpu",
        progress_bar=False,
    )
    values = trainer.eval()
    expected = torch.cat([batch[1] for batch in data()]).double().sum()
    assert float(values["all/labels"]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("size", [1, 4, "auto"])
def test_prediction_in_microbatches_gives_whole_batches(size: Any) -> None:
    model = Model("forward" if size == "auto" else None)
    trainer = Trainer(model=model, device="cpu", progress_bar=False)
    outputs = trainer.predict(data(), device_microbatch_size=size)
    assert [len(one) for one in outputs] == [ROWS, ROWS, 5]
    for one, batch in zip(outputs, data(), strict=True):
        torch.testing.assert_close(one, model.net(batch[0]).detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("parts", [1, 2, 5, 12])
def test_grad_accum_is_understood(parts: int) -> None:
    """As many microbatches as asked for, and the gradient of the whole batch."""
    seen: list[Tensor] = []

    class Count(Algorithm):
        @hookimpl
        def before_forward(self, state: Any) -> None:
            seen.append(state.batch[0])

    def weights(**arguments: Any) -> list[Tensor]:
        model = Model()
        Trainer(
            model=model,
            train_dataloader=data()[:1],
            max_duration="1ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            algorithms=Count(),
            device="cpu",
            progress_bar=False,
            **arguments,
        ).fit()
        return list(model.parameters())

    split = weights(grad_accum=parts)
    assert max(map(len, seen)) == -(-ROWS // parts)
    assert len(seen) == -(-ROWS // -(-ROWS // parts))
    for one, other in zip(split, weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Opaque:
    """A batch that says nothing about its size."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def fit_auto(model: TrainableModel, batches: Any, *plugins: Any, optimizer: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=optimizer or torch.optim.AdamW(model.parameters(), lr=0.05),
        plugins=list(plugins),
        device_train_microbatch_size="auto",
        device="cpu",
        progress_bar=False,
        **arguments,
    )
    trainer.fit()
    return trainer


class FailsAt(Algorithm):
    """Runs out of memory in the backward pass of some batches, once each."""

    def __init__(self, *batches: int) -> None:
        self.left = set(batches)

    @hookimpl
    def after_backward(self, state: Any) -> None:
        if state.progress.batch in self.left:
            self.left.remove(state.progress.batch)
            raise out_of_memory()


def test_the_second_batch_is_probed_too_because_optimizers_hold_state_then() -> None:
    model = Model()
    trainer = fit_auto(model, data(), FailsAt(1))
    assert model.seen == 2 * ROWS + 5
    assert float(trainer.state.train_metric_values["labels"]) == sum(int(batch[1].sum()) for batch in data())


def test_few_long_rows_are_probed_although_as_many_entries_in_short_rows_have_passed() -> None:
    class Padded(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward((batch[0][:, :5], batch[1]))

    def rows(number: int, width: int) -> tuple[Tensor, Tensor]:
        return torch.randn(number, width, dtype=torch.float64), torch.zeros(number, dtype=torch.int64)

    model = Padded()
    fit_auto(model, [rows(8, 5), rows(8, 5), rows(4, 10), rows(2, 40)], FailsAt(2, 3))
    assert model.seen == 8 + 8 + 4 + 2


def test_batches_without_tensors_to_see_are_always_probed() -> None:
    class Reads(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward((batch.x, batch.y))

        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, (batch.x, batch.y))

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(batch.y)

    def split(batch: Opaque, size: int) -> list[Opaque]:
        return [Opaque(x, y) for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True)]

    spec = {
        "dataloader": [Opaque(*batch) for batch in data()],
        "get_num_samples_in_batch": lambda batch: len(batch.x),
        "split_batch": split,
    }
    model = Reads()
    trainer = fit_auto(model, spec, FailsAt(2))
    assert model.seen == 2 * ROWS + 5
    assert float(trainer.state.train_metric_values["labels"]) == sum(int(batch[1].sum()) for batch in data())


@pytest.mark.parametrize("hook", ["after_dataloader", "batch_start"])
def test_hooks_before_the_step_are_tried_again_with_the_rows_they_had(hook: str) -> None:
    """One halves the rows, then memory runs out in another: the second try halves the whole batch, not the half."""

    class Halves(Algorithm):
        before = {"fails"}

        @hookimpl
        def after_dataloader(self, state: Any) -> None:
            state.batch = tuple(part[::2] for part in state.batch)

    class Fails(Algorithm):
        def __init__(self) -> None:
            self.left = 2

    def fail(self: Any, state: Any) -> None:
        if state.progress.batch == 1 and self.left:
            self.left -= 1
            raise out_of_memory()

    fail.__name__ = hook
    setattr(Fails, hook, hookimpl(fail))
    model, plain = Model(), Model()
    fit_auto(model, data()[:2], Halves(), type("Fails", (Fails,), {})())
    Trainer(
        model=plain,
        train_dataloader=data()[:2],
        max_duration="1ep",
        optimizers=torch.optim.AdamW(plain.parameters(), lr=0.05),
        plugins=[Halves()],
        device="cpu",
        progress_bar=False,
    ).fit()
    assert model.seen == plain.seen == ROWS
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_fails_inside_the_optimizer_later_is_not_hidden() -> None:
    """Weights are half stepped then, and no copy of them exists."""

    class FailsInItsThird(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            loss = super().step(closure)
            if self.calls == 3:
                raise out_of_memory()
            return loss

    model = Model()
    with pytest.raises(torch.OutOfMemoryError):
        fit_auto(model, data(), optimizer=FailsInItsThird(model.parameters(), lr=0.1))


def test_an_optimizer_that_evaluates_again_is_retried_inside_its_step() -> None:
    class Fails(Algorithm):
        def __init__(self) -> None:
            self.evaluations = 0

        @hookimpl
        def after_backward(self, state: Any) -> None:
            self.evaluations += 1
            if self.evaluations in (4, 9):
                raise out_of_memory()

    model, plain = Model(), Model()
    lbfgs = {"lr": 0.1, "max_iter": 4}
    fit_auto(model, data()[:2], Fails(), optimizer=torch.optim.LBFGS(model.parameters(), **lbfgs))
    Trainer(
        model=plain,
        train_dataloader=data()[:2],
        max_duration="1ep",
        optimizers=torch.optim.LBFGS(plain.parameters(), **lbfgs),
        device="cpu",
        progress_bar=False,
    ).fit()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_buffer_that_is_made_anew_in_each_forward_is_put_back() -> None:
    class Rebinds(Model):
        def forward(self, batch: Any) -> Any:
            self.seen = self.seen + len(batch[0])
            self._fail("forward", len(batch[0]))
            return self.net(batch[0])

    model = Rebinds("forward")
    fit_auto(model, data())
    assert model.seen == 2 * ROWS + 5


def test_evaluation_copies_metrics_only_while_a_size_is_probed() -> None:
    copies: list[int] = []

    class Counting(SumMetric):
        def __deepcopy__(self, memo: Any) -> Any:
            copies.append(1)
            return Counting()

    class Counted(Model):
        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"labels": Counting()}

    trainer = Trainer(model=Counted(), device="cpu", progress_bar=False)
    evaluator = Evaluator("all", [data()[0]] * 50, device_eval_microbatch_size="auto")
    values = trainer.eval(evaluator)
    assert float(values["all/labels"]) == 50 * int(data()[0][1].sum())
    assert len(copies) < 5


@pytest.mark.parametrize(("size", "rows"), [(4, 6), (4, 8), (2, 8)])
def test_predictions_of_odd_structure_are_put_together_by_rows(size: int, rows: int) -> None:
    class Detects(Model):
        def forward(self, batch: Any) -> Any:
            number = len(batch[0])
            boxes = [{"box": torch.ones(n % 3, 4), "row": float(batch[0][n, 0])} for n in range(number)]
            texts = [f"row {float(x):.3f}" for x in batch[0][:, 0]]
            return {"boxes": boxes, "texts": texts, "pair": (batch[0], None), "loss": torch.tensor(1.0), "size": number}

    x, y = torch.randn(rows, 5, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    trainer = Trainer(model=Detects(), device="cpu", progress_bar=False)
    (whole,) = trainer.predict([(x, y)])
    (parts,) = trainer.predict([(x, y)], device_microbatch_size=size)
    assert parts["texts"] == whole["texts"]
    assert [box["row"] for box in parts["boxes"]] == [box["row"] for box in whole["boxes"]]
    assert torch.equal(parts["pair"][0], x)
    assert parts["pair"][1] is None
    assert [int(loss) for loss in parts["loss"]] == [1] * -(-rows // size)
    assert sum(parts["size"]) == rows
