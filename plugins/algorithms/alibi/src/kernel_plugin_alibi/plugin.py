"""The plugin: ALiBi at surgery, shorter training sequences at every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kernel_core import Algorithm, hookimpl
from pydantic import Field

from kernel_plugin_alibi import hookspecs
from kernel_plugin_alibi.batch import num_pieces, reshape_batch
from kernel_plugin_alibi.bias import DEFAULT_MAX_BIAS_BYTES
from kernel_plugin_alibi.positions import ZeroPositionEmbedding
from kernel_plugin_alibi.surgery import apply_alibi, merge_policies
from kernel_plugin_alibi.transformers_policies import require_transformers

if TYPE_CHECKING:
    from kernel_core import State
    from kernel_core.registry.plan import HookAdder
    from kernel_core.surgery import SurgeryReport
    from torch import nn


class Alibi(Algorithm):
    """Replace learned position embeddings by linear attention biases, and train on shorter sequences.

    Knows GPT-2, BERT and RoBERTa of transformers 5; other packages add model classes through the hook
    ``alibi_attention_policies``.

    Args:
        max_sequence_length: The longest sequence to allow, in positions; None for no limit. Biases are built for the
            lengths at hand, so a large limit costs nothing.
        train_sequence_length_scaling: Cut each training row of token ids into 1/s rows of s times the length; 1 to
            train on whole rows. One over a whole number.
        max_bias_bytes: The most memory that one bias, shared by all layers, may take; 2 GiB by default.

    Raises:
        PluginLoadError: transformers is missing or older than 5.
        OptionError: an option is out of its range.

    Source:
        Press, Smith, Lewis, Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation
        (ICLR 2022).

    Example:
        >>> trainer = Trainer(model=model, algorithms=[Alibi(max_sequence_length=4096)])
    """

    roles = frozenset({"replaces-modules", "reshapes-sequences"})
    structural = True
    before = frozenset({"role:warms-sequence-length"})
    after = frozenset({"role:selects-samples"})

    def __init__(
        self,
        max_sequence_length: Annotated[int, Field(ge=1)] | None = None,
        train_sequence_length_scaling: Annotated[float, Field(gt=0, le=1)] = 0.25,
        max_bias_bytes: Annotated[int, Field(ge=1)] = DEFAULT_MAX_BIAS_BYTES,
    ) -> None:
        require_transformers()
        self.num_pieces = num_pieces(train_sequence_length_scaling)
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self.max_bias_bytes = max_bias_bytes

    def active_hooks(self) -> set[str] | None:
        """Leave out ``after_dataloader`` where training rows keep their length."""
        return None if self.num_pieces > 1 else {"kernel_addhooks", "transform_model", "model_materialized"}

    @hookimpl
    def kernel_addhooks(self, hooks: HookAdder) -> None:
        """Add ``alibi_attention_policies``."""
        hooks.add(hookspecs)

    @hookimpl
    def transform_model(self, model: nn.Module, report: SurgeryReport, state: State) -> None:
        """Change every module that a policy matches."""
        policies, clashes = merge_policies(state.plan.call("alibi_attention_policies"))
        report.remarks += [f"alibi: several plugins gave a policy for {name}; the last one counts." for name in clashes]
        for change in apply_alibi(model, self.max_sequence_length, policies, max_bias_bytes=self.max_bias_bytes):
            report.record(change.path, change.old, change.new, change.what)

    @hookimpl
    def model_materialized(self, model: nn.Module) -> None:
        """Zero the tables again: a meta tensor has no values to zero."""
        for module in model.modules():
            if isinstance(module, ZeroPositionEmbedding):
                module.reset_parameters()

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Cut the rows of the batch."""
        state.batch = reshape_batch(state.batch, self.train_sequence_length_scaling)
