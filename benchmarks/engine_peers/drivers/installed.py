"""Which of the peers named on the command line, as NAME=MODULE,MODULE, this interpreter has: JSON of a name's version,
and of its modules that are not there. They are looked for and not imported, so it takes a moment.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec


def main() -> None:
    packages = packages_distributions()
    found = {}
    for text in sys.argv[1:]:
        name, _, modules = text.partition("=")
        first, *others = modules.split(",")
        if find_spec(first):
            said = version(packages[first][0]) if first in packages else "of no version"
            found[name] = {"version": said, "missing": [each for each in others if not find_spec(each)]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
