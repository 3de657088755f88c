"""Against torch's AveragedModel, the closed form for constant weights, and runs whose evaluator looks at the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, Evaluator, Time, TrainableModel, Trainer, hookimpl
from kernel_core.errors import ConflictError, OptionError, TrainerError
from kernel_plugin_ema import EMA, compute_ema, copy_averaged_tensors, get_ema_model, smoothing_of, swap_weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

Weights = dict[str, torch.Tensor]


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trainer_of(model: Net, *plugins: Any, batches_per_epoch: int = 4, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_duration": "2ep", "device": "cpu", "progress_bar": False, "seed": 7}
    return Trainer(
        model=model,
        train_dataloader=batches(batches_per_epoch),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        plugins=list(plugins),
        **(defaults | kwargs),
    )


class Reference(Callback):
    """torch's own average, fed where the plugin should average: from ``start`` on, then whenever ``due``."""

    def __init__(self, decay: float, due: Any = None, start: int = 1, at: str = "batch") -> None:
        self.averaged: AveragedModel | None = None
        self.decay, self.due, self.start, self.at = decay, due or (lambda count: True), start, at

    def active_hooks(self) -> set[str]:
        return {f"{self.at}_end"}

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.look(state.model, state.progress.batch)

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        self.look(state.model, state.progress.epoch)

    def look(self, model: nn.Module, count: int) -> None:
        if count == self.start:
            average = get_ema_multi_avg_fn(self.decay)
            self.averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
            self.averaged.update_parameters(model)  # the first update copies
        elif count > self.start and self.due(count):
            assert self.averaged is not None
            self.averaged.update_parameters(model)

    def floats(self) -> Weights:
        assert self.averaged is not None
        return {name: value for name, value in weights_of(self.averaged.module).items() if value.is_floating_point()}


class Watch(Callback):
    """Keeps the weights that hooks see."""

    def __init__(self) -> None:
        self.trained: list[Weights] = []
        self.seen: dict[str, list[Weights]] = {name: [] for name in ("start", "batch", "end", "predict")}

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.trained.append(weights_of(state.model))

    @hookimpl
    def eval_start(self, state: Any) -> None:
        self.seen["start"].append(weights_of(state.model))

    @hookimpl
    def eval_batch_start(self, state: Any) -> None:
        self.seen["batch"].append(weights_of(state.model))

    @hookimpl
    def eval_end(self, state: Any) -> None:
        self.seen["end"].append(weights_of(state.model))

    @hookimpl
    def predict_batch_start(self, state: Any) -> None:
        self.seen["predict"].append(weights_of(state.model))


def floats(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if value.is_floating_point()}


# --- the functions ------------------------------------------------------------------------------------------------


def test_constant_weights_give_the_closed_form() -> None:
    model, ema = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    start, goal = ema.weight.detach().clone(), model.weight.detach().clone()
    for _ in range(5):
        compute_ema(model, ema, smoothing=0.8)
    torch.testing.assert_close(ema.weight.detach(), goal + 0.8**5 * (start - goal), rtol=1e-12, atol=1e-15)
    assert torch.equal(model.weight, goal)


def test_it_is_torchs_average_bit_for_bit() -> None:
    model = Net()
    tensors = copy_averaged_tensors(model)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    reference.update_parameters(model)
    for seed in range(4):
        torch.manual_seed(seed)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = torch.randn_like(tensor, dtype=torch.float32).to(tensor.dtype)
        compute_ema(model, tensors, 0.9)
        reference.update_parameters(model)
    assert equal(floats(tensors), floats(weights_of(reference.module)))


def test_integer_buffers_are_copied() -> None:
    model = Net()
    tensors = copy_averaged_tensors(model)
    for _ in range(3):
        model(batches(1)[0])
    compute_ema(model, tensors, 0.999)
    assert tensors["net.1.num_batches_tracked"].item() == 3
    assert not torch.equal(tensors["net.1.running_mean"], model.net[1].running_mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_are_averaged_in_their_own(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2, 1), 2.0, dtype=dtype))
    tensors = {"weight": torch.ones(2, 1, dtype=dtype)}
    compute_ema(model, tensors, 0.5)
    assert torch.equal(tensors["weight"], torch.full((2, 1), 1.5, dtype=dtype))


