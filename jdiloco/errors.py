"""Every exception the library raises, grouped by what the caller would do next.

JDilocoError
|- UsageError             (also a ValueError) the call itself is wrong: change it
|  |- RunConfigMismatch       the run was created with other settings
|  |- SchemaMismatch          the run trains another model
|  |- RunKeyMismatch          the run is signed with a key that this node lacks, or is not signed
|  `- OutOfRange              a round's result cannot be held in a parameter's type
|- StoreUnavailable       no answer, or a doubtful one: the write may have landed; try again
|  `- StoreDenied             no such bucket, or not for these credentials: put that right first
|- StoreIgnoresConditions this store cannot carry a run: choose another
|- FormatError            bytes that are damaged, forged or of a format this build cannot read
|- NodeIdInUse            another living node has this id: choose another
|- NodeSuperseded         a newer incarnation of this node exists: stop
|- RunReplaced            the mailbox now holds another run: stop
|- BarrierTimeout         (also a TimeoutError) too few nodes came to a barrier in time
`- ClosingFailed          this node can no longer close rounds or reach its mailbox: restart it
"""


class JDilocoError(Exception):
    """The root of them all."""


class UsageError(JDilocoError, ValueError):
    """The call is wrong. The message says what was found, what was wanted and the way out."""


class RunConfigMismatch(UsageError):
    """The run was created with other settings. Names each that differs, with both values."""


class SchemaMismatch(UsageError):
    """The run trains another model. Names each tensor that differs, with both values."""


class RunKeyMismatch(UsageError):
    """The run has a key and this node has none or another, or the other way round."""


class OutOfRange(UsageError):
    """A round's result cannot be held in a parameter's type: it would be infinite."""


class StoreUnavailable(JDilocoError):
    """The store gave no answer or a doubtful one. A write may have landed all the same."""


class StoreDenied(StoreUnavailable):
    """The bucket is not there, or is not for these credentials. Waiting alone will not help."""


class StoreIgnoresConditions(JDilocoError):
    """Two creations of one key both succeeded. No run can be kept on such a store."""


class FormatError(JDilocoError):
    """Bytes that are damaged, forged, or written in a format this build does not read."""


class NodeIdInUse(JDilocoError):
    """A node with this id is alive. Names host and process of both."""


class NodeSuperseded(JDilocoError):
    """A newer incarnation of this node exists, so this one must not write any more."""


class RunReplaced(JDilocoError):
    """The mailbox holds another run than the one that was joined."""


class BarrierTimeout(JDilocoError, TimeoutError):
    """Too few nodes came to a barrier in time. Names those that came."""


class ClosingFailed(JDilocoError):
    """A thread of the library ended on an error; `__cause__` holds it."""
