"""Algorithms, callbacks and loggers on two ranks: what one process gives on the same global batch, or what they say instead."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Classifier, Evaluator, Trainer, hookimpl
from kernel_core.errors import TrainerError
from kernel_core.testing.ranks import run_on_ranks
from kernel_plugin_memory_monitor import aggregate
from kernel_plugin_selective_backprop import select_indices
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENGINES: dict[str, Any] = {"ddp": {"ddp": {}}, "fsdp": {"fsdp": {}}}
GLOBAL_BATCH, NUM_SAMPLES = 12, 31  # the last batch of an epoch has 7: 4 rows on the first rank, 3 on the second
FEATURES, HIDDEN, CLASSES = 7, 11, 5  # rows that two ranks do not share evenly
SPLIT = {"fsdp": {}, "tensor_parallel": {"degree": 2, "plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}}


class Counter(nn.Module):
    """Changes nothing and has a buffer, which ddp hands around in passes that average."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return x


class Net(nn.Module):
    """Blocks, each sharded in one piece, and layers around them; one of them with a single row, which a rank lacks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, hidden), Counter())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, hidden)) for _ in range(2)
        )
        self.gate, self.last = nn.Linear(hidden, 1), nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * torch.sigmoid(self.gate(x))  # type: ignore[no-any-return]


class Images(nn.Module):
    """What blurpool replaces: strided convolutions and max pools."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def make(case: dict[str, Any]) -> tuple[Classifier, TensorDataset]:
    torch.manual_seed(0)
    dtype = torch.float32 if case.get("single") else torch.float64
    generator = torch.Generator().manual_seed(1)
    num_samples = case.get("num_samples", NUM_SAMPLES)
    labels = torch.randint(0, CLASSES, (num_samples,), generator=generator)
    shape = (1, 15, 15) if case.get("images") else (FEATURES,)
    inputs = torch.randn(num_samples, *shape, generator=generator, dtype=dtype)
    net: nn.Module = Images() if case.get("images") else Net(case.get("hidden", HIDDEN))
    return Classifier(net.to(dtype), num_classes=CLASSES), TensorDataset(inputs, labels)


class Watch(Algorithm):
    """Writes down what each batch was trained on, and what the plugins' generators begin with."""

    after = {"role:mixes-batch"}

    def __init__(self) -> None:
        self.rows: list[
            Any
        ] = []  # of each batch: those read, those trained on, their targets, the seed of this rank's draws
        self.norms: list[float] = []

    @hookimpl(before={"role:selects-samples"})
    def after_dataloader(self, state: Any) -> None:
        x, y = state.batch
        draws = next((one.plugin for one in state.plan.plugins if one.id == "selective_backprop"), self)
        self.rows.append(
            {"read": x.tolist(), "labels": y.tolist(), "seed": state.generator(draws, "rank").initial_seed()}
        )

    @hookimpl
    def batch_start(self, state: Any) -> None:
        x, y = state.batch
        self.rows[-1] |= {"x": x.tolist(), "y": y.tolist()}

    @hookimpl
    def before_loss(self, state: Any) -> None:
        x, y = state.batch
        if y.is_floating_point():  # blended
            self.rows[-1] |= {"x": x.tolist(), "y": y.tolist()}

    @hookimpl(before={"role:clips-gradients"})
    def after_train_batch(self, state: Any) -> None:
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        self.norms.append(float(state.engine.total_norm(gradients)))


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train as ``case`` says on the ranks there are; return what can be compared."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, data = make(case)
    share = GLOBAL_BATCH // max(1, world_size // case.get("parts", 1))
    loader = DataLoader(data, share, shuffle=True)
    held = DataLoader(TensorDataset(*data[:9]), 4)
    watch = Watch()
    with Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=Evaluator(label="held", dataloader=held) if case.get("evaluate") else None,
        eval_interval=case.get("evaluate", "1ep"),
        max_duration=case.get("max_duration", "5ba"),
        optimizers=torch.optim.SGD(model.parameters(), lr=case.get("lr", 0.1), momentum=0.9),
        plugins=[watch, "in_memory_logger", *case.get("plugins", [])],
        parallelism=case.get("parallelism") if world_size > 1 else None,
        device_train_microbatch_size=case.get("microbatch"),
        progress_bar=case.get("progress_bar", False),
        seed=5,
        device="cpu",
        run_name="run",
    ) as trainer:
        trainer.fit()
        engine, plugins = trainer.state.engine, {one.id: one.plugin for one in trainer.plan.plugins}
        found: dict[str, Any] = {
            "weights": plain(engine.model_state(trainer.state.model, full=True)),
            "losses": [float(value) for _, value in plugins["in_memory_logger"].data["loss/train/total"]],  # type: ignore[attr-defined]
            "metrics": {k: float(v) for k, v in trainer.state.eval_metric_values.items()},
            "logged": {
                name: [float(value) for _, value in series]
                for name, series in plugins["in_memory_logger"].data.items()  # type: ignore[attr-defined]
                if not name.startswith(("time/", "loss/"))
            },
            "rows": watch.rows,
            "norms": watch.norms,
            "batches": trainer.state.progress.batch,
            "scale": trainer._precision.state_dict().get("scale"),
        }
        if (ema := plugins.get("ema")) is not None:
            found |= averages(trainer, ema)
        return found


