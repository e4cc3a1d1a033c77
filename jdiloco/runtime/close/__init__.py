"""Closing a round on CPU: from received bytes to committed bytes."""

from jdiloco.runtime.close.closer import Closed, FragmentCloser, Measured

__all__ = ["Closed", "FragmentCloser", "Measured"]
