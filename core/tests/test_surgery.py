"""Surgery on real modules: what is replaced, what is refused, what is reported."""

import warnings
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptimizerError, SurgeryError
from kernel_core.surgery import SurgeryWarning
from torch import nn


class Net(TrainableModel):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


def make(net: nn.Module, *algorithms: Any, **kwargs: Any) -> Trainer:
    return Trainer(model=Net(net), algorithms=list(algorithms), seed=0, device="cpu", progress_bar=False, **kwargs)


def replace(module_type: type[nn.Module], function: Any, name: str = "swap", **attributes: Any) -> Algorithm:
    def module_replacements(self: Any) -> Any:
        return {module_type: function}

    made: Algorithm = type(name, (Algorithm,), {"module_replacements": hookimpl(module_replacements), **attributes})()
    return made


def test_modules_are_replaced_by_exact_type_first_then_by_base() -> None:
    class Special(nn.Linear):
        pass

    class Both(Algorithm):
        @hookimpl
        def module_replacements(self) -> Any:
            return {nn.Linear: lambda module, path: nn.Identity(), Special: lambda module, path: nn.Dropout(0.5)}

    trainer = make(nn.Sequential(nn.Linear(2, 2), Special(2, 2), nn.ReLU()), Both())
    assert [type(module) for module in trainer.state.model.net] == [nn.Identity, nn.Dropout, nn.ReLU]
    changes = trainer.surgery_report.changes
    assert [(change.path, change.plugin, change.old, change.new) for change in changes] == [
        ("net.0", "both", "Linear", "Identity"),
        ("net.1", "both", "Special", "Dropout"),
    ]


def test_none_keeps_a_module_and_its_children_are_still_visited() -> None:
    seen = []

    def look(module: nn.Module, path: str) -> None:
        seen.append(path)

    class Block(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Block(depth - 1) if depth else nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    with pytest.warns(SurgeryWarning, match="no effect"):
        make(Block(2), replace(Block, look))
    assert seen == ["net", "net.inner", "net.inner.inner"]


def test_a_shared_module_is_asked_about_once_and_stays_shared() -> None:
    shared, calls = nn.ReLU(), []

    def function(module: nn.Module, path: str) -> nn.Module:
        calls.append(path)
        return nn.GELU()

    net = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared), "c": shared})
    made = make(net, replace(nn.ReLU, function)).state.model.net
    assert calls == ["net.c"]
    assert made["a"][0] is made["b"][0] is made["c"]
    assert isinstance(made["c"], nn.GELU)


def test_a_plugin_never_descends_into_its_own_replacement_and_a_later_one_sees_it() -> None:
    wrap = replace(nn.ReLU, lambda module, path: nn.Sequential(nn.ReLU(), nn.Dropout(0.0)), "wrap")
    later = replace(nn.Dropout, lambda module, path: nn.Identity(), "later", after={"wrap"})
    net = make(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), later, wrap).state.model.net
    assert repr([type(module).__name__ for module in net.modules()]) == repr(
        ["Sequential", "Linear", "Sequential", "ReLU", "Identity"]
    )


def test_a_replacement_takes_over_dtype_and_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)).double().eval()
    made = make(
        net,
        replace(nn.Linear, lambda module, path: nn.Linear(2, 2), "linears"),
        replace(nn.ReLU, lambda module, path: nn.PReLU(), "relus"),
    ).state.model.net
    assert made[0].weight.dtype == made[1].weight.dtype == torch.float64
    assert not made[0].training


def test_a_meta_model_is_changed_on_meta_and_then_gets_its_values() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2))
    materialized = []

    class Meta(Algorithm):
        @hookimpl
        def module_replacements(self) -> Any:
            return {nn.Linear: lambda module, path: nn.Linear(2, 2, bias=False)}

        @hookimpl
        def model_materialized(self, model: nn.Module) -> None:
            materialized.append(model.net[0].weight.device.type)  # type: ignore[union-attr, index]

    trainer = make(net, Meta())
    assert not trainer.state.model.net[0].weight.is_meta
    assert materialized == ["cpu"]  # once, when there are values to set
    make(nn.Sequential(nn.Linear(2, 2)), Meta())
    assert materialized == ["cpu", "cpu"]