def averages(trainer: Any, ema: Any) -> dict[str, Any]:
    """Return the average, whole; put back what a checkpoint would, whole and in parts; and ask for a copy of the model."""
    state = trainer.state
    held = ema.state_dict()["ema_tensors"]
    whole = {name: state.engine.gather(tensor) for name, tensor in held.items()}
    back = {}
    for kind, saved in (("whole", whole), ("parts", held)):
        ema.load_state_dict({"ema_tensors": saved})
        ema.after_load(state)
        back[kind] = all(
            torch.equal(state.engine.gather(tensor), whole[name]) for name, tensor in ema.ema_tensors.items()
        )
    try:
        copied = ema.get_ema_model(state.model)
        copy: Any = all(torch.equal(tensor, whole[name]) for name, tensor in copied.named_parameters())
    except TrainerError as error:
        copy = str(error)
    parts = [tensor.to_local().numel() for tensor in held.values() if hasattr(tensor, "to_local")]
    entries = sum(tensor.numel() for tensor in whole.values())
    return {"average": plain(whole), "back": back, "copy": copy, "held": sum(parts) if parts else None, "all": entries}


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


def on_both(cases: dict[str, dict[str, Any]], engines: dict[str, Any] = ENGINES, world_size: int = 2) -> dict[Any, Any]:
    """Return by name of the case and of the engine what each rank found, all from one start of the ranks."""
    keys = [(name, engine) for name in cases for engine in engines]
    found = run_on_ranks(
        world_size, __file__, "train_all", [{**cases[name], "parallelism": engines[engine]} for name, engine in keys]
    )
    return {key: [one[index] for one in found] for index, key in enumerate(keys)}


def close(found: Any, expected: Any, what: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name, value in expected.items():
            close(found[name], value, f"{what} {name}", rtol, atol)
        return
    left, right = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda message: f"{what}: {message}")


SAM = ["sam", {"rho": 0.3}]
EMA = ["ema", {"smoothing": 0.5, "ema_start": "1ba"}]


def clip(kind: str, threshold: float) -> list[Any]:
    return ["gradient_clipping", {"clipping_type": kind, "clipping_threshold": threshold}]


SAME: dict[str, dict[str, Any]] = {
    "sam": {"plugins": [SAM]},
    "ema": {"plugins": [EMA], "evaluate": "2ba"},
    "norm": {"plugins": [clip("norm", 0.05)]},
    "value": {"plugins": [clip("value", 0.004)]},
    "adaptive": {"plugins": [clip("adaptive", 0.02)]},
}
SAME_SLOW: dict[str, dict[str, Any]] = {
    "sam clipped, every second step, microbatches": {
        "plugins": [["sam", {"rho": 0.3, "interval": 2}], clip("norm", 0.05)],
        "microbatch": 2,
    },
    "sam and ema": {"plugins": [SAM, EMA], "microbatch": 4, "evaluate": "2ba"},
    "ema by epochs": {"plugins": [["ema", {"half_life": "1ep"}]], "max_duration": "2ep", "evaluate": "1ep"},
    "blurpool": {"plugins": [["blurpool", {"min_channels": 1}]], "images": True},
}


