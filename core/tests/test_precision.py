"""Number formats: what is computed in them, loss scaling, and who may set them."""

import contextlib
import logging
import re
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptimizerError, TrainerError
from kernel_core.train.precision import check_precision, default_precision, live_dtypes
from torch import nn

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


class Model(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(6, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Any) -> Any:
        return self.line(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        product = outputs @ outputs.T  # autocast decides its dtype
        self.seen += [outputs.dtype, product.dtype]
        return nn.functional.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        outputs = self(batch) if outputs is None else outputs
        self.seen.append(outputs.dtype)
        return outputs


def make(model: Model, **arguments: Any) -> Trainer:
    given = {
        "train_dataloader": [(X, Y)],
        "max_duration": "2ba",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_subset_num_batches": 1,
    }
    return Trainer(model=model, device="cpu", progress_bar=False, seed=0, **(given | arguments))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
)
def test_forward_loss_and_evaluation_compute_in_it(precision: str, dtype: torch.dtype) -> None:
    model = Model()
    trainer = make(model, precision=precision)
    trainer.fit()
    assert set(model.seen) == {dtype}
    model.seen.clear()
    trainer.eval([(X, Y)])
    assert model.seen == [dtype]
    assert trainer.predict([(X, Y)])[0].dtype == dtype
    assert model.line.weight.dtype == torch.float32


@pytest.mark.parametrize(("precision", "dtype"), [("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)])
def test_weights_are_those_of_a_hand_written_mixed_precision_loop(precision: str, dtype: torch.dtype) -> None:
    by_hand = Model()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp_fp16")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = by_hand.loss(by_hand((X, Y)), (X, Y))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    model = Model()
    make(model, precision=precision).fit()
    assert torch.equal(model.line.weight, by_hand.line.weight)


def test_gradients_are_unscaled_where_plugins_see_them() -> None:
    norms: dict[str, float] = {}

    class Look(Algorithm):
        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            norms[state.precision] = float(state.model.line.weight.grad.norm())

    for precision in ("fp32", "amp_fp16"):
        make(Model(), precision=precision, algorithms=Look(), max_duration="1ba").fit()
    assert norms["amp_fp16"] == pytest.approx(norms["fp32"], rel=0.01)


def test_a_step_whose_gradients_overflow_is_passed_over_and_the_scale_shrinks() -> None:
    class Overflow(Algorithm):
        @hookimpl
        def after_backward(self, state: Any) -> None:
            if state.progress.batch == 0:
                state.model.line.weight.grad[0, 0] = float("inf")

    model = Model()
    before = model.line.weight.detach().clone()
    trainer = make(model, precision="amp_fp16", algorithms=Overflow(), max_duration="1ba")
    scale = trainer._precision.state_dict()["scale"]
    trainer.fit()
    assert torch.equal(model.line.weight, before)
    assert trainer._precision.state_dict()["scale"] == scale / 2
    trainer.fit(duration="1ba")
    assert not torch.equal(model.line.weight, before)


def test_two_optimizers_share_one_loss_scale() -> None:
    model = Model()
    optimizers = [torch.optim.SGD([model.line.weight], lr=0.1), torch.optim.SGD([model.line.bias], lr=0.1)]
    make(model, precision="amp_fp16", optimizers=optimizers).fit()
    single = Model()
    make(single, precision="amp_fp16").fit()
    assert torch.equal(model.line.weight, single.line.weight)
    assert torch.equal(model.line.bias, single.line.bias)


def test_an_optimizer_that_evaluates_again_is_refused_under_loss_scaling() -> None:
    model = Model()
    with pytest.raises(
        OptimizerError, match="LBFGS evaluates the model in its step, and the loss scaling of precision='amp_fp16'"
    ):
        make(model, precision="amp_fp16", optimizers=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("amp_bf61", r"unknown precision 'amp_bf61'\. Did you mean 'amp_bf16'"),
        ("amp_fp8", r"'amp_fp8' was asked for, and cpu has no fp8\. Expected a CUDA GPU"),
    ],
)
def test_a_precision_that_is_not_there_is_refused(precision: str, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make(Model(), precision=precision)


def test_the_default_suits_the_hardware() -> None:
    assert default_precision(torch.device("cpu")) == "fp32"
    assert check_precision("amp_bf16", torch.device("cpu")) == "amp_bf16"
    assert make(Model()).state.precision == "fp32"


def test_a_plugin_may_set_it_in_init_and_fit_may_change_it() -> None:
    class Sets(Algorithm):
        @hookimpl
        def init(self, state: Any) -> None:
            state.precision = "amp_bf16"

    model = Model()
    trainer = make(model, algorithms=Sets(), max_duration="1ba")
    trainer.fit()
    assert set(model.seen) == {torch.bfloat16}
    model.seen.clear()
    trainer.fit(duration="1ba", precision="fp32")
    assert set(model.seen) == {torch.float32}


def test_a_plugin_can_put_a_context_around_forward_and_loss() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def context() -> Any:
        entered.append("in")
        yield
        entered.append("out")

    class Around(Algorithm):
        @hookimpl
        def precision_context(self) -> Any:
            return context

    make(Model(), algorithms=Around(), precision="amp_bf16", max_duration="1ba").fit()
    assert entered == ["in", "out"] * 2


def test_live_dtypes_are_read_off_the_objects(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    model.line.bias.data = model.line.bias.data.double()
    model.line.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.line.weight])
    model.line.weight.grad = torch.ones_like(model.line.weight)
    optimizer.step()
    assert live_dtypes(model, [optimizer]) == [
        ("parameters", "float32", 1, 18),
        ("parameters", "float64", 1, 3),
        ("gradients", "float32", 1, 18),
        ("buffers", "int64", 1, 2),
        ("optimizer state", "float32", 2, 36),
    ]
    with caplog.at_level(logging.INFO, "kernel_core"):
        make(Model()).fit()
    assert re.search(
        r"parameters +float32 +2 tensors +21 entries\n +gradients +float32 +2 tensors +21 entries", caplog.text
    )


def test_a_loss_that_is_not_finite_in_the_first_step_is_one_clear_error() -> None:
    class Broken(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, batch) * float("nan")

    with pytest.raises(
        TrainerError, match=r"the loss of the first batch is nan\. Expected a finite number\. Look for nan"
    ):
        make(Broken()).fit()


def test_the_whole_run_is_in_one_precision_for_plugins_that_compute_losses_themselves() -> None:
    seen = []

    class Extra(Callback):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            with torch.no_grad():
                state.outputs = state.compute_outputs(state.batch)
                seen.append((state.outputs.dtype, state.compute_loss(state.batch).dtype))

    make(Model(), precision="amp_bf16", callbacks=Extra(), max_duration="1ba").fit()
    assert seen == [(torch.bfloat16, torch.float32)]


def test_an_optimizer_without_gradients_does_not_trouble_the_loss_scale() -> None:
    class Half(Model):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

    model = Half()
    optimizers = [torch.optim.SGD(model.line.parameters(), lr=0.1), torch.optim.SGD(model.idle.parameters(), lr=0.1)]
    make(model, precision="amp_fp16", optimizers=optimizers).fit()
    plain = Model()
    make(plain, precision="amp_fp16").fit()
    assert torch.equal(model.line.weight, plain.line.weight)
