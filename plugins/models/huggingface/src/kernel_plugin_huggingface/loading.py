"""Configurations, models and tokenizers of transformers, from a folder, the hub or nothing but a model type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from kernel_core.errors import ConfigError, OptionError
from kernel_core.naming import did_you_mean

Task = Literal["auto", "sequence_classification", "causal_lm", "masked_lm", "seq2seq_lm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# For each task transformers' class, and its table of the architectures that belong to the task. The order counts: Bart's
# one class is in the tables of two tasks.
TASKS = {
    "sequence_classification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "seq2seq_lm": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "causal_lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked_lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def load_model(
    name: str,
    task: Task = "auto",
    pretrained: bool = True,
    config: dict[str, Any] | None = None,
    num_labels: int | None = None,
    dtype: Dtype = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return a model of transformers; the arguments are those of ``huggingface``.

    Raises:
        OptionError: the task is unknown or not given, or a configuration has no such entry.
        ConfigError: there is no such folder, or the hub has no such model or cannot be reached.
    """
    import transformers

    if not Path(name).is_dir() and (os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1):
        raise ConfigError(
            f"huggingface.model: there is no folder {name!r}. Expected one with a saved model, or a name on the Hugging "
            "Face hub. Check the path."
        )
    labels = {} if num_labels is None else {"num_labels": num_labels}
    made = load_config(name, pretrained, {**(config or {}), **labels}, trust_remote_code)
    auto_class = getattr(transformers, TASKS[_task(made, task, num_labels)][0])
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        if not pretrained:
            options["dtype"] = (made.dtype or "float32") if dtype == "auto" else dtype
            return auto_class.from_config(made, **options)
        if num_labels is not None:
            options["ignore_mismatched_sizes"] = True  # a head for other labels is drawn anew
        return auto_class.from_pretrained(name, config=made, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"huggingface.model: cannot make {auto_class.__name__} of {name!r}: {first_line(error)} Expected a model of "
            "that kind, whose weights fit its configuration. Check task and config."
        ) from error


def load_config(name: str, pretrained: bool, overrides: dict[str, Any], trust_remote_code: bool = False) -> Any:
    """Return the configuration of a folder, of the hub, or of a model type, with ``overrides`` in it.

    Raises:
        OptionError: a configuration of that type has no such entry.
        ConfigError: it cannot be read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not pretrained and not Path(name).is_dir() and name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
        plain = config_class()
        unknown = [key for key in overrides if not hasattr(plain, key)]
        made = plain if unknown else config_class(**overrides)
    else:
        try:
            made, unused = AutoConfig.from_pretrained(
                name, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **overrides
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"huggingface.model: cannot read the configuration of {name!r}: {first_line(error)} Expected a folder "
                "with the config.json of a saved model, or a name on the Hugging Face hub. Check the spelling and the "
                "network. A folder of adapters alone is read by HuggingFaceModel.from_pretrained."
            ) from error
        unknown = [key for key in overrides if key in unused]
    if unknown:
        raise OptionError(
            f"huggingface.config.{unknown[0]}: a {type(made).__name__} has no such entry."
            f"{did_you_mean(unknown[0], made.to_dict())} Expected one of its entries. Correct the name or leave it out."
        )
    return made


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or of the hub.

    Raises:
        ConfigError: there is none, or the hub cannot be reached.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"huggingface.tokenizer: cannot read {name!r}: {first_line(error)} Expected a folder with a tokenizer or a "
            "name on the Hugging Face hub. Check the spelling and the network."
        ) from error


def saved_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that was saved in ``folder``, None if there is none or no such folder."""
    if any((Path(folder) / name).exists() for name in TOKENIZER_FILES):
        return load_tokenizer(str(folder), trust_remote_code)
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, as a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") + "."


def _task(config: Any, task: str, num_labels: int | None) -> str:
    if task == "auto":
        task = _task_of(config.architectures or [])
    if task not in TASKS:
        raise OptionError(
            f"huggingface.task: got {task!r}, expected auto, {', '.join(TASKS)}.{did_you_mean(task, TASKS)}"
        )
    if num_labels is not None and task != "sequence_classification":
        raise OptionError(
            f"huggingface.num_labels: got {num_labels} for the task {task}. Expected it for sequence_classification only. "
            "Leave it out, or set task=sequence_classification."
        )
    return task


def _task_of(architectures: list[str]) -> str:
    from transformers.models.auto import modeling_auto

    for task, (_, table) in TASKS.items():
        for names in getattr(modeling_auto, table).values():
            if set(architectures) & ({names} if isinstance(names, str) else set(names)):
                return task
    raise OptionError(
        f"huggingface.task: got 'auto', and the configuration names {', '.join(architectures) or 'no architecture'}, which "
        f"says no task. Expected one of {', '.join(TASKS)}. Set task."
    )