def compare(cases: dict[str, dict[str, Any]], found: dict[Any, Any]) -> None:
    """All but sums in another order is as in one process, where the plugins do change something."""
    alone = {name: train(case) for name, case in cases.items()}
    plainly = {name: train({**case, "plugins": []}) for name, case in cases.items()}
    for (name, engine), (first, *others) in found.items():
        expected, without, what = alone[name], plainly[name], f"{name} under {engine}"
        close(first["weights"], expected["weights"], what)
        close(first["norms"], expected["norms"], f"{what}, norms")
        close(first["losses"], expected["losses"], f"{what}, losses", 1e-6, 1e-7)
        for entry in ("average", "metrics"):
            close(first.get(entry, {}), expected.get(entry, {}), f"{what}, {entry}", 1e-6, 1e-9)
        for other in others:
            assert (other["norms"], other["losses"]) == (first["norms"], first["losses"]), what
        assert first.get("average", first["weights"]) != without["weights"], f"{what}: the plugin changed nothing"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two ranks found: all quick cases from one start of theirs."""
    folder = tmp_path_factory.mktemp("run")
    cases = {**SAME, **ROWS}
    keys = [(name, engine) for name in cases for engine in ENGINES]
    trained = [{**cases[name], "parallelism": ENGINES[engine]} for name, engine in keys]
    ranks = run_on_ranks(2, __file__, "quick", trained, str(folder))
    return {
        "trained": {key: [rank["trained"][index] for rank in ranks] for index, key in enumerate(keys)},
        "observed": [rank["observed"] for rank in ranks],
        "aggregated": [rank["aggregated"] for rank in ranks],
        "folder": folder,
    }


def quick(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    return {
        "trained": train_all(cases),
        "observed": {name: observe(engine, f"{folder}/{name}") for name, engine in ENGINES.items()},
        "aggregated": {
            name: float(value)
            for name, value in aggregate({"a": 1.0 + int(os.environ["RANK"]), "b": -4.0}, torch.device("cpu")).items()
        },
    }


@pytest.mark.ranks
def test_sam_ema_and_clipping_give_what_one_process_gives(found: Any) -> None:
    found = found["trained"]
    compare(SAME, {key: ranks for key, ranks in found.items() if key[0] in SAME})
    for engine in ENGINES:
        for rank in found["ema", engine]:
            assert rank["back"] == {"whole": True, "parts": True}
    assert all(rank["copy"] is True and rank["held"] is None for rank in found["ema", "ddp"])
    shares = [rank["held"] for rank in found["ema", "fsdp"]]
    assert sum(shares) == found["ema", "fsdp"][0]["all"]  # nobody holds the whole average
    assert max(shares) < 0.6 * sum(shares)
    for rank in found["ema", "fsdp"]:
        assert rank["copy"].startswith(
            "ema: cannot copy the model, since module.first.0.weight is sharded over the ranks."
        )


MIXUP = {"plugins": [["mixup", {"alpha": 1.0}]]}
SELECT = {"plugins": [["selective_backprop", {"start": 0.0, "end": 1.0, "keep": 0.5, "interrupt": 0}]]}
ROWS: dict[str, dict[str, Any]] = {
    "mixup": MIXUP,
    "mixup of losses": {"plugins": [["mixup", {"alpha": 1.0, "interpolate_loss": True}]]},
    "selection": SELECT,
    # in the third batch one rank has rows for two passes, the other for one
    "selection in parts": {**SELECT, "microbatch": 3},
}


def together(ranks: list[dict[str, Any]], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the ranks trained on in a batch, as one batch."""
    rows = [one["rows"][index] for one in ranks]
    x = torch.cat([torch.tensor(row["x"], dtype=torch.float64) for row in rows])
    y = torch.cat([torch.tensor(row["y"], dtype=torch.float64) for row in rows])
    return x, y if y.ndim == 2 else y.long()