def test_constants_and_what_is_not_persistent_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    model.register_buffer("table", torch.ones(2), persistent=False)
    model.register_buffer("mean", torch.zeros(2))
    nested = nn.Sequential(model)
    tensors = copy_averaged_tensors(nested)
    assert set(tensors) == {"0.weight", "0.bias", "0.mean"}
    compute_ema(nested, tensors, 0.5)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_an_update_never_waits_for_the_device() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    model = Net()
    tensors = copy_averaged_tensors(model)
    with Operations() as operations:
        compute_ema(model, tensors, 0.9)
        swap_weights(model, tensors)
    assert "_foreach_lerp_" in operations.names
    assert "_local_scalar_dense" not in operations.names  # what .item(), float() and bool() end in
    with Operations() as operations:
        float(model.net[0].bias[0].detach())
    assert "_local_scalar_dense" in operations.names


def test_tied_weights_are_averaged_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tensors = copy_averaged_tensors(model)
    assert set(tensors) == {"0.weight", "0.bias", "1.bias"}
    other = get_ema_model(model, tensors)
    assert other[1].weight is other[0].weight


def test_a_swap_exchanges_values_and_keeps_the_parameters() -> None:
    model = Net()
    tensors = {name: torch.full_like(value, 3) for name, value in copy_averaged_tensors(model).items()}
    before, objects = weights_of(model), [*model.parameters(), *model.buffers()]
    swap_weights(model, tensors)
    assert all(bool((value == 3).all()) for value in weights_of(model).values())
    assert equal(tensors, before)
    swap_weights(model, tensors)
    assert equal(weights_of(model), before)
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_copy_with_the_average_leaves_the_model_alone() -> None:
    model = Net()
    tensors = {name: torch.full_like(value, 3) for name, value in copy_averaged_tensors(model).items()}
    before = weights_of(model)
    averaged = get_ema_model(model, tensors)
    assert equal(weights_of(averaged), tensors)
    assert equal(weights_of(model), before)


def test_an_average_of_another_model_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"ema: the average holds net\.0\.weight, which is not in the model\."):
        compute_ema(nn.Linear(2, 2), copy_averaged_tensors(Net()))


@pytest.mark.parametrize(("half_life", "interval", "expected"), [("10ba", "10ba", 0.5), ("4ep", "1ep", 0.5**0.25)])
def test_smoothing_halves_after_the_half_life(half_life: str, interval: str, expected: float) -> None:
    assert smoothing_of(Time.from_timestring(half_life), Time.from_timestring(interval)) == pytest.approx(expected)


# --- in training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"half_life": "3ba"}, lambda: Reference(2 ** (-1 / 3))),
        ({"smoothing": 0.7}, lambda: Reference(0.7)),
        ({"half_life": "3ba", "update_interval": "2ba"}, lambda: Reference(2 ** (-2 / 3), lambda n: n % 2 == 0)),
        ({"smoothing": 0.7, "ema_start": "0.5dur"}, lambda: Reference(0.7, start=4)),
        ({"smoothing": 0.7, "ema_start": "3ba"}, lambda: Reference(0.7, start=3)),
        ({"half_life": "1ep"}, lambda: Reference(0.5, at="epoch")),
        ({"half_life": "1ep", "ema_start": "0.5dur"}, lambda: Reference(0.5, at="epoch", start=2)),
        ({"smoothing": 0.7, "update_interval": "1ep"}, lambda: Reference(0.7, at="epoch")),
    ],
)
def test_in_training_it_is_torchs_average_bit_for_bit(
    options: dict[str, Any], reference: Callable[[], Reference]
) -> None:
    model, ema, expected = Net(), EMA(**options), reference()
    trainer_of(model, ema, expected, max_duration="4ep", batches_per_epoch=2).fit()
    assert equal(floats(weights_of(ema.get_ema_model(model))), expected.floats())
    assert not equal(floats(weights_of(model)), expected.floats())


