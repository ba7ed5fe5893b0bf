"""Records of steps without a device: what is replayed is computed again."""

from __future__ import annotations


class Repeat:
    """What a device records, the CPU does again; ``took_s``: of each recording, in turn."""

    def __init__(self, *took_s):
        self.num_replays, self.num_recorded, self.took_s = 0, 0, took_s

    def __call__(self, run):
        run()
        which, self.num_recorded = self.num_recorded, self.num_recorded + 1

        def replay():
            self.num_replays, self.last = self.num_replays + 1, which
            run()

        return replay

    def seconds(self, replay):
        replay()
        return self.took_s[self.last]


class Forget(Repeat):
    """Of these recordings nothing is left when they are replayed."""

    def __init__(self, which, *took_s):
        super().__init__(*took_s)
        self.which = which

    def __call__(self, run):
        replay = super().__call__(run)
        return (lambda: None) if self.num_recorded - 1 in self.which else replay


class Refuse(Repeat):
    """The first of its recordings cannot be made, or the ``nth``, or (None) none."""

    def __init__(self, error, nth=0, took_s=()):
        super().__init__(*took_s)
        self.error, self.nth = error, nth

    def __call__(self, run):
        if self.nth in (None, self.num_recorded):
            self.num_recorded += 1
            raise self.error
        return super().__call__(run)
