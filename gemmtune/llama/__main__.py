"""`python -m gemmtune.llama`: the reference job."""

import os
import sys

from gemmtune.errors import UsageError
from gemmtune.llama.options import parse


def main() -> int:
    try:
        options = parse()
    except UsageError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"gemmtune.llama: {e}", file=sys.stderr)
        return e.exit_code
    from gemmtune.llama import train  # torch is imported for a real run only

    return train.main(options)


if __name__ == "__main__":
    sys.exit(main())