def test_evaluators_see_the_average_and_training_goes_on_with_its_own_weights() -> None:
    plain, watch = Net(), Watch()
    trainer_of(plain, watch).fit()

    model, seen, reference = Net(), Watch(), Reference(0.8)
    evaluators = [Evaluator("one", batches(2)), Evaluator("two", batches(1))]
    trainer = trainer_of(
        model, ("ema", {"smoothing": 0.8}), reference, seen, eval_dataloader=evaluators, eval_interval="8ba"
    )
    trainer.fit()
    for moment in ("start", "batch", "end"):  # callbacks see at eval_end what was evaluated
        assert len(seen.seen[moment]) == (3 if moment == "batch" else 2)
        assert all(equal(floats(weights), reference.floats()) for weights in seen.seen[moment])
    assert all(equal(a, b) for a, b in zip(seen.trained, watch.trained, strict=True))
    assert equal(weights_of(model), weights_of(plain))


def test_evaluation_in_every_batch_does_not_change_training() -> None:
    plain, model = Net(), Net()
    trainer_of(plain).fit()
    trainer_of(model, EMA(smoothing=0.9), eval_dataloader=batches(1), eval_interval="1ba").fit()
    assert equal(weights_of(model), weights_of(plain))


def test_metrics_are_those_of_the_averaged_model() -> None:
    class Last:
        value: Any = None

        def update(self, value: torch.Tensor) -> None:
            self.value = value

        def compute(self) -> Any:
            return self.value

        def reset(self) -> None:
            self.value = None

    class Measured(Net):
        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {} if is_train else {"loss": Last()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(self.loss(outputs, batch))

    model, ema = Measured(), EMA(smoothing=0.9)
    data = batches(5)[-1:]
    trainer = trainer_of(model, ema, eval_dataloader=data)
    trainer.fit()
    averaged = ema.get_ema_model(model).eval()
    expected = averaged.loss(averaged(data[0]), data[0])
    torch.testing.assert_close(trainer.state.eval_metric_values["eval/loss"], expected.detach())
    model.eval()
    assert abs(float((model.loss(model(data[0]), data[0]) - expected).detach())) > 1e-4


def test_predictions_and_evaluations_on_their_own_use_the_average() -> None:
    model, watch, reference = Net(), Watch(), Reference(0.8)
    trainer = trainer_of(model, EMA(smoothing=0.8), reference, watch)
    trainer.fit()
    after = weights_of(model)
    outputs = trainer.predict(batches(1))
    trainer.eval(batches(1))
    assert equal(floats(watch.seen["predict"][0]), reference.floats())
    assert equal(floats(watch.seen["batch"][0]), reference.floats())
    assert equal(weights_of(model), after)
    averaged = reference.averaged
    assert averaged is not None
    torch.testing.assert_close(outputs[0], averaged.eval()(batches(1)[0]).detach())


def test_before_it_starts_the_weights_themselves_are_evaluated() -> None:
    model, watch, ema = Net(), Watch(), EMA(smoothing=0.8, ema_start="0.9dur")
    trainer = trainer_of(model, ema, watch, eval_dataloader=batches(1), eval_interval="2ba", max_duration="4ba")
    steps = trainer.steps()
    next(steps)
    next(steps)
    assert equal(watch.seen["batch"][0], watch.trained[-1])
    assert ema.state_dict() == {}
    with pytest.raises(TrainerError, match=r"ema: there is no average yet\. Averaging begins at ema_start='0\.9dur'"):
        ema.get_ema_model(model)


def test_optimizers_keep_working_on_the_same_parameters() -> None:
    model = Net()
    objects = list(model.parameters())
    trainer = trainer_of(model, EMA(smoothing=0.8), eval_dataloader=batches(1), eval_interval="1ba")
    trainer.fit()
    held = [p for group in trainer.state.optimizers[0].param_groups for p in group["params"]]
    assert all(a is b is c for a, b, c in zip(objects, model.parameters(), held, strict=True))


# --- when something fails -----------------------------------------------------------------------------------------


class Failing(Callback):
    def __init__(self) -> None:
        self.fails = True

    @hookimpl
    def eval_batch_start(self, state: Any) -> None:
        if self.fails:
            raise RuntimeError("no more data")

    @hookimpl
    def predict_batch_start(self, state: Any) -> None:
        if self.fails:
            raise RuntimeError("no more data")


def test_an_evaluation_that_fails_in_a_run_gives_the_weights_back() -> None:
    class Rescue(Callback):
        @hookimpl
        def fit_failed(self, state: Any) -> None:
            rescued.append(weights_of(state.model))

    model, watch, rescued = Net(), Watch(), []
    plugins = [EMA(smoothing=0.8), Failing(), watch, Rescue()]
    trainer = trainer_of(model, *plugins, eval_dataloader=batches(1), eval_interval="3ba")
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.fit()
    assert equal(rescued[0], watch.trained[-1])  # what a callback keeps of a failed run is the weights of training
    assert not equal(watch.seen["start"][0], watch.trained[-1])
    assert equal(weights_of(model), watch.trained[-1])


@pytest.mark.parametrize("what", ["eval", "predict"])
def test_one_that_fails_on_its_own_gives_them_back_at_once(what: str) -> None:
    model, ema = Net(), EMA(smoothing=0.8)
    with trainer_of(model, ema, Failing()) as trainer:
        trainer.fit()
        after = weights_of(model)
        with pytest.raises(RuntimeError, match="no more data"):
            getattr(trainer, what)(batches(1))
        assert equal(weights_of(model), after)


def test_after_one_that_failed_the_next_one_and_training_are_right() -> None:
    plain, model, failing, watch, reference = Net(), Net(), Failing(), Watch(), Reference(0.8)
    trainer_of(plain).fit()
    trainer = trainer_of(model, EMA(smoothing=0.8), failing, reference, watch)
    steps = trainer.steps()
    for _ in range(3):
        next(steps)
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.eval(batches(1))
    failing.fails = False
    trainer.eval(batches(1))
    assert equal(floats(watch.seen["batch"][-1]), reference.floats())
    failing.fails = True
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.eval(batches(1))
    for _ in steps:
        pass
    assert equal(weights_of(model), weights_of(plain))


# --- saved and restored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"smoothing": 0.8}, {"half_life": "4ba", "update_interval": "3ba"}])
def test_a_run_in_two_parts_is_the_run_in_one(options: dict[str, Any]) -> None:
    whole, whole_ema = Net(), EMA(**options)
    trainer_of(whole, whole_ema).fit()

    first, ema = Net(), EMA(**options)
    trainer = trainer_of(first, ema)
    steps = trainer.steps()
    for _ in range(5):
        next(steps)
    saved = {name: value.clone() for name, value in ema.state_dict()["ema_tensors"].items()}
    weights, timestamp = weights_of(first), trainer.state.timestamp
    momentum = trainer.state.optimizers[0].state_dict()

    second, ema = Net(), EMA(**options)
    ema.load_state_dict({"ema_tensors": saved})
    trainer = trainer_of(second, ema)
    second.load_state_dict(weights)
    trainer.state.optimizers[0].load_state_dict(momentum)
    trainer.state.progress.restore(timestamp)
    trainer.fit()
    assert equal(weights_of(second), weights_of(whole))
    assert equal(ema.state_dict()["ema_tensors"], whole_ema.state_dict()["ema_tensors"])
    assert not equal(saved, ema.state_dict()["ema_tensors"])


def test_what_is_loaded_is_copied_also_when_a_batch_is_tried_again() -> None:
    tensors = copy_averaged_tensors(Net())
    ema = EMA(smoothing=0.5)
    ema.load_state_dict({"ema_tensors": tensors})
    loaded = ema.state_dict()["ema_tensors"]
    assert equal(loaded, tensors)
    assert loaded["net.0.weight"].data_ptr() != tensors["net.0.weight"].data_ptr()
    ema.load_state_dict({})  # as before averaging began
    assert ema.state_dict() == {}


def test_a_restored_average_lies_in_memory_as_the_weights_do() -> None:
    model = Net().double()
    ema = EMA(smoothing=0.5)
    ema.load_state_dict({"ema_tensors": {name: value.float() for name, value in copy_averaged_tensors(model).items()}})
    trainer_of(model, ema)
    assert ema.ema_tensors is not None
    assert ema.ema_tensors["net.0.weight"].dtype is torch.float64
    assert ema.ema_tensors["net.0.weight"].requires_grad is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("net.2.bias"), r"ema: the saved average has no net\.2\.bias\. Expected a tensor for every"),
        (
            lambda t: t.update({"net.2.bias": torch.ones(1)}),
            r"ema: the saved average has another shape of net\.2\.bias",
        ),
        (lambda t: t.update({"head.bias": torch.ones(1)}), r"ema: the average holds head\.bias, which is not in the"),
    ],
)
def test_a_saved_average_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    tensors = copy_averaged_tensors(Net())
    change(tensors)
    ema = EMA()
    ema.load_state_dict({"ema_tensors": tensors})
    with pytest.raises(TrainerError, match=message):
        trainer_of(Net(), ema)


