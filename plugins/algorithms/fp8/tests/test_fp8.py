"""What can be said of fp8 without such a GPU: who gets it, what is read, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_core import TrainableModel, Trainer
from kernel_core.errors import OptionError, PluginLoadError, TrainerError
from kernel_plugin_fp8 import FP8, fp8_context


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 2)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"'amp_fp8' was asked for, and cpu has no fp8"):
        Trainer(model=Line(), precision="amp_fp8", device="cpu", progress_bar=False)


def test_it_does_nothing_where_the_run_has_another_precision() -> None:
    trainer = Trainer(model=Line(), algorithms=FP8(), device="cpu", progress_bar=False)
    assert trainer.plan.call("precision_context", state=trainer.state) == []


@pytest.mark.skipif("transformer_engine" in sys.modules, reason="it is installed")
def test_without_transformer_engine_it_says_what_to_install() -> None:
    with pytest.raises(PluginLoadError, match=r"needs Transformer Engine.*pip install transformer_engine"):
        fp8_context({})


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two calls that are made of it, keeping what they were given."""

    def delayed_scaling(fp8_format: str, amax_history_len: int, amax_compute_algo: str, margin: int = 0) -> Any:
        return (fp8_format, amax_history_len, amax_compute_algo, margin)

    recipe = SimpleNamespace(Format=SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"), DelayedScaling=delayed_scaling)
    package, common, pytorch = (ModuleType(f"transformer_engine{part}") for part in ("", ".common", ".pytorch"))
    common.recipe = recipe  # type: ignore[attr-defined]
    pytorch.fp8_autocast = lambda enabled, fp8_recipe: (enabled, fp8_recipe)  # type: ignore[attr-defined]
    package.common, package.pytorch = common, pytorch  # type: ignore[attr-defined]
    for module in (package, common, pytorch):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("transformer_engine")
def test_options_go_over_the_defaults_of_the_reference() -> None:
    assert fp8_context({})() == (True, ("hybrid", 16, "max", 0))
    assert fp8_context({"fp8_format": "E4M3", "margin": 2})() == (True, ("e4m3", 16, "max", 2))
    for wrong in ({"fp8_format": "E9M9"}, {"history": 3}):
        with pytest.raises(OptionError, match=r"fp8\.precision_config: got .*Expected arguments of DelayedScaling"):
            fp8_context(wrong)
