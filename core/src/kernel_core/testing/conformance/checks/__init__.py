"""The checks, in the order in which cards list them. Importing this package registers them."""

from kernel_core.testing.conformance.checks import start, training, state, surgery, ranks, leaving, engines  # noqa: F401, I001
from kernel_core.testing.conformance.kit import CHECKS, ENGINE_CHECKS

__all__ = ["CHECKS", "ENGINE_CHECKS"]
