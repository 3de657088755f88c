"""The adapter, in a real plan."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, hookimpl
from kernel_core.errors import OptionError
from kernel_core.registry.plan import Plan, build_plan, resolve
from kernel_core.surgery import SurgeryReport
from kernel_plugin_alibi import Alibi, AlibiRequest, Change, ZeroPositionEmbedding
from torch import nn


class Special(nn.Linear):
    pass


class Provider(Algorithm):
    """Another package's plugin."""

    def __init__(self, label: str = "special") -> None:
        self.label = label

    @hookimpl(optional=True)
    def alibi_attention_policies(self) -> Any:
        def policy(module: nn.Module, request: AlibiRequest) -> list[Change]:
            return [Change("weight", "old", self.label, f"up to {request.max_sequence_length}")]

        return {Special: policy}


def plan_of(*plugins: Algorithm) -> Plan:
    return build_plan(resolve(plugins))


def transform(plan: Plan, model: nn.Module) -> SurgeryReport:
    report = SurgeryReport()
    state: Any = SimpleNamespace(plan=plan)
    for call in plan.calls("transform_model"):
        call.function(**{name: {"model": model, "report": report, "state": state}[name] for name in call.arguments})
    return report


def test_the_model_is_changed_and_every_change_recorded(make: Callable[..., Any]) -> None:
    model = nn.ModuleDict({"body": make("gpt2")})
    report = transform(plan_of(Alibi(max_sequence_length=1_000_000)), model)
    assert [(change.path, change.old) for change in report.changes] == [
        ("body.transformer.wpe", "Embedding(16, 24)"),
        ("body.transformer", "sdpa"),
    ]
    limits = {"max_sequence_length": 1_000_000, "max_bias_bytes": 2 * 1024**3}
    assert model["body"].config.kernel_plugin_alibi == limits


def test_nothing_is_recorded_where_nothing_matches() -> None:
    assert transform(plan_of(Alibi()), nn.Linear(2, 2)).changes == []


def test_another_package_adds_a_class_through_the_hook() -> None:
    model = nn.Sequential(Special(2, 2))
    report = transform(plan_of(Alibi(max_sequence_length=7), Provider()), model)
    (change,) = report.changes
    assert (change.path, change.new, change.what) == ("0.weight", "special", "up to 7")
    assert report.remarks == []
    two = plan_of(Provider("first", id="a"), Alibi(), Provider("second", id="b"))
    report = transform(two, model)
    assert [change.new for change in report.changes] == ["second"]
    assert report.remarks == ["alibi: several plugins gave a policy for Special; the last one counts."]


def test_a_provider_works_without_alibi() -> None:
    assert plan_of(Provider()).events == {}


def test_tables_are_zeroed_again_once_there_are_values(make: Callable[..., Any]) -> None:
    model = make("gpt2").to("meta")
    plugin = Alibi()
    transform(plan_of(plugin), model)
    model.to_empty(device="cpu")
    table = model.transformer.wpe
    assert isinstance(table, ZeroPositionEmbedding)
    table.weight.data.fill_(3.0)
    plugin.model_materialized(model)
    assert not table.weight.any()
    assert not table.weight.requires_grad


def test_training_batches_are_cut_and_other_batches_left_alone() -> None:
    state: Any = SimpleNamespace(batch={"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    Alibi().after_dataloader(state)
    assert state.batch["input_ids"].shape == (8, 2)
    images = (torch.zeros(2, 1, 8, 8), torch.zeros(2))
    state.batch = images
    Alibi().after_dataloader(state)
    assert state.batch is images


def test_the_batch_hook_is_active_only_where_it_does_something() -> None:
    assert "after_dataloader" in plan_of(Alibi()).events
    assert set(plan_of(Alibi(train_sequence_length_scaling=1)).events) == {
        "kernel_addhooks",
        "transform_model",
        "model_materialized",
    }


def test_order_against_others() -> None:
    class Warmup(Algorithm):
        roles = {"warms-sequence-length"}

        @hookimpl
        def after_dataloader(self, state: Any) -> None: ...

    class Selection(Algorithm):
        roles = {"selects-samples"}

        @hookimpl
        def after_dataloader(self, state: Any) -> None: ...

    plan = plan_of(Warmup(), Alibi(), Selection())
    assert [call.plugin for call in plan.calls("after_dataloader")] == ["selection", "alibi", "warmup"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequence_length": 0}, r"^alibi.max_sequence_length.*: got 0, expected"),
        ({"max_sequence_length": "many"}, r"^alibi.max_sequence_length.*: got 'many', expected"),
        ({"train_sequence_length_scaling": 0}, r"^alibi.train_sequence_length_scaling: got 0, expected"),
        ({"train_sequence_length_scaling": 1.5}, r"^alibi.train_sequence_length_scaling: got 1.5, expected"),
        (
            {"train_sequence_length_scaling": 0.3},
            r"^alibi.train_sequence_length_scaling: got 0.3. Expected 1 or one over",
        ),
        ({"max_bias_bytes": -1}, r"^alibi.max_bias_bytes: got -1, expected"),
        ({"sequence_length": 3}, r"^alibi.sequence_length: unknown option"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Alibi(**options)
