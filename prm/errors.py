"""What can go wrong, as one small tree; the command line prints any of these as one line and exits with 2.

PrmError
├── DataError(ValueError)     a file or record is not what it should be; names file and line
├── UsageError(ValueError)    an option or a combination of options makes no sense
├── ModelError(ValueError)    a checkpoint is missing, has no head, or does not fit its tokenizer
└── EnvError(RuntimeError)    an environment raised, or broke its protocol
    └── ReplayError           replaying a trajectory gave something else than what was recorded; names the step
"""


class PrmError(Exception):
    """The root of this package's errors."""


class DataError(PrmError, ValueError):
    """A record or file is not what it should be. The message says where, what came and what was expected."""


class UsageError(PrmError, ValueError):
    """An option, or a combination of options, makes no sense."""


class ModelError(PrmError, ValueError):
    """A checkpoint is missing, incomplete, or does not fit its tokenizer."""


class EnvError(PrmError, RuntimeError):
    """An environment raised, or did not keep to the protocol of `prm.env.Env`."""


class ReplayError(EnvError):
    """A replay gave another observation than the recorded one; the message names the step (0-based)."""