# --- options ------------------------------------------------------------------------------------------------------


def test_defaults_are_a_half_life_of_1000_batches() -> None:
    ema = EMA()
    assert ema.smoothing == 2 ** (-1 / 1000)
    assert ema.update_interval == "1ba"
    assert EMA(half_life=Time(1000, "ba")).smoothing == ema.smoothing


@pytest.mark.parametrize("ema", [EMA(smoothing=0.9), EMA(half_life=None, smoothing=0.9), EMA(None, 0.9)])
def test_smoothing_alone_updates_every_batch(ema: EMA) -> None:
    assert ema.smoothing == 0.9
    assert ema.update_interval == "1ba"


def test_only_the_hook_of_the_unit_is_active() -> None:
    assert "batch_end" in EMA(half_life="5ba").active_hooks()
    assert "epoch_end" not in EMA(half_life="5ba").active_hooks()
    trainer = trainer_of(Net(), EMA(half_life="5ep"))
    assert [call.plugin for call in trainer.plan.calls("epoch_end")] == ["ema"]
    assert not trainer.plan.calls("batch_end")


def test_another_average_of_weights_is_refused() -> None:
    class Other(Algorithm):
        roles = {"averages-weights"}

    with pytest.raises(ConflictError, match="averages-weights"):
        trainer_of(Net(), EMA(), Other())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"half_life": "5ba", "smoothing": 0.9}, r"ema: got half_life='5ba' and smoothing=0\.9\. Expected one of them"),
        (
            {"half_life": "1e6tok"},
            r"ema\.half_life: got '1e6tok'\. Expected a time greater than 0 in batches or epochs",
        ),
        ({"half_life": "0ba"}, r"ema\.half_life: got '0ba'\. Expected a time greater than 0"),
        ({"half_life": "soon"}, r"ema\.half_life: got 'soon'\. time: cannot read"),
        ({"half_life": "5ba", "update_interval": "1ep"}, r"ema\.update_interval: got '1ep' with half_life='5ba'\."),
        ({"smoothing": 0.9, "update_interval": "5sp"}, r"ema\.update_interval: got '5sp'\. Expected a time"),
        ({"smoothing": 1.0}, r"ema\.smoothing: got 1\.0, .*less than 1"),
        ({"smoothing": -0.1}, r"ema\.smoothing: got -0\.1, .*greater than or equal to 0"),
        ({"ema_start": "1.5dur"}, r"ema\.ema_start: got '1\.5dur'\. Expected a time of at least 0"),
        ({"ema_start": "-1ba"}, r"ema\.ema_start: got '-1ba'\. Expected a time of at least 0"),
        ({"ema_start": "late"}, r"ema\.ema_start: got 'late'\. time: cannot read"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EMA(**kwargs)
