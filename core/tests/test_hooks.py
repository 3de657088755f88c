import sys
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from kernel_core import Algorithm, Callback, hookimpl, hooks, hookspec
from kernel_core.errors import HookError, OptionError, PluginLoadError
from kernel_core.registry.hookmanager import HookManager
from kernel_core.registry.plan import Plan, build_plan, resolve


def plan_of(*plugins: Any) -> Plan:
    return build_plan(resolve(plugins))


def test_every_event_of_composer_is_a_hook() -> None:
    composer = """init before_load after_load fit_start iteration_start epoch_start before_dataloader after_dataloader
    batch_start before_train_batch before_forward after_forward before_loss after_loss before_backward
    after_backward after_train_batch batch_end batch_checkpoint epoch_end epoch_checkpoint iteration_end
    iteration_checkpoint fit_end eval_before_all eval_start eval_batch_start eval_before_forward
    eval_after_forward eval_batch_end eval_end eval_after_all eval_standalone_start eval_standalone_end
    predict_start predict_batch_start predict_before_forward predict_after_forward predict_batch_end
    predict_end""".split()
    assert len(composer) == 40
    assert set(composer) <= set(HookManager().specs)


def test_every_hook_is_documented_and_pairs_close_what_exists() -> None:
    specs = HookManager().specs
    for name, spec in specs.items():
        assert len(getattr(hooks, name).__doc__) > 25, name
        assert spec.closes is None or spec.closes in specs


def test_reverse_hooks_are_exactly_the_true_pairs() -> None:
    reverse = {name for name, spec in HookManager().specs.items() if spec.order == "reverse"}
    assert reverse == {
        "after_forward",
        "after_loss",
        "after_backward",
        "eval_after_forward",
        "eval_after_all",
        "predict_after_forward",
        "eval_end",
        "predict_end",
    }


class Misspelt(Callback):
    @hookimpl
    def batch_ends(self) -> None: ...


class Unmarked(Callback):
    def batch_end(self, state: Any) -> None: ...


class UnknownArgument(Callback):
    @hookimpl
    def batch_end(self, stat: Any) -> None: ...


class DefaultValue(Callback):
    @hookimpl
    def batch_end(self, state: Any, logger: Any = None) -> None: ...


class Keywords(Callback):
    @hookimpl
    def batch_end(self, **everything: Any) -> None: ...


class First(Callback):
    @pluggy.HookimplMarker("kernel")(tryfirst=True)
    def batch_end(self) -> None: ...


class WrongActive(Callback):
    def active_hooks(self) -> set[str]:
        return {"batch_start"}

    @hookimpl
    def batch_end(self) -> None: ...


class Yields(Callback):
    @hookimpl
    def batch_end(self) -> Any:
        yield


class Async(Callback):
    @hookimpl
    async def batch_end(self) -> None: ...


class Static(Callback):
    @staticmethod
    def batch_end() -> None: ...


class OnInstance(Callback):
    def __init__(self) -> None:
        self.batch_end = lambda state: None


class FromTheFuture(Callback):
    hook_api = 99


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Misspelt, r"misspelt\.batch_ends: there is no hook of that name\. Did you mean 'batch_end'"),
        (Unmarked, r"unmarked\.batch_end: is named like a hook but not marked.* Put @hookimpl above it"),
        (
            UnknownArgument,
            r"unknown_argument\.batch_end: takes 'stat'.* Did you mean 'state'\? It passes state, logger",
        ),
        (DefaultValue, r"default_value\.batch_end: the argument 'logger' has a default value"),
        (Keywords, r"keywords\.batch_end: takes \*\*everything"),
        (First, r"first\.batch_end: is marked tryfirst"),
        (WrongActive, r"wrong_active\.active_hooks: names 'batch_start', which the plugin does not answer"),
        (Yields, r"yields\.batch_end: is a generator or coroutine, whose body would never run"),
        (Async, r"async\.batch_end: is a generator or coroutine"),
        (Static, r"static\.batch_end: a hook must be a plain method, not a staticmethod"),
        (OnInstance, r"on_instance\.batch_end: is set on the instance, where no hook is looked for"),
        (FromTheFuture, r"from_the_future: was written for level 99 of the hook interface"),
    ],
)
def test_a_hook_that_would_be_silent_is_an_error(plugin: type[Callback], message: str) -> None:
    with pytest.raises(HookError, match=message):
        plan_of(plugin())


