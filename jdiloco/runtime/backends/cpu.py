"""The CPU: its memory is the host's, so everything stays where it is."""

from jdiloco.runtime.backends.description import Backend

CPU = Backend(name="cpu", platforms=("cpu",))
