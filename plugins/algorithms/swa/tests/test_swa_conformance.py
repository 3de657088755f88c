"""The conformance kit of the kernel, on this plugin."""

import pytest


@pytest.mark.conformance("swa")
def test_it_conforms(conformance_check):
    conformance_check()
