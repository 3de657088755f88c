from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from kernel_core import Algorithm, Time
from kernel_core.errors import OptionError
from kernel_core.registry.options import to_json
from pydantic import Field
from torch import nn


class Sharpen(Algorithm):
    def __init__(
        self,
        rho: Annotated[float, Field(gt=0)] = 0.05,
        mode: Literal["a", "b"] = "a",
        names: list[str] | None = None,
        function: Callable[..., Any] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.rho, self.mode, self.module = rho, mode, module


class Needs(Algorithm):
    def __init__(self, size: int) -> None:
        self.size = size


class Bare(Algorithm):
    pass


def test_options_are_recorded_with_defaults_for_instances_too() -> None:
    module = nn.Linear(1, 1)
    plugin = Sharpen(1, mode="b", module=module)
    assert plugin.rho == 1.0
    assert plugin.module is module
    assert plugin.options == {"rho": 1.0, "mode": "b", "names": None, "function": None, "module": module}
    assert repr(Sharpen()).startswith("Sharpen(rho=0.05, mode='a'")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"roh": 1.0}, r"sharpen\.roh: unknown option\. Did you mean 'rho'\? It takes rho, mode"),
        ({"rho": "big"}, r"sharpen\.rho: got 'big', expected .*float"),
        ({"rho": "0.1"}, r"sharpen\.rho: got '0\.1', expected"),
        ({"rho": True}, r"sharpen\.rho: got True, expected"),
        ({"rho": -1.0}, r"sharpen\.rho: got -1\.0, .*greater than 0"),
        ({"mode": "c"}, r"sharpen\.mode: got 'c', expected Literal\['a', 'b'\]"),
        ({"names": ["x", 3]}, r"sharpen\.names\[1\]: got \['x', 3\]"),
        ({"module": 3}, r"sharpen\.module: got 3"),
    ],
)
def test_a_wrong_option_is_one_clear_error(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sharpen(**kwargs)


def test_a_missing_option_names_what_is_expected() -> None:
    with pytest.raises(OptionError, match=r"needs\.size: missing, expected int\. Give it a value"):
        Needs()  # type: ignore[call-arg]


def test_a_plugin_without_options_takes_none() -> None:
    with pytest.raises(OptionError, match=r"bare: unknown option p\. It takes no options"):
        Bare(p=1)  # type: ignore[call-arg]


def test_an_id_belongs_to_every_plugin() -> None:
    assert Bare(id="second").id == "second"  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"bare\.id: got 'a b'"):
        Bare(id="a b")  # type: ignore[call-arg]


def test_what_json_cannot_hold_is_stored_by_name_and_marked() -> None:
    assert to_json({"f": nn.Linear, "m": nn.ReLU(), "t": Time(3, "ba"), "s": {2, 1}, "x": float("inf")}) == {
        "f": {"$object": "torch.nn.modules.linear.Linear"},
        "m": {"$object": "torch.nn.modules.activation.ReLU"},
        "t": "3ba",
        "s": [1, 2],
        "x": {"$float": "inf"},
    }


def test_an_annotation_that_cannot_be_resolved_leaves_the_others_checked() -> None:
    class Partly(Algorithm):
        def __init__(self, device: "NowhereImported" = None, size: "int" = 1) -> None: ...  # type: ignore[name-defined] # noqa: F821

    Partly(device="anything")
    with pytest.raises(OptionError, match=r"partly\.size: got 'x', expected int"):
        Partly(size="x")
