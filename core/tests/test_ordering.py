import itertools
import random
from typing import Any

import pytest
from kernel_core import Algorithm, Callback, LoggerDestination, hookimpl
from kernel_core.errors import ConflictError, OrderError
from kernel_core.registry.plan import Plan, build_plan, resolve


def plan_of(*plugins: Any) -> Plan:
    return build_plan(resolve(plugins))


def order(plan: Plan, hook: str) -> list[str]:
    return [call.plugin for call in plan.calls(hook)]


class SelectiveBackprop(Algorithm):
    roles = {"selects-samples"}
    before = {"role:augments-batch", "role:reshapes-sequences"}
    conflicts = {"role:selects-samples"}

    @hookimpl
    def after_dataloader(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...


class Cutout(Algorithm):
    roles = {"augments-batch"}

    @hookimpl
    def after_dataloader(self) -> None: ...

    @hookimpl
    def before_loss(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...


class MixUp(Algorithm):
    roles = {"mixes-batch"}

    @hookimpl
    def before_loss(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...


class LabelSmoothing(Algorithm):
    roles = {"smooths-targets"}
    after = {"role:mixes-batch"}

    @hookimpl
    def before_loss(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...


class Monitor(Callback):
    @hookimpl
    def init(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...

    @hookimpl
    def eval_end(self) -> None: ...


class Swap(Algorithm):
    @hookimpl
    def init(self) -> None: ...

    @hookimpl
    def eval_end(self) -> None: ...


class Writer(LoggerDestination):
    @hookimpl
    def init(self) -> None: ...

    @hookimpl
    def eval_end(self) -> None: ...

    @hookimpl
    def after_loss(self) -> None: ...


def test_selective_backprop_runs_first_on_the_event_it_acts_on() -> None:
    plan = plan_of(Cutout(), SelectiveBackprop())
    assert order(plan, "after_dataloader") == ["selective_backprop", "cutout"]
    assert plan.calls("after_dataloader")[1].why == (
        "after selective_backprop: selective_backprop declares before role:augments-batch",
    )


def test_a_true_pair_nests_so_that_restoring_runs_backwards() -> None:
    plan = plan_of(LabelSmoothing(), MixUp())
    assert order(plan, "before_loss") == ["mix_up", "label_smoothing"]
    assert order(plan, "after_loss") == ["label_smoothing", "mix_up"]


def test_bands_keep_their_order_and_init_and_eval_end_have_their_own() -> None:
    plan = plan_of(Writer(), Monitor(), Swap(), MixUp(), Cutout())
    assert order(plan, "init") == ["writer", "monitor", "swap"]
    assert order(plan, "eval_end") == ["monitor", "swap", "writer"]
    assert order(plan, "after_loss") == ["cutout", "mix_up", "monitor", "writer"]
    assert "callbacks run after algorithms" in plan.calls("after_loss")[2].why[0]


def test_ties_follow_the_user_s_list_and_say_so() -> None:
    assert order(plan_of(MixUp(), Cutout()), "before_loss") == ["mix_up", "cutout"]
    plan = plan_of(Cutout(), MixUp())
    assert order(plan, "before_loss") == ["cutout", "mix_up"]
    assert plan.calls("before_loss")[1].why == (
        "after cutout: nothing declared relates them; the order they were named in",
    )


def test_a_constraint_on_one_hook_applies_as_written_and_only_there() -> None:
    class Inner(Algorithm):
        after = {"cutout"}

        @hookimpl
        def before_loss(self) -> None: ...

        @hookimpl(after={"cutout"})
        def after_loss(self) -> None: ...

    plan = plan_of(Inner(), Cutout())
    assert order(plan, "before_loss") == ["cutout", "inner"]
    assert order(plan, "after_loss") == ["cutout", "inner"]  # without it, reverse would put inner first
    assert "on after_loss" in plan.calls("after_loss")[1].why[0]


def test_a_constraint_nobody_matches_is_shown() -> None:
    class Hopeful(Algorithm):
        after = {"role:predicts-weather"}

        @hookimpl(before={"no_such_plugin"})
        def batch_end(self) -> None: ...

    plan = plan_of(Hopeful())
    assert plan.unmatched == (
        "hopeful declares after role:predicts-weather: not active",
        "hopeful declares before no_such_plugin on batch_end: not active",
    )
    assert "role:predicts-weather" in plan.explain()


def test_a_cycle_prints_the_chain_and_who_asserted_each_edge() -> None:
    class One(Algorithm):
        before = {"two"}

    class Two(Algorithm):
        before = {"three"}

    class Three(Algorithm):
        before = {"one"}

    with pytest.raises(OrderError) as caught:
        plan_of(One(), Two(), Three())
    assert str(caught.value).splitlines() == [
        "order: the plugins wait for each other: one -> two -> three -> one",
        "  one before two: one declares before two",
        "  two before three: two declares before three",
        "  three before one: three declares before one",
        "Leave one out, or drop one constraint.",
    ]


def test_a_cycle_on_one_hook_is_found_too() -> None:
    class Left(Algorithm):
        @hookimpl(before={"right"})
        def batch_end(self) -> None: ...

    class Right(Algorithm):
        @hookimpl(before={"left"})
        def batch_end(self) -> None: ...

    with pytest.raises(OrderError, match=r"left -> right -> left"):
        plan_of(Left(), Right())


def test_an_exclusive_role_means_every_other_provider() -> None:
    with pytest.raises(
        ConflictError, match=r"selective_backprop: cannot run together with second.*conflicts role:selects"
    ):
        plan_of(SelectiveBackprop(), SelectiveBackprop(id="second"))  # type: ignore[call-arg]


def test_conflicts_by_name() -> None:
    class Lonely(Algorithm):
        conflicts = {"cut-out", "mix-up"}

    with pytest.raises(ConflictError, match=r"lonely: cannot run together with mix_up.*Leave one of them out"):
        plan_of(Lonely(), MixUp())


def test_a_constraint_across_bands_is_an_error() -> None:
    class Eager(Algorithm):
        after = {"monitor"}

    with pytest.raises(OrderError, match=r"eager: declares after monitor, which is monitor, one of the callbacks"):
        plan_of(Eager(), Monitor())


def test_roles_may_depend_on_options() -> None:
    class Interpolating(Algorithm):
        def __init__(self, loss: bool = False) -> None:
            self.roles = {"interpolates-loss"} if loss else set()
            self.conflicts = {"role:interpolates-loss"} if loss else set()

    plan_of(Interpolating(loss=False, id="a"), Interpolating(loss=True, id="b"))  # type: ignore[call-arg]
    with pytest.raises(ConflictError):
        plan_of(Interpolating(loss=True, id="a"), Interpolating(loss=True, id="b"))  # type: ignore[call-arg]


def test_surgery_constraints_hold_when_the_middle_plugin_answers_another_hook() -> None:
    class A(Algorithm):
        @hookimpl
        def batch_end(self) -> None: ...

    class B(Algorithm):
        after = {"a"}

    class C(Algorithm):
        after = {"b"}

        @hookimpl
        def batch_end(self) -> None: ...

    plan = plan_of(C(), B(), A())
    assert order(plan, "batch_end") == ["a", "c"]
    assert plan.calls("batch_end")[1].why == (
        "after a: a before b: b declares after a; b before c: c declares after b",
    )


def test_random_constraints_are_always_met_and_the_digest_is_stable() -> None:
    """Against an independent oracle: every declared pair is checked on the result itself."""
    draw = random.Random(3)
    for _ in range(60):
        names = [f"p{i}" for i in range(8)]
        hidden = names[:]
        draw.shuffle(hidden)  # a hidden order that the constraints are drawn from, so that none contradict
        pairs = [pair for pair in itertools.combinations(hidden, 2) if draw.random() < 0.3]
        made = []
        for name in names:
            before = {second for first, second in pairs if first == name}
            made.append(type(name, (Algorithm,), {"before": before, "batch_end": hookimpl(lambda self: None)}))
            made[-1].batch_end.__name__ = "batch_end"
        plan = plan_of(*[cls() for cls in made])
        result = order(plan, "batch_end")
        assert all(result.index(first) < result.index(second) for first, second in pairs)
        assert plan.digest == plan_of(*[cls() for cls in made]).digest


def test_the_plan_is_plain_data_and_its_digest_covers_options() -> None:
    class Tuned(Algorithm):
        def __init__(self, strength: float = 1.0) -> None: ...

        @hookimpl
        def batch_end(self) -> None: ...

    document = plan_of(Tuned(strength=2.0)).to_json()
    assert document["events"] == {"batch_end": [{"plugin": "tuned", "kind": "algorithms", "why": []}]}
    assert document["plugins"] == [
        {
            "id": "tuned",
            "name": "tuned",
            "kind": "algorithms",
            "distribution": None,
            "version": None,
            "hash": None,
            "options": {"strength": 2.0},
            "structural": False,
            "affects_training": True,
        }
    ]
    assert document["digest"] != plan_of(Tuned(strength=3.0)).digest


def test_roles_and_distribution_names_compare_in_their_normal_form() -> None:
    class Clips(Algorithm):
        roles = {"clips_gradients"}

        @hookimpl
        def batch_end(self) -> None: ...

    class Late(Algorithm):
        after = {"role:clips-gradients", "some-distribution:other"}

        @hookimpl
        def batch_end(self) -> None: ...

    class Other(Algorithm):
        @hookimpl
        def batch_end(self) -> None: ...

    assert order(plan_of(Late(), Other(), Clips()), "batch_end") == ["other", "clips", "late"]
