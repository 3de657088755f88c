"""Against the exact distribution of the draw, and runs that take the same rows without looking at losses."""

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, Classifier, DataSpec, TrainableModel, Trainer, hookimpl
from kernel_core.errors import ConflictError, DataError, OptionError
from kernel_plugin_selective_backprop import (
    EvalMode,
    SelectiveBackprop,
    loss_per_row,
    select_indices,
    select_using_loss,
    should_selective_backprop,
    shrink,
    take_rows,
)
from torch import Tensor, nn

cross_entropy = nn.functional.cross_entropy
ALWAYS: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0}


class Net(TrainableModel):
    """Has everything that a forward pass in train mode would leave traces in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.passes: list[tuple[bool, bool, int]] = []

    def forward(self, batch: Any) -> Any:
        self.passes.append((self.training, torch.is_grad_enabled(), len(batch[0])))
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> Any:
        return cross_entropy(outputs, batch[1], reduction=reduction)


def batches(number: int = 6, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 5, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(number)
    ]


class Record(Callback):
    """Keeps the batches that training gets, and what a forward pass could have touched before them."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.earlier: Any = None
        self.untouched: list[bool] = []

    def snapshot(self, state: Any) -> Any:
        buffers = [buffer.clone() for buffer in state.model.buffers()]
        return [torch.get_rng_state(), *buffers], [module.training for module in state.model.modules()]

    @hookimpl
    def before_dataloader(self, state: Any) -> None:
        self.earlier = self.snapshot(state)

    @hookimpl
    def batch_start(self, state: Any) -> None:
        tensors, flags = self.snapshot(state)
        same = all(torch.equal(a, b) for a, b in zip(tensors, self.earlier[0], strict=True))
        self.untouched.append(same and flags == self.earlier[1])
        self.batches.append(state.batch)


class Replay(Algorithm):
    """Gives training the batches that another run had."""

    def __init__(self, kept: Any) -> None:
        self.kept = iter(kept)

    @hookimpl
    def after_dataloader(self, state: Any) -> None:
        state.batch = next(self.kept)


def train(*plugins: Any, model: Any = None, loader: Any = None, **kwargs: Any) -> Any:
    model = model or Net()
    Trainer(
        model=model,
        train_dataloader=batches() if loader is None else loader,
        max_duration="6ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=list(plugins),
        device="cpu",
        seed=3,
        progress_bar=False,
        **kwargs,
    ).fit()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def rows_of(kept: Tensor, whole: Tensor) -> list[int]:
    return [int((whole == row).all(1).nonzero()) for row in kept]


# --- when -------------------------------------------------------------------------------------------------------


def test_rows_are_selected_between_start_and_end_but_for_every_nth_batch() -> None:
    at = [should_selective_backprop(share, 0, 0.5, 0.9, 2) for share in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)]
    assert at == [False, False, True, True, False, False]
    by_batch = [should_selective_backprop(0.6, index, 0.5, 0.9, 3) for index in range(7)]
    assert by_batch == [True, True, False, True, True, False, True]
    assert all(should_selective_backprop(0.6, index, interrupt=0) for index in range(5))
    assert not any(should_selective_backprop(0.6, index, interrupt=1) for index in range(5))


def test_in_training_the_schedule_holds() -> None:
    record = Record()
    train(SelectiveBackprop(start=1 / 6, end=5 / 6, interrupt=3), record)
    # batches 0 to 5 of 6: before the start, two selected, the third whole, one selected, after the end
    assert [len(batch[0]) for batch in record.batches] == [8, 4, 8, 4, 4, 8]


# --- which ------------------------------------------------------------------------------------------------------


def exact(num_rows: int, keep: float) -> dict[tuple[int, ...], float]:
    """The probability of each set of ranks when rows are drawn one by one in proportion to their weights."""
    weights = [((rank + 0.5) / num_rows) ** (1 / keep - 1) for rank in range(num_rows)]
    sets: dict[tuple[int, ...], float] = {}
    for order in permutations(range(num_rows), int(keep * num_rows)):
        probability, left = 1.0, sum(weights)
        for rank in order:
            probability *= weights[rank] / left
            left -= weights[rank]
        chosen = tuple(sorted(order))
        sets[chosen] = sets.get(chosen, 0.0) + probability
    return sets


