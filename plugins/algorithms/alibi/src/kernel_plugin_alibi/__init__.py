"""ALiBi: linear attention biases instead of learned position embeddings.

Importing this package needs torch and kernel_core, not transformers: that is imported by the first model it changes.
"""

from kernel_plugin_alibi.batch import reshape_batch
from kernel_plugin_alibi.bias import AlibiBias, alibi_slopes
from kernel_plugin_alibi.plugin import Alibi
from kernel_plugin_alibi.policies import AlibiRequest, AttentionPolicy, Change
from kernel_plugin_alibi.positions import ZeroPositionEmbedding
from kernel_plugin_alibi.surgery import apply_alibi, merge_policies
from kernel_plugin_alibi.transformers_policies import builtin_policies, transformers_policy

__all__ = [
    "Alibi",
    "AlibiBias",
    "AlibiRequest",
    "AttentionPolicy",
    "Change",
    "ZeroPositionEmbedding",
    "alibi_slopes",
    "apply_alibi",
    "builtin_policies",
    "merge_policies",
    "reshape_batch",
    "transformers_policy",
]