class Odd(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return x


class KeywordOnly(nn.Module):
    def forward(self, x: Any, *, mask: Any) -> Any:
        return x


class Narrow(nn.Module):
    def forward(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "a string",
            r"swap: at net\.0 \(ReLU\) the replacement function returned 'a string'\. Expected an nn\.Module, or None",
        ),
        (Odd(), r"Odd\.forward takes 2 positional arguments and cannot be called as ReLU\.forward, which takes 1"),
        (KeywordOnly(), r"KeywordOnly\.forward takes none alone positional"),
        (Narrow(), r"Narrow\.forward takes 0 positional"),
    ],
)
def test_a_replacement_that_does_not_fit_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        make(nn.Sequential(nn.ReLU()), replace(nn.ReLU, lambda module, path: answer))


def test_a_replacement_may_take_more_as_long_as_old_calls_work() -> None:
    class Wider(nn.Module):
        def forward(self, x: Any, scale: float = 1.0, *rest: Any) -> Any:
            return x

    assert make(nn.Sequential(nn.ReLU()), replace(nn.ReLU, lambda module, path: Wider())).surgery_report.changes


def test_an_answer_that_is_no_mapping_is_refused() -> None:
    class Wrong(Algorithm):
        @hookimpl
        def module_replacements(self) -> Any:
            return [nn.ReLU]

    with pytest.raises(SurgeryError, match=r"wrong\.module_replacements: returned .*Expected a dict of module type"):
        make(nn.Sequential(nn.ReLU()), Wrong())


def test_surgery_without_effect_warns_and_is_an_error_when_strict() -> None:
    plugin = replace(nn.Conv2d, lambda module, path: nn.Identity())
    with pytest.warns(SurgeryWarning, match="swap: its surgery had no effect on this model"):
        trainer = make(nn.Sequential(nn.ReLU()), plugin)
    assert trainer.surgery_report.no_effect == ["swap"]
    with pytest.raises(SurgeryError, match="swap: its surgery had no effect"):
        make(nn.Sequential(nn.ReLU()), plugin, strict=True)


def test_a_change_that_is_not_recorded_still_counts_as_an_effect() -> None:
    class Freezer(Algorithm):
        @hookimpl
        def transform_model(self, model: nn.Module) -> None:
            model.requires_grad_(False)

    assert make(nn.Sequential(nn.Linear(1, 1)), Freezer()).surgery_report.no_effect == []


def test_surgery_goes_plugin_by_plugin_across_both_hooks() -> None:
    log: list[str] = []

    def plugin(label: str, **attributes: Any) -> Algorithm:
        def module_replacements(self: Any) -> Any:
            log.append(f"{label} replaces")
            return {}

        def transform_model(self: Any, model: nn.Module, report: Any) -> None:
            log.append(f"{label} transforms")
            report.record("net", "a", "b", "made b of a")

        def model_materialized(self: Any, model: nn.Module) -> None:
            log.append(f"{label} sets values")

        functions = (module_replacements, transform_model, model_materialized)
        made: Algorithm = type(
            label, (Algorithm,), {function.__name__: hookimpl(function) for function in functions} | attributes
        )()
        return made

    trainer = make(nn.Sequential(nn.ReLU()), plugin("second", after={"first"}), plugin("first"))
    assert log == [
        f"{label} {what}" for label in ("first", "second") for what in ("replaces", "transforms", "sets values")
    ]
    assert [change.plugin for change in trainer.surgery_report.changes] == ["first", "second"]


def test_two_plugins_that_claim_one_type_without_an_edge_are_named() -> None:
    def wider(module: nn.Module, path: str) -> nn.Module:
        return nn.LeakyReLU()

    one = replace(nn.LeakyReLU, wider, "one")
    other = replace(nn.LeakyReLU, wider, "other")
    report = make(nn.Sequential(nn.LeakyReLU()), one, other).surgery_report
    assert report.remarks == [
        "one and other both replace LeakyReLU and declare no order between them; one went first because it was named first."
    ]
    ordered = replace(nn.LeakyReLU, wider, "other", after={"one"})
    assert make(nn.Sequential(nn.LeakyReLU()), one, ordered).surgery_report.remarks == []


