"""The protocol and its simulator without the type checker of the test run.

The checker looks at every call of every function. It is there for shapes of arrays, of which there
are none here, and makes a simulated run fifty times slower. So these modules are imported a second
time, past it; nothing of them may meet what was imported the usual way.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from jdiloco import errors, events
    from jdiloco.protocol import (
        chain,
        closing,
        keys,
        learner,
        lease,
        member,
        records,
        schedule,
        sweep,
    )
    from jdiloco.protocol.member import close, follow, listen
    from jdiloco.testing import invariants, simulate
    from jdiloco.testing.simulate import control, history, mailbox, node, values
else:

    def _of_ours(name: str) -> bool:
        return name == "jdiloco" or name.startswith("jdiloco.")

    def _resolve_annotations(module: ModuleType) -> None:
        """msgspec does so when it first decodes a type, and looks for the module by its name."""
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                msgspec.json.Decoder(value)

    def _import(*names: str) -> list:
        checked = {name: sys.modules.pop(name) for name in list(sys.modules) if _of_ours(name)}
        finders = list(sys.meta_path)
        sys.meta_path[:] = [
            f for f in finders if type(f).__module__.partition(".")[0] != "jaxtyping"
        ]
        try:
            modules = [importlib.import_module(f"jdiloco.{name}") for name in names]
            for module in [sys.modules[name] for name in list(sys.modules) if _of_ours(name)]:
                _resolve_annotations(module)
            return modules
        finally:
            sys.meta_path[:] = finders
            for name in [name for name in sys.modules if _of_ours(name)]:
                del sys.modules[name]
            sys.modules.update(checked)

    (
        errors,
        events,
        chain,
        closing,
        keys,
        learner,
        lease,
        member,
        records,
        schedule,
        sweep,
        close,
        follow,
        listen,
        invariants,
        simulate,
        control,
        history,
        mailbox,
        node,
        values,
    ) = _import(
        "errors",
        "events",
        "protocol.chain",
        "protocol.closing",
        "protocol.keys",
        "protocol.learner",
        "protocol.lease",
        "protocol.member",
        "protocol.records",
        "protocol.schedule",
        "protocol.sweep",
        "protocol.member.close",
        "protocol.member.follow",
        "protocol.member.listen",
        "testing.invariants",
        "testing.simulate",
        "testing.simulate.control",
        "testing.simulate.history",
        "testing.simulate.mailbox",
        "testing.simulate.node",
        "testing.simulate.values",
    )

__all__ = [
    "chain",
    "close",
    "closing",
    "control",
    "errors",
    "events",
    "follow",
    "history",
    "invariants",
    "keys",
    "learner",
    "lease",
    "listen",
    "mailbox",
    "member",
    "node",
    "records",
    "schedule",
    "simulate",
    "sweep",
    "values",
]
