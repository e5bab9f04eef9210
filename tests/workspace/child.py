import os
import warnings


class Child:
    """A fork of this process, which has what this one had; it looks at it when it is told to."""

    def __init__(self, look):
        self._hears, self._tell = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of other threads, torch's; the child does without torch.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            is_good = False
            try:
                os.close(self._tell)
                os.read(self._hears, 1)
                is_good = look()
            finally:
                os._exit(not is_good)

    def is_content(self):
        """Let it look, and return what it found."""
        for end in (self._hears, self._tell):
            os.close(end)
        return os.waitpid(self._pid, 0)[1] == 0