def check_by_hand(ranks: list[dict[str, Any]], case: dict[str, Any], what: str, look: Any) -> None:
    """Plain steps on the mean over what all ranks trained on give the ranks' weights; ``look`` sees the model before each."""
    model, _ = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(5):
        # where the last batch of an epoch has one row, the second rank computes along, and what it computes counts nothing
        present = ranks[:1] if case.get("num_samples") == 25 and index == 2 else ranks
        look(model, index, [one["rows"][index] for one in present])
        x, y = together(present, index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model((x, y)), y).backward()
        optimizer.step()
    close(ranks[0]["weights"], plain(model.state_dict()), what)


def check_mixing(model: nn.Module, index: int, rows: list[dict[str, Any]]) -> None:
    """Each row is blended with one of its own rank, by a share that all ranks have alike."""
    shares = []
    for row in rows:
        own, mixed = (torch.tensor(row[name], dtype=torch.float64) for name in ("read", "x"))
        blended = [sorted(value for value in target if value > 0) for target in row["y"]]
        share = next(values[0] for values in blended if len(values) == 2)  # of two samples of different classes
        shares.append(share)
        partners = (mixed - (1 - share) * own) / share
        assert ((partners[:, None] - own[None]).abs().amax(2).amin(1) < 1e-6).all()
    assert max(shares) - min(shares) < 1e-12


def check_selection(model: nn.Module, index: int, rows: list[dict[str, Any]]) -> None:
    """Each rank keeps half of its own rows, drawn by their losses from random numbers of its own."""
    for row in rows:
        read, labels = torch.tensor(row["read"], dtype=torch.float64), torch.tensor(row["labels"])
        with torch.no_grad():
            losses = nn.functional.cross_entropy(model((read, labels)), labels, reduction="none").float()
        kept = select_indices(losses, 0.5, torch.Generator().manual_seed(row["seed"]))
        assert len(kept) == max(1, len(read) // 2)
        assert row["x"] == read[kept].tolist()
    assert len({row["seed"] for row in rows}) == len(rows)


def check_rows(found: dict[Any, Any], cases: dict[str, dict[str, Any]]) -> None:
    for name, engine in [key for key in found if key[0] in cases]:
        ranks, what = found[name, engine], f"{name} under {engine}"
        assert ranks[0]["norms"] == ranks[1]["norms"], what
        if name.startswith("selection"):
            check_by_hand(ranks, cases[name], what, check_selection)
        elif name == "mixup":
            check_by_hand(ranks, cases[name], what, check_mixing)
            close(found["mixup of losses", engine][0]["weights"], ranks[0]["weights"], what)


@pytest.mark.ranks
def test_mixup_and_selection_work_within_the_batch_of_a_rank_and_train_on_the_mean_over_all(found: Any) -> None:
    check_rows(found["trained"], ROWS)


@pytest.mark.ranks
@pytest.mark.slow
def test_more_runs_give_what_one_process_gives() -> None:
    compare(SAME_SLOW, on_both(SAME_SLOW))


@pytest.mark.ranks
@pytest.mark.slow
def test_every_kind_of_engine_gives_what_one_process_gives() -> None:
    engines = {
        "forced": {"ddp": {"sync_strategy": "forced_sync"}},
        "multi": {"ddp": {"sync_strategy": "multi_auto_sync"}},
        "unused": {"ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": False}},
        "grad_op": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}},
        "no_shard": {"fsdp": {"sharding_strategy": "NO_SHARD"}},
        "offload": {"fsdp": {"cpu_offload": True, "activation_checkpointing": True}},
    }
    cases = {"sam and ema": SAME_SLOW["sam and ema"], "adaptive": SAME["adaptive"], "value": SAME["value"]}
    compare(cases, on_both(cases, engines))