@pytest.mark.parametrize(("num_rows", "keep", "limit"), [(6, 0.5, 43.8), (5, 0.4, 27.9)])
def test_sets_of_rows_have_their_exact_probabilities(num_rows: int, keep: float, limit: float) -> None:
    losses = torch.rand(num_rows, generator=torch.Generator().manual_seed(2))
    rank = losses.argsort().argsort().tolist()
    generator, num_draws = torch.Generator().manual_seed(0), 6000
    counts = dict.fromkeys(exact(num_rows, keep), 0)
    for _ in range(num_draws):
        counts[tuple(sorted(rank[row] for row in select_indices(losses, keep, generator).tolist()))] += 1
    expected = {chosen: share * num_draws for chosen, share in exact(num_rows, keep).items()}
    # chi-square at 0.001 with 19 and 9 degrees of freedom
    assert sum((counts[chosen] - mean) ** 2 / mean for chosen, mean in expected.items()) < limit


@pytest.mark.parametrize(
    ("num_rows", "keep", "kept"), [(8, 0.5, 4), (10, 0.29, 2), (7, 0.99, 6), (3, 0.1, 1), (1, 0.5, 1)]
)
def test_the_share_is_kept_rounded_down_and_at_least_one_row(num_rows: int, keep: float, kept: int) -> None:
    indices = select_indices(torch.rand(num_rows), keep)
    assert len(indices) == len(set(indices.tolist())) == kept
    assert indices.tolist() == sorted(indices.tolist())


def test_a_very_small_share_takes_the_highest_losses_without_underflow() -> None:
    losses = torch.arange(1000.0).flip(0)
    # weights (r + 0.5)/1000 to the power of 199: almost all the mass is on the top few per cent
    assert max(select_indices(losses, 0.005, torch.Generator().manual_seed(1)).tolist()) < 60


def test_keeping_all_keeps_all_in_order() -> None:
    assert select_indices(torch.rand(9), 1.0).tolist() == list(range(9))


