"""A plugin that says what it does not support, which is no fault."""

from kernel_core import Algorithm, hookimpl


class Narrow(Algorithm):
    """Works in one process, on whole batches, and cannot be resumed; it says so."""

    unsupported = {
        "ddp": "it counts what one process sees",
        "fsdp": "it counts what one process sees",
        "microbatching": "it counts whole batches",
        "resume": "it counts from the start",
    }

    @hookimpl
    def batch_end(self) -> None:
        pass
