"""Against the formula of the paper, the moments of the Beta distribution, and training loops written by hand."""

from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import ConflictError, DataError, OptionError
from kernel_plugin_mixup import MixUp, blend, dense_targets, mixup_batch, sample_indices, sample_mixing
from torch import Tensor, nn

cross_entropy = nn.functional.cross_entropy


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return cross_entropy(outputs, batch[1])


def batches(number: int = 4, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 5, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(number)
    ]


class Record(Callback):
    """Keeps what was drawn, what the model got, and the loss and targets as an observer after the loss sees them."""

    def __init__(self) -> None:
        self.draws: list[tuple[float, Tensor]] = []
        self.inputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.targets: list[Tensor] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self.inputs.append(state.batch[0].clone())
        for active in state.plan.plugins:
            if isinstance(active.plugin, MixUp) and active.plugin._indices is not None:
                self.draws.append((active.plugin._mixing, active.plugin._indices))

    @hookimpl
    def after_loss(self, state: Any) -> None:
        self.losses.append(state.loss.detach().clone())
        self.targets.append(state.batch[1])


def train(*plugins: Any, model: Any = None, optimizer: Any = None, loader: Any = None, **kwargs: Any) -> Any:
    model = model or Net()
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    Trainer(
        model=model,
        train_dataloader=batches() if loader is None else loader,
        max_duration="4ba",
        optimizers=make(model.parameters()),
        plugins=list(plugins),
        device="cpu",
        seed=3,
        progress_bar=False,
        **kwargs,
    ).fit()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


# --- the arithmetic ---------------------------------------------------------------------------------------------


def test_each_sample_is_blended_with_its_partner_by_the_formula() -> None:
    x, y = torch.randn(6, 2, 3, dtype=torch.float64), torch.arange(6)
    indices = torch.tensor([3, 0, 5, 1, 2, 4])
    before = x.clone()
    mixed, partners, mixing = mixup_batch(x, y, mixing=0.3, indices=indices)
    torch.testing.assert_close(mixed, 0.7 * x + 0.3 * torch.stack([x[i] for i in indices.tolist()]))
    assert partners.tolist() == indices.tolist()
    assert mixing == 0.3
    assert torch.equal(x, before)


def test_a_batch_rolled_by_one_with_the_share_turned_round_is_the_other_convention() -> None:
    # elsewhere the batch is rolled and λ is the sample's own share: λ x + (1 - λ) roll(x)
    x, y = torch.randn(5, 4), nn.functional.one_hot(torch.arange(5), 5).float()
    rolled = torch.arange(5).roll(1)
    mixed, partners, mixing = mixup_batch(x, y, mixing=1 - 0.8, indices=rolled)
    torch.testing.assert_close(mixed, 0.8 * x + 0.2 * x.roll(1, 0))
    torch.testing.assert_close(blend(y, mixing, rolled), 0.8 * y + 0.2 * y.roll(1, 0))
    assert torch.equal(partners, y.roll(1, 0))


def test_the_draws_follow_the_generator_only() -> None:
    x, y = torch.randn(32, 2), torch.arange(32)

    def draw(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return [mixup_batch(x, y, generator=generator) for _ in range(2)]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, again, other = draw(1), draw(1), draw(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[0], b[0]) and a[2] == b[2] for a, b in zip(one, again, strict=True))
    assert one[0][2] != other[0][2]
    assert not torch.equal(one[0][1], other[0][1])
    assert one[0][2] != one[1][2]  # a second call goes on in the stream
    assert sorted(one[0][1].tolist()) == list(range(32))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_the_share_has_the_moments_of_the_folded_beta_distribution(alpha: float) -> None:
    draws = torch.tensor([sample_mixing(alpha, seed) for seed in range(8000)], dtype=torch.float64)
    assert float(draws.min()) >= 0
    assert float(draws.max()) <= 0.5
    # m (1 - m) = λ (1 - λ) whichever way λ is folded; E[λ (1 - λ)] = α / (2 (2 α + 1)) for Beta(α, α)
    products = draws * (1 - draws)
    error = products.std() / len(draws) ** 0.5
    assert abs(products.mean() - alpha / (2 * (2 * alpha + 1))) < 4 * error