@pytest.mark.ranks
@pytest.mark.slow
def test_selection_with_a_rank_that_has_no_batch_left() -> None:
    cases = {
        "selection": {**SELECT, "num_samples": 25},
        "selection in parts": {**SELECT, "num_samples": 25, "microbatch": 3},
    }
    engines = {
        **ENGINES,
        "multi": {"ddp": {"sync_strategy": "multi_auto_sync"}},
        "kept": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    }
    check_rows(on_both(cases, engines), cases)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_split_model_is_clipped_climbed_and_averaged_as_a_whole() -> None:
    # tensor parallelism cuts through the rows of every other layer, and parameters that are not split lie beside them
    case: dict[str, Any] = {"hidden": 12, "parts": 2, "microbatch": 3}
    kinds = {"adaptive": [clip("adaptive", 0.02)], "value": [clip("value", 0.004)], "sam and ema": [SAM, EMA]}
    cases = {name: {**case, "plugins": plugins} for name, plugins in kinds.items()}
    compare(cases, on_both(cases, {"both": SPLIT}, 4))


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_hold_parts_of_a_layer_select_and_mix_the_same_rows() -> None:
    cases = {name: {**case, "hidden": 12, "parts": 2} for name, case in ROWS.items() if "parts" not in name}
    alone = {"tensor": {"tensor_parallel": SPLIT["tensor_parallel"]}}
    for (name, _), (first, second) in on_both(cases, alone).items():
        assert first["rows"] == second["rows"], name
        assert first["norms"] == second["norms"], name


class Counted(Classifier):
    def flops_per_batch(self, batch: Any) -> float:
        return 10.0 * len(batch[0])


def observe(parallelism: Any, folder: str) -> dict[str, Any]:
    """Train with everything that only watches; the second rank logs to nobody."""
    model, data = make({})
    held = DataLoader(TensorDataset(*data[24:]), 4)
    plugins: list[Any] = [
        ["file_logger", {"filename": f"{folder}/{{rank}}.jsonl", "flush_interval": 1}],
        ["progress_bar", {"interval_s": 0.001}],
        ["memory_monitor", {"dist_aggregate_batch_interval": 2}],
        ["speed_monitor", {"time_unit": "seconds"}],
        ["early_stopper", {"monitor": "metrics/held/MulticlassAccuracy", "patience": 1, "min_delta": 1e9}],
        *["lr_monitor", "timeline"],
    ]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    written = io.StringIO()
    with (
        contextlib.redirect_stderr(written),
        Trainer(
            model=Counted(model.module, num_classes=CLASSES),
            train_dataloader=DataLoader(TensorDataset(*data[:24]), GLOBAL_BATCH // world_size),
            eval_dataloader=Evaluator(label="held", dataloader=held),
            max_duration="9ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            plugins=plugins,
            parallelism=parallelism,
            seed=5,
            device="cpu",
        ) as trainer,
    ):
        trainer.fit()
        batches = trainer.state.progress.batch
    return {"stderr": written.getvalue(), "batches": batches}


def records(path: Path) -> list[dict[str, Any]]:
    """Return what was logged at the end of each batch."""
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "step" in record and "table" not in record:
            merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged) if step]


@pytest.mark.ranks
def test_callbacks_and_loggers_speak_for_all_ranks_once(found: Any, tmp_path: Path) -> None:
    alone = observe(None, str(tmp_path))
    for engine in ENGINES:
        first, second = (rank[engine] for rank in found["observed"])
        folder = found["folder"] / engine
        assert second["stderr"] == "", engine
        assert [path.name for path in folder.iterdir()] == ["0.jsonl"]
        for said in (
            "train ",
            "backward",
            "early_stopper: MulticlassAccuracy of held",
            "memory_monitor: a device of type cpu",
        ):
            assert first["stderr"].count(said) >= 1, (engine, said)
        assert first["batches"] == second["batches"] == alone["batches"] == 6
        logged, expected = records(folder / "0.jsonl"), records(tmp_path / "0.jsonl")
        for one, other in zip(logged, expected, strict=True):
            assert one["lr-SGD/group0"] == 0.1
            assert one["time/sample"] == other["time/sample"]
            assert one["loss/train/total"] == pytest.approx(other["loss/train/total"], rel=1e-6)
            assert ("memory/process_rss_avg" in one) == (one["step"] % 2 == 0)
        assert logged[-1]["metrics/held/MulticlassAccuracy"] == pytest.approx(
            expected[-1]["metrics/held/MulticlassAccuracy"], rel=1e-6
        )
        check_speed(logged)