def test_select_using_loss_returns_rows_of_both_and_leaves_the_model_as_it_was() -> None:
    model = Net().net
    model[1].eval()
    flags, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    x, y = batches()[0]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    kept = select_using_loss(x, y, model, cross_entropy, 0.5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert flags == [m.training for m in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    rows = rows_of(kept[0], x)
    assert torch.equal(kept[1], y[rows])
    with torch.no_grad(), EvalMode(list(model.modules())):
        losses = cross_entropy(model(x), y, reduction="none")
    assert rows == select_indices(losses, 0.5, torch.Generator().manual_seed(1)).tolist()


def test_the_losses_of_smaller_images_are_those_of_interpolated_ones() -> None:
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    seen = []

    def model(images: Tensor) -> Tensor:
        seen.append(images)
        return images.mean((2, 3)).repeat(1, 2)

    kept, _ = select_using_loss(x, y, model, cross_entropy, 0.5, scale_factor=0.5)
    assert kept.shape == (2, 3, 8, 8)
    # by a half, bilinear samples lie between four pixels
    torch.testing.assert_close(seen[0], nn.functional.avg_pool2d(x, 2))


def test_a_loss_with_more_dimensions_counts_as_its_mean() -> None:
    losses = torch.arange(12.0).reshape(3, 2, 2)
    assert loss_per_row(losses, 3).tolist() == [1.5, 5.5, 9.5]


# --- in training ------------------------------------------------------------------------------------------------


def test_training_is_that_on_the_same_rows_without_any_trace_of_the_extra_pass() -> None:
    record = Record()
    model = train(("selective_backprop", ALWAYS), record)
    assert [len(batch[0]) for batch in record.batches] == [4] * 6
    assert record.untouched == [True] * 6  # random numbers, BatchNorm's buffers, modes
    again = train(Replay(record.batches))
    assert same(model, again)
    assert not same(model, train())
    assert model.passes == [(False, False, 8), (True, True, 4)] * 6


def test_modules_in_eval_mode_stay_there_and_the_others_come_back() -> None:
    class Freeze(Callback):
        @hookimpl
        def fit_start(self, state: Any) -> None:
            self.model = state.model

        @hookimpl
        def epoch_start(self) -> None:
            self.model.net[1].eval()

    record = Record()
    model = train(SelectiveBackprop(**ALWAYS), Freeze(), record)
    assert record.untouched == [True] * 6
    assert not model.net[1].training
    assert model.training
    assert model.net[3].training


def test_a_model_that_draws_in_eval_mode_shifts_nothing() -> None:
    class Draws(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch) + 0.01 * torch.randn(len(batch[0]), 3)

    record = Record()
    train(SelectiveBackprop(**ALWAYS), record, model=Draws())
    assert record.untouched == [True] * 6


def test_rows_are_chosen_by_the_losses_in_eval_mode() -> None:
    class Watch(Record):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            whole = batches()[state.progress.batch]
            with torch.no_grad(), EvalMode(list(state.model.modules())):
                losses = cross_entropy(state.model.net(whole[0]), whole[1], reduction="none")
            selective = state.plan.by_id("selective_backprop").plugin
            self.batches.append((rows_of(state.batch[0], whole[0]), losses, state.generator(selective, "rank")))

    watch = Watch()
    train(SelectiveBackprop(**ALWAYS), watch)
    for rows, losses, generator in watch.batches:
        assert rows == select_indices(losses, 0.5, generator).tolist()


def test_keeping_all_is_training_without_it_and_costs_no_pass() -> None:
    model = train(SelectiveBackprop(keep=1.0, **ALWAYS))
    assert same(model, train())
    assert len(model.passes) == 6


def test_the_extra_pass_runs_in_microbatches_and_finds_the_same_rows() -> None:
    whole, split = Record(), Record()
    train(SelectiveBackprop(**ALWAYS), whole)
    model = train(SelectiveBackprop(**ALWAYS), split, device_train_microbatch_size=5)
    assert model.passes[:3] == [(False, False, 5), (False, False, 3), (True, True, 4)]
    assert [torch.equal(a[0], b[0]) for a, b in zip(whole.batches, split.batches, strict=True)] == [True] * 6


def test_half_precision_outputs_do_not_make_losses_tie() -> None:
    class Half(Net):
        seen: list[torch.dtype] = []

        def forward(self, batch: Any) -> Any:
            return super().forward(batch).bfloat16()

        def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> Any:
            if reduction == "none":
                self.seen.append(outputs.dtype)
            return super().loss(outputs, batch, reduction)

    train(SelectiveBackprop(**ALWAYS), model=Half())
    assert Half.seen == [torch.float32] * 6


def test_no_train_metric_sees_the_extra_pass() -> None:
    class Counting(Net):
        rows: list[int] = []

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"count": self} if is_train else {}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            self.rows.append(len(outputs))

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None:
            pass

    train(SelectiveBackprop(**ALWAYS), model=Counting())
    assert Counting.rows == [4] * 6


# --- order ------------------------------------------------------------------------------------------------------


class Augment(Algorithm):
    roles = {"augments-batch"}

    def __init__(self) -> None:
        self.rows: list[int] = []

    @hookimpl
    def after_dataloader(self, state: Any) -> None:
        self.rows.append(len(state.batch[0]))
        state.batch = (state.batch[0] * 2, state.batch[1])


class Reshape(Augment):
    roles = {"reshapes-sequences"}


@pytest.mark.parametrize("other", [Augment, Reshape])
def test_it_runs_before_what_changes_the_batch_whatever_the_order_of_the_list(other: Any) -> None:
    augment, record = other(), Record()
    model = Net()
    trainer = Trainer(
        model=model,
        train_dataloader=batches(),
        max_duration="6ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[augment, SelectiveBackprop(**ALWAYS), record],
        device="cpu",
        progress_bar=False,
    )
    assert [call.plugin for call in trainer.plan.events["after_dataloader"]] == ["selective_backprop", augment.name]
    trainer.fit()
    assert augment.rows == [4] * 6  # only the rows that are kept are worked on
    for kept, whole in zip(record.batches, batches(), strict=True):
        assert len(rows_of(kept[0] / 2, whole[0])) == 4


def test_two_selections_exclude_each_other() -> None:
    with pytest.raises(ConflictError, match=r"one: cannot run together with two, .*role:selects-samples"):
        train(SelectiveBackprop(id="one"), SelectiveBackprop(id="two"))


# --- batches ----------------------------------------------------------------------------------------------------


def test_everything_with_as_many_rows_is_cut_together() -> None:
    rows = torch.tensor([0, 2])
    batch = {
        "x": torch.arange(6.0).reshape(3, 2),
        "nested": (torch.arange(3), torch.arange(4)),
        "names": ["a", "b", "c"],
        "scale": torch.tensor(2.0),
        "label": "abc",
    }
    cut = take_rows(batch, rows, 3)
    assert cut["x"].tolist() == [[0, 1], [4, 5]]
    assert cut["nested"][0].tolist() == [0, 2]
    assert cut["nested"][1].tolist() == [0, 1, 2, 3]
    assert cut["names"] == ["a", "c"]
    assert float(cut["scale"]) == 2.0
    assert cut["label"] == "abc"
    assert batch["names"] == ["a", "b", "c"]
    pair = take_rows(
        [torch.arange(2), torch.arange(2)], torch.tensor([1]), 2
    )  # as a DataLoader collates: parts, not rows
    assert [part.tolist() for part in pair] == [[1], [1]]
    assert take_rows(["a", "b", "c"], slice(1, 3), 3) == ["a", "b", "c"]
    assert take_rows({"names": ["a", "b", "c"]}, slice(1, 3), 3) == {"names": ["b", "c"]}


class Named(Net):
    def forward(self, batch: Any) -> Any:
        return super().forward((batch["x"],))

    def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> Any:
        losses = cross_entropy(outputs, batch["y"], reduction="none") * batch["weight"]
        return losses if reduction == "none" else losses.mean()


def test_weights_stay_beside_their_rows() -> None:
    record = Record()
    loader = [{"x": x, "y": y, "weight": torch.arange(8.0)} for x, y in batches()]
    train(SelectiveBackprop(input_key="x", target_key="y", **ALWAYS), record, model=Named(), loader=loader)
    for kept, whole in zip(record.batches, loader, strict=True):
        assert kept["weight"].tolist() == rows_of(kept["x"], whole["x"])
        assert torch.equal(kept["y"], whole["y"][kept["weight"].long()])


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor


def test_a_batch_of_a_class_of_its_own_is_cut_through_the_keys() -> None:
    class OfPairs(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward((batch.x,))

        def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> Any:
            return cross_entropy(outputs, batch.y, reduction=reduction)

    record = Record()
    data = DataSpec(
        [Pair(x, y) for x, y in batches()],
        get_num_samples_in_batch=lambda batch: len(batch.x),
        split_batch=lambda batch, size: [
            Pair(x, y) for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True)
        ],
    )
    keys: dict[str, Any] = {
        "input_key": (lambda batch: batch.x, lambda batch, value: replace(batch, x=value)),
        "target_key": (lambda batch: batch.y, lambda batch, value: replace(batch, y=value)),
    }
    train(SelectiveBackprop(**keys, **ALWAYS), record, model=OfPairs(), loader=data, device_train_microbatch_size=2)
    for kept, (x, y) in zip(record.batches, batches(), strict=True):
        assert torch.equal(kept.y, y[rows_of(kept.x, x)])
        assert len(kept.x) == 4


# --- wrong use --------------------------------------------------------------------------------------------------


def test_a_model_whose_loss_takes_no_reduction_is_refused_at_start() -> None:
    class Plain(Net):
        def loss(self, outputs: Any, batch: Any) -> Any:  # type: ignore[override]
            return cross_entropy(outputs, batch[1])

    message = (
        r"selective_backprop: Plain\.loss takes no 'reduction', .* Write def loss\(self, outputs, batch, reduction="
    )
    with pytest.raises(ConflictError, match=message):
        train(SelectiveBackprop(), model=Plain())


class Mean(Net):
    def loss(self, outputs: Any, batch: Any, **kwargs: Any) -> Any:
        return cross_entropy(outputs, batch[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: train(SelectiveBackprop(**ALWAYS), model=Mean()),
            r"selective_backprop: the loss with reduction='none' has shape \(\) for 8 rows\. Expected one loss per row",
        ),
        (
            lambda: loss_per_row({"total": 1}, 2),
            r"selective_backprop: the loss with reduction='none' has type dict for 2 rows",
        ),
        (
            lambda: shrink(torch.ones(2, 3), 0.5),
            r"selective_backprop\.scale_factor: got 0\.5, and inputs of shape \(2, 3\)\. Expected images \(N, C, H, W\)",
        ),
        (
            lambda: train(SelectiveBackprop(scale_factor=0.5, **ALWAYS)),
            r"selective_backprop\.scale_factor: got 0\.5, and inputs of shape \(8, 5\)",
        ),
        (
            lambda: train(SelectiveBackprop(input_key="x", **ALWAYS), loader=[{"a": 1, "y": torch.ones(2)}]),
            r"selective_backprop\.input_key: got 'x', which the batch, a dict with 'a', 'y', does not have\. .* Set input_key",
        ),
        (
            lambda: train(SelectiveBackprop(**ALWAYS), loader=[([x, x], y) for x, y in batches()]),
            r"selective_backprop: the input is a list\. Expected one tensor with samples in dimension 0\. Point input_key",
        ),
        (
            lambda: train(SelectiveBackprop(**ALWAYS), loader=[(x, y[:3]) for x, y in batches()]),
            r"selective_backprop\.target_key: the target has 3 rows and the input 8\. Expected as many",
        ),
    ],
)
def test_what_cannot_be_ranked_is_refused(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"keep": 0.0}, r"selective_backprop\.keep: got 0\.0, .*greater than 0"),
        ({"keep": 1.5}, r"selective_backprop\.keep: got 1\.5, .*less than or equal to 1"),
        ({"start": -0.1}, r"selective_backprop\.start: got -0\.1, .*greater than or equal to 0"),
        ({"end": 1.1}, r"selective_backprop\.end: got 1\.1, .*less than or equal to 1"),
        (
            {"start": 0.9, "end": 0.9},
            r"selective_backprop\.end: got 0\.9 with start=0\.9\. Expected an end after the start\. Give a larger end\.",
        ),
        ({"interrupt": -1}, r"selective_backprop\.interrupt: got -1, .*greater than or equal to 0"),
        ({"scale_factor": 0.0}, r"selective_backprop\.scale_factor: got 0\.0, .*greater than 0"),
        ({"scale_factor": 2.0}, r"selective_backprop\.scale_factor: got 2\.0, .*less than or equal to 1"),
        ({"share": 0.5}, r"selective_backprop\.share: unknown option"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SelectiveBackprop(**kwargs)


def test_the_extra_pass_sees_rows_with_their_microbatch_transforms_and_the_kernels_classifier_will_do() -> None:
    """Without the transform every row would tie; with it the last rows are the wrong ones, and are kept."""
    inputs, targets = torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)
    kept: list[torch.Tensor] = []

    def transform(batch: Any) -> Any:
        wrong = (batch[2] >= 4).float()[:, None]
        return batch[0] + torch.cat([1 - wrong, wrong], 1) * 20, batch[1], batch[2]

    class Keep(Callback):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            kept.append(state.batch[2])

    model = Classifier(torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.module.weight.copy_(torch.eye(2))
        model.module.bias.zero_()
    Trainer(
        model=model,
        train_dataloader={"dataloader": [(inputs, targets, torch.arange(8))], "microbatch_transforms": transform},
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        plugins=[SelectiveBackprop(start=0.0, end=1.0, keep=0.1, interrupt=0), Keep()],
        device="cpu",
        progress_bar=False,
    ).fit()
    assert len(kept[0]) == 1
    assert kept[0].item() >= 4
