"""Memory that several processes map: anonymous files (memfd), handed to a worker as a descriptor.

A memfd has no name in any file system. It is gone with the last process that has it open or mapped, however these
end, so there is no segment to leak and nothing to clean up after a kill -9 (``multiprocessing.shared_memory`` has
names, and a resource tracker that forgets them when it is killed itself). The kernel zeroes it and gives pages on
first touch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import EnvironmentProblem, UsageError


class SharedMemory:
    """A run of bytes that can grow.

    Args:
        fd: of a memfd; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._bytes: NDArray[np.uint8] = np.zeros(0, np.uint8)

    @classmethod
    def create(cls, name: str) -> SharedMemory:
        """Empty; ``name`` shows in /proc.

        Raises:
            UsageError: this system has no memfd.
        """
        if sys.platform != "linux":
            raise UsageError("needs Linux's anonymous shared memory", where="--split")
        return cls(os.memfd_create(f"quantkit-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    def resize(self, nbytes: int) -> None:
        """Grow; never shrinks. Other processes see the new part once they map it.

        Raises:
            EnvironmentProblem: the system refuses so much.
        """
        try:
            os.ftruncate(self.fd, max(nbytes, os.fstat(self.fd).st_size))
        except OSError as error:
            raise EnvironmentProblem(
                f"{nbytes} bytes of shared memory: {error.strerror}", hint="A smaller --kv-memory may do."
            ) from error

    def seal(self) -> None:
        """The size is final: nobody can shrink it under the others, which would end them with SIGBUS."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def map(self, nbytes: int) -> NDArray[np.uint8]:
        """The first ``nbytes``, writable, uint8 ``[nbytes]``; an earlier one stays valid while it is used.

        Raises:
            ValueError: it is not that large.
        """
        if len(self._bytes) < nbytes:
            size = os.fstat(self.fd).st_size
            if size < nbytes:
                raise ValueError(f"{nbytes} bytes of shared memory wanted, there are {size}")
            self._bytes = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        return self._bytes[:nbytes]

    def close(self) -> None:
        """What is mapped stays mapped until nobody uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._bytes = np.zeros(0, np.uint8)
