"""Exceptions and warnings of lapwing: every message says what was found, what was expected, and the remedy.

All errors derive from `LapwingError`; those about the user's input are also `ValueError`s, so that code which
catches the built-in keeps working.
"""

from __future__ import annotations


class LapwingError(Exception):
    """Base of every error that lapwing raises on purpose."""


class DataError(LapwingError, ValueError):
    """A batch, a loader or a target is empty, non-finite or of the wrong shape."""


class MissingKeyError(DataError, KeyError):
    """A batch that is a mapping lacks an entry."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class LikelihoodError(LapwingError, ValueError):
    """Targets or outputs do not fit the likelihood, or the likelihood cannot do what was asked."""


class ModelError(LapwingError, ValueError):
    """The model cannot be linearised as it is: train mode, coupled samples, no trainable parameters, wrong device."""


class UnsupportedOperationError(ModelError):
    """A parameter is used by an operation that the requested structure has no rule for."""


class ParameterError(LapwingError, ValueError):
    """A parameter selection, a flat vector or an index does not fit the parameter space."""


class CurvatureError(LapwingError, ValueError):
    """A curvature or a precision is not what the operation needs: not PSD, wrong size, a prior it cannot carry."""


class OptionError(LapwingError, ValueError):
    """An option of the public face that is unknown, or that does not go with the others."""


class StorageError(LapwingError, ValueError):
    """A file that is truncated, damaged, not ours, of a later version or of something else; or one not written."""


class NotFittedError(LapwingError, RuntimeError):
    """A posterior was asked for something before it has seen data."""


class RanksError(LapwingError, RuntimeError):
    """Another process of the group has failed, does not answer, or has other data, weights or options than this one."""


class LapwingWarning(UserWarning):
    """Category of every warning that lapwing issues."""
