"""The conformance kit: what can be proven of a plugin without knowing what it is for.

Every check trains real, tiny models with the plugin and compares runs, in processes of their own. ``kernel plugins check NAME``
runs the kit and prints the plugin's card; in a package's tests one function does:

    @pytest.mark.conformance("my_plugin")
    def test_it_conforms(conformance_check):
        conformance_check()

What a plugin declares (``example``, ``neutral``, ``commutes``, ``split_invariant``, ``unsupported``) is described at
``kernel_core.registry.base.Plugin``.

* ``subject.py``: the plugin that is checked.
* ``cases.py``: the models and their data.
* ``runs.py``: one run, and all that is noted of it; ``watching.py``: what is watched in it; ``served.py``: the processes.
* ``kit.py``: starts runs and compares them; what a check is and says.
* ``checks/``: the checks.
* ``card.py``: their results, for people and as a document.
"""
