"""Keys that Composer's users write and that torch's second FSDP has no need for, each with the reason. A table, nothing else."""

from __future__ import annotations

from typing import Any

# key -> (the values that ask for nothing, why the others change nothing)
NOT_NEEDED: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_wrap": ((True,), "blocks are found by themselves; fsdp_wrap_fn or _fsdp_wrap of the model decides otherwise"),
    "backward_prefetch": (
        ("BACKWARD_PRE",),
        "the next block is always gathered while the present one computes its gradients",
    ),
    "keep_low_precision_grads": (
        (False,),
        "gradients have the dtype of the optimizer's parameters after the reduction",
    ),
    "limit_all_gathers": ((True,), "memory is freed in the order of the streams, so that gathers need no limit"),
    "load_monolith_rank0_only": ((False,), "a checkpoint is read in parts by all ranks"),
    "load_planner": ((), "checkpoints have a format of their own"),
    "save_planner": ((), "checkpoints have a format of their own"),
    "sharded_ckpt_prefix_dir": (("ep{epoch}-ba{batch}",), "every checkpoint has a folder of its own"),
    "state_dict_type": (("sharded",), "checkpoints are sharded, and any number of ranks reads them"),
    "sync_module_states": ((), "every rank begins with rank 0's weights"),
    "te_checkpoint_wrapper": ((False,), "recomputation goes through torch"),
    "te_shard_fp8_weight": ((False,), "weights are sharded in the dtype in which the optimizer holds them"),
    "use_orig_params": ((True,), "parameters are always the model's own"),
    "activation_checkpointing_reentrant": ((False,), "recomputation is non-reentrant, which sharding needs"),
}


def remarks(given: dict[str, Any]) -> list[str]:
    """Return a line for each key that was given and changes nothing."""
    return [
        f"fsdp.{key}: {value!r} changes nothing: {NOT_NEEDED[key][1]}."
        for key, value in given.items()
        if value is not None and value not in NOT_NEEDED[key][0]
    ]