def test_for_alpha_one_the_share_is_uniform_up_to_a_half() -> None:
    draws = torch.tensor([sample_mixing(1.0, seed) for seed in range(4000)]).sort().values
    steps = (torch.arange(4000) + 0.5) / 4000
    assert float((2 * draws - steps).abs().max()) < 1.95 / 4000**0.5  # Kolmogorov-Smirnov at 0.001


def test_a_tiny_alpha_gives_shares_not_nan() -> None:
    draws = [sample_mixing(1e-4, seed) for seed in range(500)]
    assert all(0 <= draw < 0.5 for draw in draws)
    assert sample_mixing(0.0, 1) == 0.0


def test_permutations_are_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(3000):
        drawn = tuple(sample_indices(torch.empty(3, 1), generator).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5  # chi-square, 5 degrees, at 0.001


def test_class_numbers_become_one_hot_in_the_dimension_of_the_classes() -> None:
    flat = torch.tensor([2, 0])
    assert dense_targets(flat, torch.zeros(2, 3)).tolist() == [[0, 0, 1], [1, 0, 0]]
    image = torch.randint(4, (2, 5, 6))
    first = dense_targets(image, torch.zeros(2, 4, 5, 6))
    assert first.shape == (2, 4, 5, 6)
    assert torch.equal(first.argmax(1), image)
    last = dense_targets(image, torch.zeros(2, 5, 6, 4))
    assert torch.equal(last.argmax(-1), image)
    scores = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(cross_entropy(scores, first), cross_entropy(scores, image))


def test_dense_targets_stay_as_they_are_and_half_precision_does_not_round_the_shares() -> None:
    soft = torch.rand(4, 3)
    assert dense_targets(soft, None) is soft
    assert dense_targets(torch.tensor([1]), torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert dense_targets(torch.tensor([1]), torch.zeros(1, 2, dtype=torch.float64)).dtype == torch.float64
    several = dense_targets(torch.tensor([[1, 0, 1]]), torch.zeros(1, 3))
    assert torch.equal(several, torch.tensor([[1.0, 0.0, 1.0]]))
    assert several.dtype == torch.float32


# --- in training ------------------------------------------------------------------------------------------------


def by_hand(draws: list[tuple[float, Tensor]], interpolate: bool) -> tuple[Net, list[Tensor]]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for (x, y), (m, indices) in zip(batches(), draws, strict=True):
        optimizer.zero_grad()
        outputs = model.net((1 - m) * x + m * x[indices])
        if interpolate:
            loss = (1 - m) * cross_entropy(outputs, y) + m * cross_entropy(outputs, y[indices])
        else:
            one_hot = nn.functional.one_hot(y, 3).float()
            loss = cross_entropy(outputs, (1 - m) * one_hot + m * one_hot[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


@pytest.mark.parametrize("interpolate", [False, True])
def test_in_training_it_is_the_loop_written_by_hand(interpolate: bool) -> None:
    record = Record()
    model = train(("mixup", {"alpha": 1.0, "interpolate_loss": interpolate}), record)
    assert len({mixing for mixing, _ in record.draws}) == 4
    expected, losses = by_hand(record.draws, interpolate)
    close(model, expected)
    torch.testing.assert_close(record.losses, losses)  # who comes after the loss sees the blended one
    assert not same(model, train())


@pytest.mark.parametrize("interpolate", [False, True])
def test_after_the_loss_the_original_targets_are_back_and_the_batch_of_the_loader_is_untouched(
    interpolate: bool,
) -> None:
    loader, record = batches(), Record()
    train(MixUp(1.0, interpolate), record, loader=loader)
    for (x, y), (x_before, y_before), seen in zip(loader, batches(), record.targets, strict=True):
        assert torch.equal(x, x_before)
        assert torch.equal(y, y_before)
        assert seen is y


def test_metrics_see_class_numbers() -> None:
    class WithMetric(Net):
        seen: list[Any] = []

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"seen": self} if is_train else {}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            self.seen.append(batch[1].dtype)

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None:
            pass

    train(MixUp(1.0), model=WithMetric())
    assert WithMetric.seen == [torch.int64] * 4


def test_alpha_zero_is_training_without_it_bit_for_bit() -> None:
    model = train(MixUp(0.0))
    assert same(model, train())
    assert tuple(MixUp(0.0).active_hooks()) == ()


def test_each_microbatch_has_its_own_share_and_permutation() -> None:
    record = Record()
    train(MixUp(1.0), record, device_train_microbatch_size=4)
    assert len(record.draws) == 8
    assert len({mixing for mixing, _ in record.draws}) == 8
    pairs = zip(record.draws[::2], record.draws[1::2], strict=True)
    assert not all(torch.equal(first, second) for (_, first), (_, second) in pairs)
    halves = [half for x, _ in batches() for half in x.split(4)]
    for half, (mixing, indices), seen in zip(halves, record.draws, record.inputs, strict=True):
        torch.testing.assert_close(seen, (1 - mixing) * half + mixing * half[indices])


class TwoPasses(torch.optim.SGD):
    """Evaluates twice in a step, at the weights and at a point nearby, as sharpness-aware methods do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            moved = [(p, 0.1 * p.grad) for group in self.param_groups for p in group["params"]]
            for parameter, by in moved:
                parameter.add_(by)
        closure()
        with torch.no_grad():
            for parameter, by in moved:
                parameter.sub_(by)
        super().step()
        return loss


@pytest.mark.parametrize("size", [None, 4])
def test_an_optimizer_that_evaluates_twice_sees_the_same_blend_twice(size: int | None) -> None:
    record = Record()
    train(MixUp(1.0), record, optimizer=lambda ps: TwoPasses(list(ps), lr=0.1), device_train_microbatch_size=size)
    per_pass = 1 if size is None else 2
    passes = [record.inputs[i : i + per_pass] for i in range(0, len(record.inputs), per_pass)]
    assert len(passes) == 8
    for first, second in zip(passes[::2], passes[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(passes[0][0], passes[2][0])


def test_another_plugin_does_not_shift_the_draws() -> None:
    class Draws(Algorithm):
        @hookimpl
        def before_forward(self, state: Any) -> None:
            torch.rand(3, generator=state.generator(self, "microbatch"))
            torch.rand(3)

    alone, beside = Record(), Record()
    train(MixUp(1.0), alone)
    train(Draws(), MixUp(1.0), beside)
    assert [mixing for mixing, _ in alone.draws] == [mixing for mixing, _ in beside.draws]


def test_keys_and_pairs_of_functions_find_inputs_and_targets() -> None:
    class Named(Net):
        def forward(self, batch: Any) -> Any:
            return self.net(batch["x"])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return cross_entropy(outputs, batch["y"])

    loader = [{"x": x, "y": y} for x, y in batches()]
    pair = (lambda batch: batch["y"], lambda batch, value: {**batch, "y": value})
    expected = train(MixUp(1.0))
    assert same(train(MixUp(1.0, input_key="x", target_key="y"), model=Named(), loader=loader), expected)
    assert same(train(MixUp(1.0, input_key="x", target_key=pair), model=Named(), loader=loader), expected)


# --- with others ------------------------------------------------------------------------------------------------


class Smooth(Algorithm):
    roles = {"smooths-targets"}
    after = {"role:mixes-batch"}

    def __init__(self) -> None:
        self.kept: Any = None
        self.seen: list[Tensor] = []

    @hookimpl
    def before_loss(self, state: Any) -> None:
        self.kept = state.batch[1]
        smoothed = 0.9 * self.kept + 0.1 / 3
        self.seen.append(smoothed)
        state.batch = (state.batch[0], smoothed)

    @hookimpl
    def after_loss(self, state: Any) -> None:
        state.batch = (state.batch[0], self.kept)


def test_targets_are_smoothed_after_they_are_mixed_and_restored_in_reverse() -> None:
    smooth, record = Smooth(), Record()
    train(smooth, MixUp(1.0), record)  # named in the wrong order
    for (_, y), (m, indices), seen, left in zip(batches(), record.draws, smooth.seen, record.targets, strict=True):
        one_hot = nn.functional.one_hot(y, 3).float()
        torch.testing.assert_close(seen, 0.9 * ((1 - m) * one_hot + m * one_hot[indices]) + 0.1 / 3)
        assert torch.equal(left, y)


def test_two_mixups_compose() -> None:
    first, second = MixUp(1.0, id="first"), MixUp(1.0, interpolate_loss=True, id="second")
    record = Record()
    # named the other way round: the one that blends losses has to be inside the bracket of the one that blends targets
    train(second, first, record)
    x, y = batches()[0]
    (m1, i1), (m2, i2) = record.draws[:2]
    mixed = (1 - m1) * x + m1 * x[i1]
    outputs = Net().net((1 - m2) * mixed + m2 * mixed[i2])
    one_hot = nn.functional.one_hot(y, 3).float()
    soft = (1 - m1) * one_hot + m1 * one_hot[i1]
    loss = (1 - m2) * cross_entropy(outputs, soft) + m2 * cross_entropy(outputs, soft[i2])
    torch.testing.assert_close(record.losses[0], loss.detach())
    assert torch.equal(record.targets[0], y)


def test_roles_conflicts_and_hooks_follow_the_option() -> None:
    targets, losses = MixUp(), MixUp(interpolate_loss=True)
    assert set(targets.roles) == {"mixes-batch"}
    assert set(losses.roles) == {"mixes-batch", "interpolates-loss"}
    assert set(targets.active_hooks()) == {"before_forward", "before_loss", "after_loss"}
    assert set(losses.active_hooks()) == {"before_forward", "after_loss"}
    with pytest.raises(ConflictError, match=r"mixup: cannot run together with smooth, .*role:smooths-targets"):
        train(losses, Smooth())
    with pytest.raises(ConflictError, match=r"one: cannot run together with two, .*role:interpolates-loss"):
        train(MixUp(interpolate_loss=True, id="one"), MixUp(interpolate_loss=True, id="two"))


# --- wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mixup_batch([torch.ones(2)], torch.ones(2), 0.1),  # type: ignore[arg-type]
            r"mixup: the input is a list\. Expected one tensor with samples in dimension 0\. Point input_key to it\.",
        ),
        (
            lambda: mixup_batch(torch.ones(2), {"a": 1}, 0.1),  # type: ignore[arg-type]
            r"mixup: the target is a dict\. Expected one tensor .* Point target_key to it\.",
        ),
        (lambda: sample_indices(torch.tensor(1.0)), r"mixup: the input is a scalar tensor\. Expected one tensor"),
        (
            lambda: mixup_batch(torch.ones(2, dtype=torch.uint8), torch.ones(2), 0.1),
            r"mixup: the input is a tensor of torch\.uint8\. Expected floating point, .*microbatch_transforms",
        ),
        (
            lambda: dense_targets(torch.tensor([1]), {"logits": 1}),
            r"mixup: the targets are class numbers and the model's outputs are a dict\. Expected a tensor of scores",
        ),
        (
            lambda: dense_targets(torch.tensor([1, 2]), torch.zeros(2, 3, 4)),
            r"mixup: targets of shape \(2,\) do not fit outputs of shape \(2, 3, 4\)\. Expected class numbers",
        ),
    ],
)
def test_what_cannot_be_blended_is_refused(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_in_training_too() -> None:
    with pytest.raises(DataError, match="mixup: the input is a list"):
        train(MixUp(), loader=[([x, x], y) for x, y in batches()])
    with pytest.raises(
        DataError, match=r"mixup\.input_key: got 0, which the batch, a dict with 'x', 'y', does not have"
    ):
        train(MixUp(), loader=[{"x": x, "y": y} for x, y in batches()])
    for interpolate in (False, True):
        with pytest.raises(DataError, match=r"mixup\.target_key: got 2, which the batch, a tuple, .* Set target_key\."):
            train(MixUp(interpolate_loss=interpolate, target_key=2))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"alpha": -0.1}, r"mixup\.alpha: got -0\.1, .*greater than or equal to 0"),
        ({"alpha": float("inf")}, r"mixup\.alpha: got inf, .*finite"),
        ({"interpolate": True}, r"mixup\.interpolate: unknown option\. Did you mean 'interpolate_loss'\?"),
        ({"input_key": len}, r"mixup\.input_key: got <built-in function len>, expected int \| str \| tuple"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MixUp(**kwargs)