def check_speed(logged: list[dict[str, Any]]) -> None:
    begin, last = logged[0], logged[-1]
    seconds = last["time/total_wct"] - begin["time/total_wct"]
    samples = (last["time/sample"] - begin["time/sample"]) / seconds
    assert last["throughput/samples_per_sec"] == pytest.approx(samples)
    assert last["throughput/device/samples_per_sec"] == pytest.approx(samples / 2)
    assert last["throughput/batches_per_sec"] == pytest.approx(samples / GLOBAL_BATCH)
    assert last["throughput/flops_per_sec"] == pytest.approx(10 * samples)
    assert last["throughput/device/flops_per_sec"] == pytest.approx(5 * samples)


@pytest.mark.ranks
def test_memory_is_aggregated_over_the_ranks(found: Any) -> None:
    expected = {"a_avg": 1.5, "a_min": 1.0, "a_max": 2.0, "b_avg": -4.0, "b_min": -4.0, "b_max": -4.0}
    assert found["aggregated"] == [expected, expected]


@pytest.mark.ranks
@pytest.mark.slow
def test_mixed_precision_on_ranks() -> None:
    cases = {
        name: {
            "single": True,
            "plugins": [["mixed_precision", {"precision": name}]],
            "max_duration": "12ba",
            "lr": 0.01,
        }
        for name in ("amp_bf16", "amp_fp16")
    }
    full = train({**cases["amp_bf16"], "plugins": []})
    for (name, engine), ranks in on_both(cases, {**ENGINES, "full": {"fsdp": {"mixed_precision": "FULL"}}}).items():
        what = f"{name} under {engine}"
        close(ranks[0]["losses"], train(cases[name])["losses"], what, 2e-2, 2e-2)
        assert ranks[0]["losses"] != full["losses"], what
        # a step with an overflow anywhere is passed over, and the scale halved, on all ranks
        assert ranks[0]["scale"] == ranks[1]["scale"], what
        assert ranks[0]["norms"] == ranks[1]["norms"], what


class Fails(Algorithm):
    """Ends the second evaluation in its middle."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.weights = [part(parameter).clone() for parameter in state.model.parameters()]

    @hookimpl
    def eval_batch_end(self, state: Any) -> None:
        if state.progress.batch == 4:
            assert not any(map(torch.equal, self.weights, map(part, state.model.parameters())))  # it holds the average
            raise ArithmeticError("on purpose")


def part(parameter: Any) -> torch.Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()  # type: ignore[no-any-return]


def fail() -> dict[str, bool]:
    back = {}
    for name, parallelism in ENGINES.items():
        model, data = make({})
        fails = Fails()
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, 6),
            eval_dataloader=DataLoader(data, 6),
            eval_interval="2ba",
            max_duration="9ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            plugins=[fails, EMA],
            parallelism=parallelism,
            progress_bar=False,
            device="cpu",
        )
        with contextlib.suppress(ArithmeticError):
            trainer.fit()
        back[name] = all(map(torch.equal, fails.weights, map(part, model.parameters())))
    return back


@pytest.mark.ranks
@pytest.mark.slow
def test_an_evaluation_that_fails_gives_the_weights_of_training_back() -> None:
    assert run_on_ranks(2, __file__, "fail") == [dict.fromkeys(ENGINES, True)] * 2


class Overflows(Algorithm):
    """Lets a gradient overflow in the second rank's shards alone, and writes down whether weights move."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.moved: list[bool] = []

    @hookimpl
    def after_backward(self, state: Any) -> None:
        parameters = list(state.model.parameters())
        self.weights = [part(parameter).clone() for parameter in parameters]
        if state.progress.batch == 2 and state.rank == 1:
            part(parameters[-1].grad).fill_(torch.inf)

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.moved.append(not all(map(torch.equal, self.weights, map(part, state.model.parameters()))))


def overflow() -> dict[str, Any]:
    model, data = make({"single": True})
    overflows = Overflows()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, 6),
        max_duration="4ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        plugins=[overflows, ["mixed_precision", {"precision": "amp_fp16"}]],
        parallelism="fsdp",
        progress_bar=False,
        device="cpu",
    ) as trainer:
        scaler = trainer._precision._scaler
        assert scaler is not None
        scaler._init_scale = 256.0  # low enough for nothing else to overflow
        trainer.fit()
        return {"moved": overflows.moved, "scale": scaler.get_scale()}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    expected = {"moved": [True, True, False, True], "scale": 128.0}
    assert run_on_ranks(2, __file__, "overflow") == [expected, expected]
