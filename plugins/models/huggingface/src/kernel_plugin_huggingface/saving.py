"""Models with their tokenizers and adapters in folders, as Hugging Face's libraries write and read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel_core.errors import ConfigError

from kernel_plugin_huggingface.adapters import import_peft, is_peft_model, without_adapters
from kernel_plugin_huggingface.libraries import prepare_imports
from kernel_plugin_huggingface.loading import load_model, saved_tokenizer

ADAPTER_FILE = "adapter_config.json"
ADAPTER_FOLDER = "adapter"


def save(model: Any, tokenizer: Any, folder: Path, adapters_only: bool) -> None:
    """Write a model, which may have adapters, and a tokenizer, which may be None.

    Args:
        folder: Made if need be.
        adapters_only: Of a model with adapters write only those; else the model goes to ``folder``, and the adapters to
            the folder ``adapter`` in it.
    """
    adapters = folder
    if is_peft_model(model) and not adapters_only:
        without_adapters(model).save_pretrained(folder)
        adapters = folder / ADAPTER_FOLDER
    model.save_pretrained(adapters)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def export_form(model: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps, so that ``kernel checkpoint export`` can write a folder without this model.

    The tokenizer is not part of it: its files may be larger than the model's.
    """
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    files = {"config.json": config}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = json.loads(generation.to_json_string())
    return {"format": "huggingface", "prefix": "model.", "files": files}


def load(folder: Path, base_model: Any = None) -> tuple[Any, Any]:
    """Read what ``save`` wrote.

    Args:
        base_model: The model below the adapters, where only they were written.

    Returns:
        The model with its adapters, in the dtype it was saved in, and the tokenizer or None.

    Raises:
        ConfigError: the folder does not hold such a model, or it is not known what the adapters belong to.
    """
    prepare_imports()
    if not folder.is_dir():
        raise ConfigError(
            f"huggingface: there is no folder {str(folder)!r}. Expected one that save_pretrained wrote. Check the path."
        )
    adapters_only = (folder / ADAPTER_FILE).exists()
    adapters = folder if adapters_only else folder / ADAPTER_FOLDER
    if base_model is None:
        base_model = load_model(_base_of(folder) if adapters_only else str(folder), dtype="auto")
    if (adapters / ADAPTER_FILE).exists():
        base_model = import_peft().PeftModel.from_pretrained(base_model, adapters, is_trainable=True)
    return base_model, saved_tokenizer(folder)


def _base_of(folder: Path) -> str:
    name = import_peft().PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not name:
        raise ConfigError(
            f"huggingface: {str(folder)!r} holds adapters without the name of the model they belong to. Expected that "
            "model. Give from_pretrained(folder, base_model=...), or save with should_save_peft_only=False."
        )
    return str(name)
