"""What holds of a model that a plugin has changed."""

from __future__ import annotations

from typing import Any

from kernel_core.testing.conformance.kit import Kit, RefusedError, RefutedError, Verdict, check

EXPORTED = 1e-5  # in float32


@check("surgery", "the changed model trains whole, what was shared still is, and each change is reported")
def surgery(kit: Kit) -> tuple[Verdict, str] | None:
    """Look at the report and at the parameters."""
    if not kit.subject.does_surgery:
        return "does not apply", "it does not change the model"
    found = kit.train()
    if found["outside"]:
        raise RefutedError(f"the parameter {found['outside'][0]} is to be trained, and no optimizer holds it")
    for group in kit.train(plugin=False, case=kit.case)["shared"]:
        kept = {*group} & {*found["weights"]}
        if len(kept) > 1 and not any(kept <= {*other} for other in found["shared"]):
            raise RefutedError(f"the model shares {' and '.join(group)}, and with it they are parted")
    if not found["surgery"]:
        raise RefutedError(
            "it changes the model without a word. Expected report.record(path, old, new, what) for each change"
        )
    for name in kit.cases if kit.full else ():
        try:
            quiet = kit.train(case=name)
        except (RefusedError, RefutedError):
            continue
        if not quiet["surgery"] and not quiet["no_effect"]:
            raise RefutedError(f"on {name} it changes nothing, and that is not reported")
    return "proven", f"{len(found['surgery'])} changes in {kit.case}"


@check("export", "the model it leaves can be exported by torch.export, and computes the same then")
def export(kit: Kit) -> tuple[Verdict, str] | None:
    """Export the model with its changes."""
    if not kit.subject.does_surgery:
        return "does not apply", "it does not change the model"
    folder = kit.train()["folder"]
    (bare,) = kit.call("export", request=None, options={}, folder=f"{folder}/bare", case=kit.case)
    if bare.value is None or "error" in bare.value:
        return "does not apply", f"{kit.case} cannot be exported without it either"
    asked: dict[str, Any] = {"request": kit.subject.request, "options": dict(kit.subject.options)}
    (ended,) = kit.call("export", **asked, folder=f"{folder}/export", case=kit.case)
    if ended.value is None:
        raise RefutedError(f"the process died: {ended.output[-300:]}")
    if "error" in ended.value:
        raise RefutedError(f"torch.export fails on the changed model: {ended.value['error']}")
    if ended.value["difference"] > EXPORTED:
        raise RefutedError(f"the exported model computes something else: it differs by {ended.value['difference']:.3g}")
    return None
