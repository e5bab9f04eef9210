"""The module `os` as a bad medium gives it to one module: one of its functions fails, in one of its calls or in all."""

import os


class FailingOs:
    """Stands for `os`: what is not asked to fail works as ever.

    Args:
        function: the one that fails.
        number: the errno that it fails with.
        at: how many of its calls go well before.
        times: how many then fail.
        works: whether what was asked for is done nevertheless, as a close is that says that the disk was full.
    """

    def __init__(self, function, number, *, at=0, times=1, works=False):
        self._failing = (function, number, range(at, at + times), works)
        self.calls = []

    def __getattr__(self, name):
        function, number, failing, works = self._failing
        if name != function:
            return getattr(os, name)

        def called(*args, **kwargs):
            self.calls.append(args)
            fails = len(self.calls) - 1 in failing
            result = getattr(os, name)(*args, **kwargs) if works or not fails else None
            if fails:
                raise OSError(number, os.strerror(number))
            return result

        return called
