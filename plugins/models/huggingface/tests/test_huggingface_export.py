"""From transformers into a run, from a run into a checkpoint, and from there back to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from kernel_cli.main import cli
from kernel_core import Trainer
from kernel_plugin_huggingface import HuggingFaceModel
from safetensors import safe_open
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


def gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def trainer(model: HuggingFaceModel, **arguments: Any) -> Trainer:
    rows = [{"input_ids": torch.arange(8) % 32} for _ in range(4)]
    return Trainer(
        model=model,
        train_dataloader=DataLoader(rows, 2),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        **arguments,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    with trainer(HuggingFaceModel(gpt2(1))) as made:
        made.fit()
        return made.save_checkpoint(tmp_path / "checkpoints")


def export(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["checkpoint", "export", *arguments, "--format", "huggingface"])


def test_a_folder_is_loaded_by_transformers_with_the_very_weights(checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    result = export(checkpoint, str(out))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    state = trainer(HuggingFaceModel(gpt2(2)), load_path=checkpoint).state.model.model.state_dict()  # type: ignore[union-attr, operator]
    whole = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(whole, GPT2LMHeadModel)
    found = whole.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    body = AutoModel.from_pretrained(out).state_dict()
    assert body
    assert all(torch.equal(value, state[f"transformer.{name}"]) for name, value in body.items())


def test_the_dtype_is_that_of_the_weights_and_of_the_configuration(checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "half"
    assert export(checkpoint, str(out), "--dtype", "bfloat16").exit_code == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in AutoModel.from_pretrained(out).state_dict().values()} == {torch.bfloat16}
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_a_folder_of_transformers_begins_a_run(tmp_path: Path) -> None:
    network = gpt2(3)
    network.save_pretrained(tmp_path / "theirs")
    with trainer(HuggingFaceModel(gpt2(4)), load_path=str(tmp_path / "theirs")) as made:
        found = made.state.model.model.state_dict()  # type: ignore[union-attr, operator]
    assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


def test_adapters_alone_are_no_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = HuggingFaceModel(gpt2(1), peft_config={"r": 2, "target_modules": ["c_attn"]})
    assert model.export_form() is None
    with trainer(model) as made:
        checkpoint = made.save_checkpoint(tmp_path / "checkpoints")
    result = export(checkpoint, str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "without adapters" in result.output