def test_surgery_in_init_points_to_the_surgery_hooks() -> None:
    class Early(Algorithm):
        @hookimpl
        def init(self, state: Any) -> None:
            state.model.net[0] = nn.GELU()

    with pytest.raises(
        SurgeryError, match=r"early: changed the model in init, at net\.0\. Surgery belongs in the hooks"
    ):
        make(nn.Sequential(nn.ReLU()), Early())


def test_surgery_does_not_shift_the_global_generators() -> None:
    plugin = replace(nn.ReLU, lambda module, path: nn.PReLU(int(torch.randint(1, 2, ()))))
    make(nn.Sequential(nn.ReLU()))
    expected = torch.rand(3)
    make(nn.Sequential(nn.ReLU()), plugin)
    assert torch.equal(torch.rand(3), expected)


def test_new_modules_get_the_same_weights_whatever_other_plugins_draw() -> None:
    def new_linear() -> Algorithm:
        return replace(nn.Linear, lambda module, path: nn.Linear(2, 2), "linears")

    greedy = replace(nn.ReLU, lambda module, path: nn.Sequential(nn.Linear(9, 9)), "greedy", before={"linears"})
    alone = make(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), new_linear()).state.model.net[0].weight
    beside = make(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), new_linear(), greedy).state.model.net[0].weight
    assert torch.equal(alone, beside)


class RestructureAt(Algorithm):
    def __init__(self, announced: bool) -> None:
        self.announced = announced

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        if state.progress.epoch == 1:
            state.model.net[0].requires_grad_(False)
            if self.announced:
                state.surgery_report.record("net.0", "trained", "frozen", "frozen after the first epoch")


def test_structure_that_changes_silently_after_surgery_is_named() -> None:
    def run(announced: bool) -> None:
        model = Net(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        Trainer(
            model=model,
            algorithms=[RestructureAt(announced)],
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=[torch.ones(1, 2)],
            max_duration="3ep",
            device="cpu",
            progress_bar=False,
        ).fit()

    with pytest.warns(SurgeryWarning, match=r"noticed at epoch 1: net\.0\. Whoever does this on purpose records it"):
        run(announced=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(announced=True)


# --- optimizers ---------------------------------------------------------------------------------------------------


def wider_linear(module: nn.Module, path: str) -> nn.Module:
    return nn.Linear(2, 2)


def test_ready_optimizers_are_pointed_at_the_parameters_surgery_put_in_place() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    trainer = make(net, replace(nn.Linear, wider_linear), optimizers=optimizer)
    made = trainer.state.model.net
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], made[0].parameters(), strict=True)] == [
        True
    ] * 2
    assert [p is q for p, q in zip(optimizer.param_groups[1]["params"], made[2].parameters(), strict=True)] == [
        True
    ] * 2


def test_a_new_parameter_joins_the_group_of_the_module_it_replaced() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    trainer = make(net, replace(nn.Linear, wider_linear), optimizers=optimizer)
    bias = trainer.state.model.net[1].bias
    assert any(parameter is bias for parameter in optimizer.param_groups[1]["params"])
    assert len(optimizer.param_groups[1]["params"]) == 2


def test_a_parameter_whose_group_is_not_clear_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD([{"params": [net[0].weight]}, {"params": [net[0].bias]}], lr=0.1)
    new = replace(nn.Linear, lambda module, path: Scaled(2), "scaled")
    with pytest.raises(
        OptimizerError, match=r"new parameter net\.0\.scale replaces parameters of net\.0 that are in 2"
    ):
        make(net, new, optimizers=optimizer)
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD([{"params": [net[0].weight]}, {"params": [net[0].bias]}], lr=0.1)
    with pytest.raises(
        OptimizerError, match=r"net\.1\.weight belongs to a module that had none before, and there are 2"
    ):
        make(net, replace(nn.ReLU, lambda module, path: nn.PReLU()), optimizers=optimizer)


