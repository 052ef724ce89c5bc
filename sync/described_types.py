"""Types of messages, described to msgspec before any thread reads one.

msgspec looks up a struct's fields when it is first read, and uses that before it is complete. Two threads which read
a struct that has others in it, both for the first time, can end the process so (SIGSEGV; seen with msgspec 0.22).
"""

from typing import Any

import msgspec


def describe_types(*kinds: Any) -> None:
    """Have msgspec look up the fields of types or unions, and of all within them. Modules call it at import."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