def test_first_and_last_do_not_exist() -> None:
    with pytest.raises(HookError, match="There is no first or last here"):
        hookimpl(trylast=True)  # type: ignore[call-overload]


def test_registration_is_atomic() -> None:
    class Good(Callback):
        name = "good"

        @hookimpl
        def batch_end(self) -> None: ...

    with pytest.raises(HookError):
        plan_of(Good(), Misspelt())
    assert [call.plugin for call in plan_of(Good()).calls("batch_end")] == ["good"]


def test_a_property_of_a_plugin_is_not_run() -> None:
    class Careful(Callback):
        @property
        def costly(self) -> int:
            raise RuntimeError("read")

        @hookimpl
        def batch_end(self) -> None: ...

    assert len(plan_of(Careful()).calls("batch_end")) == 1


def test_inactive_hooks_are_not_in_the_plan() -> None:
    class Sometimes(Algorithm):
        def __init__(self, often: bool = False) -> None:
            self.often = often

        def active_hooks(self) -> set[str] | None:
            return None if self.often else {"epoch_end"}

        @hookimpl
        def epoch_end(self) -> None: ...

        @hookimpl
        def batch_end(self) -> None: ...

    assert set(plan_of(Sometimes()).events) == {"epoch_end"}
    assert set(plan_of(Sometimes(often=True)).events) == {"epoch_end", "batch_end"}


class Host(Algorithm):
    @hookimpl
    def kernel_addhooks(self, hooks: Any) -> None:
        @hookspec()
        def host_flavours() -> list[str]:  # type: ignore[empty-body]
            """Fires when the host asks."""

        hooks.add(SimpleNamespace(host_flavours=host_flavours, __name__="flavours"))


class Guest(Algorithm):
    @hookimpl(optional=True)
    def host_flavours(self) -> list[str]:
        return ["mint"]


def test_a_plugin_defines_a_hook_and_another_answers_it() -> None:
    assert plan_of(Guest(), Host()).call("host_flavours") == [["mint"]]


def test_an_optional_answer_waits_for_its_owner() -> None:
    plan = plan_of(Guest())
    assert not plan.events
    with pytest.raises(HookError, match="there is no hook 'host_flavours'"):
        plan.call("host_flavours")


def test_calls_are_bound_to_what_each_answer_takes() -> None:
    seen: list[Any] = []

    class Taker(Callback):
        @hookimpl
        def batch_end(self, logger: Any, state: Any) -> None:
            seen.append((state, logger))

        @hookimpl
        def batch_start(self) -> None:
            seen.append("nothing")

    bound = plan_of(Taker()).bind(lambda call, hook, bound: bound, state="S", logger="L")
    for call in (*bound.batch_start, *bound.batch_end, *bound.epoch_end):
        call()
    assert seen == ["nothing", ("S", "L")]


def test_the_same_plugin_twice_needs_an_id() -> None:
    class Twice(Callback):
        @hookimpl
        def batch_end(self) -> None: ...

    with pytest.raises(OptionError, match=r"twice: is asked for twice under one id\. .*id='twice_2'"):
        plan_of(Twice(), Twice())
    plan = plan_of(Twice(), Twice(id="other"))  # type: ignore[call-arg]
    assert [call.plugin for call in plan.calls("batch_end")] == ["twice", "other"]


def test_a_class_instead_of_an_instance_says_so() -> None:
    with pytest.raises(PluginLoadError, match=r"Make an instance: Misspelt\(\.\.\.\)"):
        plan_of(Misspelt)


def test_importing_the_kernel_imports_neither_torch_nor_pydantic() -> None:
    import subprocess

    code = "import sys, kernel_core.registry.discovery; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