class Scaled(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.scale = nn.Parameter(torch.ones(()))


def test_an_optimizer_with_state_is_not_robbed_of_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(SurgeryError, match="optimizer SGD already holds state"):
        make(net, replace(nn.Linear, wider_linear), optimizers=optimizer)


def test_a_parameter_in_no_optimizer_and_one_in_two_are_errors() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        OptimizerError, match=r"2 trainable parameters are in no optimizer, the first is net\.1\.weight"
    ):
        make(net, optimizers=torch.optim.SGD(net[0].parameters(), lr=0.1))
    both = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net[0].parameters(), lr=0.1)]
    with pytest.raises(OptimizerError, match=r"the parameter net\.0\.weight is in 2 groups"):
        make(net, optimizers=both)
    net[1].requires_grad_(False)
    make(net, optimizers=torch.optim.SGD(net[0].parameters(), lr=0.1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(OptimizerError, match="2 of its parameters are not the model's"):
        make(nn.Sequential(nn.Linear(2, 2)), optimizers=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_tied_parameters_stay_in_one_group() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    make(net, replace(nn.ReLU, wider_linear, "none", transform_model=hookimpl(transform_model)), optimizers=optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 1


def transform_model(self: Any, model: nn.Module, report: Any) -> None:
    report.record("net", "", "", "nothing")


def test_a_function_makes_the_optimizer_from_the_final_trainable_parameters() -> None:
    trainer = make(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        replace(nn.ReLU, lambda module, path: nn.PReLU()),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert len(trainer.state.optimizers[0].param_groups[0]["params"]) == 3


def test_optimizers_are_wrapped_in_plan_order() -> None:
    class Wrapper(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer, label: str) -> None:
            super().__init__(inner.param_groups, lr=0.1)
            self.inner, self.label = inner, label

    def wrapper(name: str, **attributes: Any) -> Algorithm:
        def wrap_optimizer(self: Any, optimizer: Any) -> Any:
            return Wrapper(optimizer, name)

        made: Algorithm = type(name, (Algorithm,), {"wrap_optimizer": hookimpl(wrap_optimizer), **attributes})()
        return made

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (wrapped,) = make(net, wrapper("outer", after={"inner"}), wrapper("inner"), optimizers=optimizer).state.optimizers
    assert isinstance(wrapped, Wrapper)
    assert wrapped.label == "outer"
    assert isinstance(wrapped.inner, Wrapper)
    assert wrapped.inner.inner is optimizer


def test_models_without_parameters() -> None:
    trainer = make(nn.Sequential(nn.ReLU()), replace(nn.ReLU, lambda module, path: nn.PReLU()))
    assert trainer.state.device.type == "cpu"


@pytest.mark.gpu
def test_a_model_spread_over_devices_stays_so() -> None:
    spread = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="cuda")})
    model = Net(spread)
    Trainer(model=model, algorithms=[replace(nn.Linear, lambda module, path: nn.Linear(2, 2))], progress_bar=False)
    assert [module.weight.device.type for module in model.net.values()] == ["cpu", "cuda"]
    with pytest.raises(Exception, match=r"device: 'cpu' was asked for, and the model is spread over cpu, cuda"):
        Trainer(model=Net(spread), device="cpu", progress_bar=False)


def test_an_optimizer_that_keeps_its_own_list_still_trains_what_surgery_put_in_place() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    trainer = make(
        net,
        replace(nn.Linear, lambda module, path: nn.Linear(module.in_features, module.out_features)),
        optimizers=torch.optim.LBFGS(net.parameters(), lr=0.1),
        train_dataloader=[torch.ones(2, 2)],
        max_duration="2ba",
    )
    before = [parameter.detach().clone() for parameter in trainer.state.model.parameters()]
    trainer.fit()
    assert not any(torch.equal(a, b) for a, b in zip(before, trainer.state.model.parameters(), strict=True))


def test_names_in_the_optimizer_follow_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    optimizer = torch.optim.SGD([(f"net.{name}", parameter) for name, parameter in net.named_parameters()], lr=0.1)
    make(net, replace(nn.Linear, wider_linear), optimizers=optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["net.0.weight", "net.0.bias"]


def test_one_new_module_at_two_paths_joins_one_group() -> None:
    shared = nn.PReLU()
    net = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    groups = [{"params": net[0].parameters()}, {"params": [*net[2].parameters(), *shared.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    make(net, replace(nn.PReLU, lambda module, path: Scaled(2)), optimizers=optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 5]


def test_a_plugin_that_only_sets_values_is_called() -> None:
    class Values(Algorithm):
        @hookimpl
        def model_materialized(self, model: nn.Module) -> None:
            nn.init.constant_(model.net[0].weight, 3.0)

    trainer = make(nn.Sequential(nn.Linear(1, 1)), Values())
    assert float(trainer.state.model.net[0].weight.detach()) == 3.0
    assert trainer.surgery_report.no_effect == []


def test_what_was_frozen_stays_frozen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    made = make(net, replace(nn.Linear, wider_linear)).state.model.net
    assert [parameter.requires_grad for parameter in made.parameters()] == [False, False, True, True]


def test_a_tie_that_surgery_breaks_and_hooks_it_drops_are_remarked() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Bilinear(2, 2, 2))
    net[1].tied = net[0].weight
    net[0].register_forward_hook(lambda module, inputs, output: None)
    report = make(net, replace(nn.Linear, lambda module, path: nn.Linear(2, 2, bias=False))).surgery_report
    assert report.remarks == [
        "swap: the forward hooks of net.0 are not on what replaced it.",
        "swap: net.0.weight and net.1.tied were one tied parameter before its surgery and no longer are.",
    ]


def test_a_claim_counts_even_when_the_first_plugin_left_nothing() -> None:
    one = replace(nn.ReLU, lambda module, path: nn.GELU(), "one")
    other = replace(nn.ReLU, lambda module, path: nn.Tanh(), "other")
    with pytest.warns(SurgeryWarning, match="other: its surgery had no effect"):
        report = make(nn.Sequential(nn.ReLU()), one, other).surgery_report
    assert "one and other both replace ReLU" in report.remarks[0]


def test_an_error_in_a_replacement_function_names_plugin_and_path() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        make(nn.Sequential(nn.ReLU()), replace(nn.ReLU, lambda module, path: 1 / 0))
    assert caught.value.__notes__[0] == "in plugin 'swap', module_replacements, at net.0"


def test_structure_changed_by_hand_before_fit_is_named_and_an_error_when_strict() -> None:
    def run(strict: bool) -> None:
        model = Net(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=[torch.ones(1, 2)],
            max_duration="1ep",
            device="cpu",
            progress_bar=False,
            strict=strict,
        )
        model.net[1] = nn.Linear(2, 2)
        trainer.fit()

    with pytest.warns(SurgeryWarning, match=r"noticed at the start of fit: net\.1"):
        run(strict=False)
    with pytest.raises(SurgeryError, match=r"noticed at the start of fit: net\.1"):
        run(strict=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, r"odd\.wrap_optimizer: returned True\. Expected an optimizer"),
        ("partial", "3 trainable parameters are in no optimizer"),
    ],
)
def test_what_wrap_optimizer_returns_is_checked(answer: Any, message: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    class Odd(Algorithm):
        @hookimpl
        def wrap_optimizer(self) -> Any:
            return torch.optim.SGD([net[0].weight], lr=0.1) if answer == "partial" else answer

    with pytest.raises(OptimizerError, match=message):
        make(net, Odd(), optimizers=torch.optim.SGD(net.parameters(), lr=0.1))


def test_an_optimizer_that_evaluates_must_be_alone() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    both = [torch.optim.LBFGS(net[0].parameters()), torch.optim.SGD(net[1].parameters(), lr=0.1)]
    with pytest.raises(OptimizerError, match="LBFGS evaluates the model in its step and must be the only optimizer"):
        make(net, optimizers=both)
